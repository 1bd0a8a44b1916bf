"""Bits that a model needs for whole documents, uncut, every token scored exactly once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lavra.model.decoder import Decoder

BATCH_LOGITS = 1 << 25  # elements of one scoring batch: 128 MiB of fp32


@dataclass(frozen=True)
class Window:
    """Inputs `[start, stop)` of a document; targets from `scored` on count."""

    document: int
    start: int
    scored: int
    stop: int


def windows_of(document: int, length: int, seq_len: int) -> Iterator[Window]:
    """Cover `length` targets: windows of `seq_len` that advance by half, so that every target but the
    document's first ones sees at least seq_len / 2 tokens before it."""
    stride = max(1, seq_len // 2)
    start = scored = 0
    while scored < length:
        stop = min(start + seq_len, length)
        yield Window(document, start, scored, stop)
        scored = stop
        start = min(start + stride, max(0, length - seq_len)) if stop < length else stop


@torch.no_grad()
def document_bits(model: Decoder, documents: Sequence[list[int]], *, end_id: int) -> list[float]:
    """Bits of each document's tokens and of its end token, given the end token before it.

    Args:
        documents: token ids of whole documents, without end token.

    Returns:
        -log2 p of every document; independent of the batch it was scored in (fp32 tolerance).
    """
    targets = [[*document, end_id] for document in documents]
    inputs = [[end_id, *document] for document in documents]
    windows = [w for i, t in enumerate(targets) for w in windows_of(i, len(t), model.shape.seq_len)]
    windows.sort(key=lambda w: w.stop - w.start)  # equal lengths together: little padding
    bits = [0.0] * len(documents)
    for batch in _batches(windows, BATCH_LOGITS // model.shape.vocab_size):
        nats = _window_nats(model, batch, inputs, targets)
        for window, value in zip(batch, nats.tolist(), strict=True):
            bits[window.document] += value / math.log(2)
    return bits


def _batches(windows: list[Window], max_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        if batch and (window.stop - window.start) * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _window_nats(
    model: Decoder, windows: list[Window], inputs: list[list[int]], targets: list[list[int]]
) -> Tensor:
    """Sum of -ln p over each window's scored targets, `[len(windows)]` float64."""
    width = max(w.stop - w.start for w in windows)
    tokens = torch.zeros(len(windows), width, dtype=torch.long)
    labels = torch.full_like(tokens, -100)
    for row, w in enumerate(windows):
        tokens[row, : w.stop - w.start] = torch.tensor(inputs[w.document][w.start : w.stop])
        labels[row, w.scored - w.start : w.stop - w.start] = torch.tensor(
            targets[w.document][w.scored : w.stop]
        )
    device = model.embedding.weight.device
    positions = torch.arange(width, device=device).expand(len(windows), width)
    logits = model(tokens.to(device), positions).float()
    nats = F.cross_entropy(
        logits.flatten(0, 1), labels.to(device).flatten(), ignore_index=-100, reduction="none"
    )
    return nats.view(len(windows), width).double().sum(1).cpu()
