"""Oracles: one window over a whole document; for longer ones every target by a forward pass of its own."""

from __future__ import annotations

import math
import random
import shutil
import subprocess
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lavra.evaluate import scoring
from lavra.evaluate.compressors import xz_bytes, zstd_bytes
from lavra.evaluate.scoring import document_bits, windows_of

documents_strategy = st.lists(st.lists(st.integers(1, 47), max_size=60), min_size=1, max_size=5)


def log2_probabilities(model, inputs: list[int]) -> torch.Tensor:
    with torch.no_grad():
        logits = model(torch.tensor([inputs]), torch.arange(len(inputs))[None])[0]
    return logits.double().log_softmax(-1) / math.log(2)


def bits_of_one_window(model, document: list[int]) -> float:
    table = log2_probabilities(model, [0, *document])
    return -sum(float(table[i, token]) for i, token in enumerate([*document, 0]))


def bits_target_by_target(model, document: list[int], seq_len: int) -> float:
    """Each target by the first window, of those half a context apart, that reaches it."""
    inputs, targets, total = [0, *document], [*document, 0], 0.0
    for place, token in enumerate(targets):
        start = next(s for s in range(0, len(targets), seq_len // 2) if s + seq_len > place)
        start = min(start, max(0, len(targets) - seq_len))  # the last window is flush with the end
        total -= float(log2_probabilities(model, inputs[start : place + 1])[-1, token])
    return total


@settings(max_examples=25, deadline=None)
@given(documents=st.lists(st.lists(st.integers(1, 47), max_size=15), min_size=1, max_size=6))
def test_documents_inside_the_context_equal_one_forward_pass(tiny_model, documents) -> None:
    model = tiny_model(scale=4)
    expected = [bits_of_one_window(model, d) for d in documents]
    assert document_bits(model, documents, end_id=0) == pytest.approx(expected, abs=1e-4)


@settings(max_examples=8, deadline=None)
@given(documents=documents_strategy, seq_len=st.sampled_from([4, 7, 16]))
def test_longer_documents_equal_a_sliding_window_done_target_by_target(
    tiny_model, documents, seq_len
) -> None:
    model = tiny_model(scale=4, seq_len=seq_len)
    expected = [bits_target_by_target(model, d, seq_len) for d in documents]
    assert document_bits(model, documents, end_id=0) == pytest.approx(expected, abs=1e-3)


@settings(max_examples=100, deadline=None)
@given(length=st.integers(1, 300), seq_len=st.integers(1, 64))
def test_windows_score_each_target_once_with_half_a_context_before_it(length: int, seq_len: int) -> None:
    windows = list(windows_of(3, length, seq_len))
    assert [t for w in windows for t in range(w.scored, w.stop)] == list(range(length))
    for number, w in enumerate(windows):
        assert w.document == 3
        assert 0 <= w.start <= w.scored < w.stop <= min(w.start + seq_len, length)
        if number:
            assert w.scored - w.start >= seq_len / 2 or seq_len == 1
    assert len(windows) <= 1 + math.ceil(length / max(1, seq_len // 2))


@settings(max_examples=15, deadline=None)
@given(documents=documents_strategy, limit=st.sampled_from([1, 500, 3000, 1 << 25]), seed=st.integers(0, 9))
def test_bits_do_not_depend_on_the_batch(tiny_model, documents, limit: int, seed: int) -> None:
    model = tiny_model(scale=4)
    alone = [document_bits(model, [d], end_id=0)[0] for d in documents]
    order = random.Random(seed).sample(range(len(documents)), len(documents))
    with mock.patch.object(scoring, "BATCH_LOGITS", limit):
        together = document_bits(model, [documents[i] for i in order], end_id=0)
    assert together == pytest.approx([alone[i] for i in order], abs=1e-4)


def test_a_model_without_opinions_needs_log2_of_the_vocabulary_a_token(tiny_model) -> None:
    model = tiny_model(scale=0, vocab_size=64)
    documents = [[], [1], list(range(1, 60)), [5] * 200]
    expected = [6.0 * (len(d) + 1) for d in documents]
    assert document_bits(model, documents, end_id=0) == pytest.approx(expected, rel=1e-6)


# --- compressors ---


def sample_texts() -> list[bytes]:
    chosen = random.Random(0)
    words = ["lavra", "corpus", "token", "the", "of", "and", "evaluates", "\n", "12", "é"]
    long = " ".join(chosen.choice(words) for _ in range(20_000)).encode()
    return [b"x", b"hello hello hello", long[:2000], long, chosen.randbytes(5000)]


def size_of(command: list[str], data: bytes) -> int:
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return len(subprocess.run(command, input=data, stdout=subprocess.PIPE, check=True).stdout)


def test_xz_bytes_are_those_of_the_command() -> None:
    for data in sample_texts():
        assert xz_bytes(data) == size_of(["xz", "-9e", "-T1", "-c"], data)


def test_zstd_bytes_are_close_to_those_of_the_command() -> None:
    for data in sample_texts():
        # The command does not know the length of a pipe and adds a checksum: a few bytes of frame.
        assert abs(zstd_bytes(data) - size_of(["zstd", "-19", "-c"], data)) <= 16 + len(data) * 0.002
