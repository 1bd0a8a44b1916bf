"""The plain loop of a tutorial: eager, fp32, PyTorch's defaults; causal over the whole row, documents or not."""

from __future__ import annotations

import torch
from contenders.protocol import Task, Turns, Variant, count_parameters, play
from plain_decoder import PlainDecoder, load_weights, plain_step

from lavra.model.config import ModelShape


def main(task: Task, variant: Variant, turns: Turns) -> None:
    model = PlainDecoder(ModelShape(**task.shape))
    load_weights(model, *task.separate_weights())
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=task.learning_rate, betas=task.betas, weight_decay=task.weight_decay
    )
    tokens, targets = task.tokens, task.targets
    turns.ready(count_parameters(model))
    turns.loop(lambda: plain_step(model, optimizer, tokens, targets, task.clip_norm))


if __name__ == "__main__":
    play(main)
