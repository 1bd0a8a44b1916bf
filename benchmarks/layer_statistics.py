"""What the statistics of the layers cost: a training step alone and with them, in turns, in one process.

    python benchmarks/layer_statistics.py --size 3.4M

Random tokens, 8 sequences an optimizer step, AdamW, fp32, eager. The share is that of a run which looks at the layers
every `--every` steps; the ratio of pairs, so that a machine that slows down slows both.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from lavra.batch import Batch
from lavra.model.config import ModelConfig, shape_for
from lavra.model.decoder import build_decoder
from lavra.optim.build import OptimizerSettings, build_optimizer
from lavra.optim.clipping import clip_gradients
from lavra.train.config import TrainConfig
from lavra.train.layers import LayerStatistics
from lavra.train.step import accumulate
from lavra.units import parse_count

SEQUENCES = 8


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", type=parse_count, default=3_400_000, help="parameters (default: 3.4M)")
    parser.add_argument("--seq-len", type=int, default=512, help="tokens of a row (default: 512)")
    parser.add_argument("--rounds", type=int, default=8, help="pairs of steps (default: 8)")
    parser.add_argument("--every", type=int, default=TrainConfig().layers_every, help="default: %(default)s")
    options = parser.parse_args()
    shape = shape_for(ModelConfig(), options.size, vocab_size=4096, seq_len=options.seq_len)
    model = build_decoder(shape, seed=0)
    optimizer = build_optimizer(model, OptimizerSettings())
    tokens = torch.randint(4096, (SEQUENCES, shape.seq_len + 1), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(shape.seq_len).repeat(SEQUENCES, 1)
    batch = Batch(
        tokens[:, :-1],
        tokens[:, 1:],
        positions,
        torch.ones_like(positions, dtype=torch.bool),
        torch.arange(SEQUENCES),
    )

    def step(observer: LayerStatistics | None) -> float:
        start = time.perf_counter()
        accumulate(model, batch, micro_batch_size=SEQUENCES, precision="fp32")
        clip_gradients(model.parameters(), "norm", 1.0)
        if observer is not None:
            observer.before(1, model, batch)
        optimizer.step()
        if observer is not None:
            observer.after(1, model)
        optimizer.zero_grad(set_to_none=True)
        return time.perf_counter() - start

    step(LayerStatistics(1, "fp32"))  # buffers and kernels are ready
    pairs = [(step(None), step(LayerStatistics(1, "fp32"))) for _ in range(options.rounds)]
    alone, watched = (statistics.median(column) for column in zip(*pairs, strict=True))
    extra = statistics.median(with_ / without for without, with_ in pairs) - 1
    print(
        f"{shape.parameter_count():,} parameters, {shape.seq_len} tokens a row, {torch.get_num_threads()} threads"
    )
    print(
        f"step {alone:.3f} s, with statistics {watched:.3f} s: {extra:+.1%}; every {options.every} steps {extra / options.every:+.2%}"
    )


if __name__ == "__main__":
    main()
