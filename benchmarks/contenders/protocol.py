"""What every contender shares: the task it is handed and the lines it speaks. Standard library and torch only.

    python -m contenders.NAME TASK VARIANT      TASK: a file of `Task.save`; VARIANT: `Variant` as JSON

    out  {"parameters": 1711296, "versions": {"torch": "2.13.0"}}       once
    in   step 2
    out  {"seconds": 0.41, "losses": [8.3312, 8.2917], "peak_mib": 612}  seconds of one step, mean over the two

The end of its input ends a contender. A step is a whole optimizer step: 8 sequences, however they are laid out.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SEQUENCES = 8  # of every optimizer step


@dataclass(frozen=True)
class Variant:
    """One way to run a contender; each is tried by `--search`.

    Attributes:
        precision: fp32, bf16-mixed (autocast over fp32 weights) or bf16-true (weights in bf16 too).
        micro_batch: sequences a forward pass; the rest of the step is gradient accumulation.
        attention: the kernel, where the contender offers a choice.
    """

    precision: str = "fp32"
    compile: bool = False
    micro_batch: int = SEQUENCES
    attention: str = ""

    def __str__(self) -> str:
        layout = f"{SEQUENCES // self.micro_batch} x {self.micro_batch}"
        parts = [self.precision, "compiled" if self.compile else "eager", layout, self.attention]
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True)
class Task:
    """What all contenders train. B = 8 sequences, T tokens each.

    Attributes:
        shape: fields of `lavra.model.config.ModelShape`.
        weights: initial weights under the names of `lavra.model.decoder.Decoder`, the same for all.
        stream: `[B, T + 1]` token ids; inputs are all but the last column, targets all but the first.
        positions: `[B, T]`, 0 at each document's first token.
    """

    shape: dict[str, Any]
    weights: dict[str, Tensor]
    stream: Tensor
    positions: Tensor
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    weight_decay: float = 0.1
    clip_norm: float = 1.0

    @property
    def tokens(self) -> Tensor:
        return self.stream[:, :-1].contiguous()

    @property
    def targets(self) -> Tensor:
        return self.stream[:, 1:].contiguous()

    def separate_weights(self) -> tuple[dict[str, Tensor], list[dict[str, Tensor]]]:
        """Weights outside the blocks, and of each block; the fused projections taken apart, in plain names."""
        outer = {"embedding": self.weights["embedding.weight"], "norm": self.weights["norm.weight"]}
        outer["head"] = self.weights.get("head.weight", outer["embedding"])
        kv = self.shape["d_model"] // self.shape["n_heads"] * self.shape["n_kv_heads"]
        blocks = []
        for index in range(self.shape["n_layers"]):
            get = {
                name.removeprefix(f"blocks.{index}.").removesuffix(".weight"): weight
                for name, weight in self.weights.items()
            }.__getitem__
            q, k, v = get("attention.qkv").split([self.shape["d_model"], kv, kv])
            gate, up = get("feed_forward.gate_up").chunk(2)
            blocks.append(
                {"q": q, "k": k, "v": v, "o": get("attention.out"), "attention_norm": get("attention_norm")}
                | {"gate": gate, "up": up, "down": get("feed_forward.out")}
                | {"feed_forward_norm": get("feed_forward_norm")}
            )
        return outer, blocks

    def named_weights(
        self, outer_names: dict[str, str], layer: str, block_names: dict[str, tuple[str, ...]]
    ) -> dict[str, Tensor]:
        """The weights under a peer's names.

        Args:
            outer_names: peer's name -> plain name, outside the blocks.
            layer: prefix of block `{}`.
            block_names: peer's name in a block -> plain names, stacked on their rows.
        """
        outer, blocks = self.separate_weights()
        weights = {f"{name}.weight": outer[plain] for name, plain in outer_names.items()}
        for index, block in enumerate(blocks):
            for name, plain in block_names.items():
                key = f"{layer.format(index)}.{name}.weight"
                weights[key] = torch.cat([block[p] for p in plain]) if len(plain) > 1 else block[plain[0]]
        return weights

    def save(self, path: Path) -> None:
        torch.save({name: getattr(self, name) for name in self.__dataclass_fields__}, path)

    @staticmethod
    def load(path: Path) -> Task:
        return Task(**torch.load(path, weights_only=True))


class Turns:
    """A contender's end of the conversation: it trains only while it is its turn."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print must not be mistaken for an answer
        self._asked, self._losses, self._started = 0, [], 0.0

    def ready(self, parameters: int, **versions: str) -> None:
        """Introduce the contender, once the model stands."""
        self._say({"parameters": parameters, "versions": {"torch": torch.__version__, **versions}})

    def wait(self) -> None:
        """Sleep until the next turn; leaves the program when there is none."""
        line = sys.stdin.readline()
        if not line:
            sys.exit(0)
        self._asked, self._losses = int(line.removeprefix("step ")), []
        self._started = time.perf_counter()

    def done(self, loss: float) -> None:
        """One step is complete; answers after the last of the turn, and waits for the next turn."""
        self._losses.append(loss)
        if len(self._losses) < self._asked:
            return
        seconds = (time.perf_counter() - self._started) / self._asked
        self._say({"seconds": seconds, "losses": self._losses, "peak_mib": peak_rss_mib()})
        self.wait()

    def loop(self, step: Callable[[], float]) -> None:
        """For a contender whose loop is its own."""
        self.wait()
        while True:
            self.done(step())

    def _say(self, facts: dict[str, Any]) -> None:
        print(json.dumps(facts), file=self._out, flush=True)


def play(main: Callable[[Task, Variant, Turns], None]) -> None:
    """The program of a contender module."""
    turns = Turns()
    main(Task.load(Path(sys.argv[1])), Variant(**json.loads(sys.argv[2])), turns)


def command(python: Path, module: str, task: Path, variant: Variant) -> list[str]:
    """The command line of a contender, to be run in the folder that holds `contenders`."""
    return [str(python), "-m", f"contenders.{module}", str(task), json.dumps(asdict(variant))]


def count_parameters(model: torch.nn.Module) -> int:
    """Trainable parameters; a tied weight counts once."""
    return sum(parameter.numel() for parameter in model.parameters())


def peak_rss_mib() -> float:
    """Most resident memory this process ever held. Linux's ru_maxrss would include that of the process that started it."""
    try:
        status = Path("/proc/self/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 2**10
    except (OSError, ValueError, IndexError):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
