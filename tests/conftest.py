"""Tiny models, token stores and runs that many rooms' tests share."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give

import hypothesis
import pytest

hypothesis.settings.register_profile("lavra", deadline=None)  # a busy machine is no failure
hypothesis.settings.load_profile("lavra")

END = 0  # end token of the synthetic stores


@pytest.fixture(scope="session")
def tiny_shape() -> Callable[..., Any]:
    """`tiny_shape(**overrides)` -> ModelShape of about 10k parameters."""
    from lavra.model.config import ModelShape

    def make(**overrides: Any) -> ModelShape:
        values = dict(
            vocab_size=48,
            d_model=24,
            n_layers=2,
            n_heads=4,
            n_kv_heads=2,
            d_ff=32,
            seq_len=16,
            tie_embeddings=True,
        )
        return ModelShape(**(values | overrides))

    return make


@pytest.fixture(scope="session")
def tiny_model(tiny_shape: Callable[..., Any]) -> Callable[..., Any]:
    """`tiny_model(seed=0, scale=1, **overrides)` -> Decoder; a larger scale makes its opinions stronger."""
    import torch

    from lavra.model.decoder import build_decoder

    def make(seed: int = 0, scale: float = 1.0, **overrides: Any):
        model = build_decoder(tiny_shape(**overrides), seed=seed)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter *= scale
        return model

    return make


def id_of(index: int) -> str:
    """Content id of synthetic document `index`."""
    return f"{index:032x}"


@pytest.fixture(scope="session")
def write_store() -> Callable[..., Any]:
    """`write_store(folder, parts)` -> TokenStore; parts are lists of documents without end token.

    With `sources` the documents of part p belong to source `sources[p]`.
    """
    import numpy as np

    from lavra.tokens.store import Encoded, TokenStore, token_dtype, write_part

    def write(
        folder: Path,
        parts: Sequence[Sequence[Sequence[int]]],
        vocab_size: int = 48,
        sources: Sequence[str] = (),
    ):
        dtype = token_dtype(vocab_size)
        written = 0
        for number, documents in enumerate(parts):
            tokens = [np.array([*document, END], dtype) for document in documents]
            ids = [id_of(written + i) for i in range(len(documents))]
            source = sources[number] if sources else "text"
            encoded = Encoded(tokens, ids, [len(d) for d in documents])
            with mock.patch("os.fsync"):  # hundreds of throw-away stores need no durable disk
                write_part(folder, "train", number, {source: encoded}, dtype)
            written += len(documents)
        return TokenStore(folder, "train", end_id=END, dtype=dtype)

    return write


@pytest.fixture(scope="session")
def settings() -> Callable[..., Any]:
    """`settings(**overrides)` -> TrainSettings: six sequences of 16 a step, two micro-batches."""
    from lavra.optim.build import OptimizerSettings
    from lavra.tokens.ramps import StepPlan
    from lavra.train.config import GuardConfig
    from lavra.train.state import TrainSettings

    def make(**overrides: Any) -> Any:
        values = dict(
            steps=StepPlan(6, 16),
            micro_batch_size=4,
            optimizer=OptimizerSettings(learning_rate=1e-2),
            schedule="wsd",
            warmup=3,
            clip="norm",
            grad_clip=1.0,
            precision="fp32",
            compile="off",
            checkpoint_every=1e9,
            keep_checkpoints=2,
            log_every=1,
            guard=GuardConfig(),
        )
        return TrainSettings(**(values | overrides))

    return make


@pytest.fixture(scope="session")
def stop_at() -> Callable[..., Any]:
    """`with stop_at(step, number=SIGTERM)`: we send ourselves a signal while the metrics of `step` are written."""
    import signal

    from lavra import metrics

    @contextlib.contextmanager
    def stopping(step: int, number: int = signal.SIGTERM) -> Iterator[None]:
        real = metrics.JsonlWriter.write

        def write(self, record) -> None:
            if record.get("step") == step and metrics.TRAIN_LOSS in record:
                os.kill(os.getpid(), number)
            real(self, record)

        with mock.patch.object(metrics.JsonlWriter, "write", write):
            yield

    return stopping


@pytest.fixture(scope="session")
def realdata() -> Path:
    """Folder of real corpora named by LAVRA_REALDATA; tests that need it skip without it."""
    folder = os.environ.get("LAVRA_REALDATA", "")
    if not folder:
        pytest.skip("LAVRA_REALDATA is not set")
    return Path(folder)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):
    """Where the real data is promised, nothing may be left untested: a skip is a failure."""
    outcome = yield
    report = outcome.get_result()
    if report.skipped and os.environ.get("LAVRA_REALDATA"):
        report.outcome = "failed"
        report.longrepr = f"skipped although LAVRA_REALDATA is set: {report.longrepr}"


# --- a tiny run, from raw text to report ---

TINY = """\
name: tiny
budget: {tokens: 3000}
corpus: {sources: [{path: text}], workers: 1}
model: {d_model: 32, n_layers: 1, n_heads: 1}
tokenizer: {vocab_size: 300}
tokens: {seq_len: 32}
train:
  {batch_tokens: 128, micro_batch_size: 2, compile: off, precision: fp32,
   validations: 2, validation_tokens: 64, sample_tokens: 4}
"""


@pytest.fixture(scope="session")
def write_project() -> Callable[..., Path]:
    """`write_project(folder, documents=30, seed=0)` -> recipe of a tiny run beside its text."""
    import random

    def write(folder: Path, documents: int = 30, seed: int = 0) -> Path:
        chosen = random.Random(seed)
        words = ["".join(chosen.choices("abcdefghijklmnop", k=chosen.randint(2, 8))) for _ in range(300)]
        (folder / "text").mkdir(parents=True)
        for number in range(documents):
            lines = [" ".join(chosen.choices(words, k=12)).capitalize() + "." for _ in range(25)]
            (folder / f"text/{number:05d}.txt").write_text("\n".join(lines))
        (folder / "tiny.yaml").write_text(TINY)
        return folder / "tiny.yaml"

    return write


@pytest.fixture(scope="session")
def no_measuring() -> Iterator[None]:
    """Plans are made with invented throughput: nothing here asks how fast this machine is."""
    from lavra.plan.estimates import Calibration, Probe

    speeds = {"fp32": 50.0, "bf16": 50.0}
    probes = (Probe(128, 1e7, 5000.0), Probe(320, 4e7, 2000.0))
    made_up = Calibration("cpu", speeds, "fp32", probes, 1.2, 300 << 20)
    with mock.patch("lavra.experiment.calibrate.calibrate", lambda machine, precision: made_up):
        yield


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory, write_project, no_measuring) -> Any:
    """A finished tiny run (`Run`); tests must not change its directory."""
    from lavra.recipe import load_recipe
    from lavra.stages import run_recipe

    recipe = write_project(tmp_path_factory.mktemp("trained"))
    return run_recipe(load_recipe(str(recipe), environment={}))
