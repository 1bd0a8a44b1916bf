"""Tiny models and token stores that many rooms' tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny tensors: threads cost more than they give

import pytest

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
    """`write_store(folder, shards)` -> TokenStore; shards are lists of documents without end token."""
    import numpy as np

    from lavra.tokens.store import TokenStore, token_dtype, write_shard

    def write(folder: Path, shards: Sequence[Sequence[Sequence[int]]], vocab_size: int = 48):
        dtype = token_dtype(vocab_size)
        written = 0
        for number, documents in enumerate(shards):
            tokens = [np.array([*document, END], dtype) for document in documents]
            ids = [id_of(written + i) for i in range(len(documents))]
            with mock.patch("os.fsync"):  # hundreds of throw-away stores need no durable disk
                write_shard(folder, "train", number, tokens, ids, [len(d) for d in documents], dtype)
            written += len(documents)
        return TokenStore(folder, "train", end_id=END, dtype=dtype)

    return write


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
