"""lavra's own step, from its own parts, as `lavra.train.loop` puts them together; documents stay apart."""

from __future__ import annotations

import torch
from contenders.protocol import SEQUENCES, Task, Turns, Variant, count_parameters, play

from lavra import __version__
from lavra.batch import Batch
from lavra.hardware.probe import keep_freed_memory
from lavra.model.config import ModelShape
from lavra.model.decoder import Decoder
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.optim.clipping import clip_gradients
from lavra.train.loop import compiled_numerator
from lavra.train.step import accumulate


def main(task: Task, variant: Variant, turns: Turns) -> None:
    keep_freed_memory()
    model = Decoder(ModelShape(**task.shape))
    model.load_state_dict(task.weights)
    settings = OptimizerSettings(
        learning_rate=task.learning_rate, weight_decay=task.weight_decay, betas=task.betas
    )
    optimizer = build_optimizer(model, settings)
    numerator = compiled_numerator(model, "model" if variant.compile else "off")
    precision = "fp32" if variant.precision == "fp32" else "bf16"
    mask = torch.ones_like(task.positions, dtype=torch.bool)
    batch = Batch(task.tokens, task.targets, task.positions, mask, torch.arange(SEQUENCES))

    def step() -> float:
        result = accumulate(
            model, batch, micro_batch_size=variant.micro_batch, precision=precision, numerator=numerator
        )
        clip_gradients(model.parameters(), "norm", task.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return result.loss

    turns.ready(count_parameters(model), lavra=__version__)
    turns.loop(step)


if __name__ == "__main__":
    play(main)
