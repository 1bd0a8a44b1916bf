"""Batches made ready while the step before them runs."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from lavra.batch import Batch
from lavra.tokens.sampler import Sampler


class Loader:
    """One batch ahead of training, in a thread.

    The sampler is stateless, so what was made ready and is not asked for is thrown away: nothing to save, and a
    resumed run cannot lose or repeat a batch.

    Attributes:
        waited: seconds that the last `get` had to wait.
    """

    def __init__(self, sampler: Sampler) -> None:
        self.sampler, self.waited = sampler, 0.0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="lavra-loader")
        self._ahead: tuple[NDArray[np.int64], Future[Batch]] | None = None

    def get(self, samples: NDArray[np.int64], then: NDArray[np.int64] | None = None) -> Batch:
        """The batch of `samples`; starts on that of `then`, the samples that will likely be asked for next."""
        start = time.perf_counter()
        ahead, self._ahead = self._ahead, None
        if ahead is not None and np.array_equal(ahead[0], samples):
            batch = ahead[1].result()
        else:
            batch = self.sampler.batch(samples)
        self.waited = time.perf_counter() - start
        if then is not None:
            self._ahead = (then, self._pool.submit(self.sampler.batch, then))
        return batch

    def forget(self) -> None:
        """Throw away what was made ready: the same samples may now be other rows."""
        self._ahead = None

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
