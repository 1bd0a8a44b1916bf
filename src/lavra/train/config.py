"""Settings of the train room."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from lavra.optim.config import ClipKind, OptimizerName
from lavra.optim.schedules import Schedule
from lavra.schema import AutoCount, AutoFloat, Config, Count, Seconds

SUCCESS_METRICS = ("train_loss", "val_loss", "val_bpb", "steps", "tokens")

_Beta = Annotated[float, Field(ge=0, lt=1)]


PROFILE_FROM = 6  # the steps before compile, tune and fill caches
PROFILE_MOST = 100  # steps; their trace is held in memory


def profile_steps(asked: int | str) -> range:
    """The steps to profile: `5` -> 6 to 10, after those that warm up; `100-104` -> these; `0` -> none.

    Raises:
        ValueError: neither of them, or more steps than memory may hold.
    """
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)", str(asked))
    if not match:
        raise ValueError("write a number of steps (5) or the first and the last (100-104)")
    first = int(match[1] or PROFILE_FROM)
    last = int(match[2]) if match[1] else first + int(match[2]) - 1
    if match[1] and not 3 <= first <= last:
        raise ValueError("steps go from the first, 3 or later, to the last")
    if last - first >= PROFILE_MOST:
        raise ValueError(f"at most {PROFILE_MOST} steps can be profiled")
    return range(first, last + 1)


def _check_profile(asked: int | str) -> int | str:
    profile_steps(asked)
    return asked


Tracker = Literal["tensorboard", "wandb"]
Policy = Literal["warn", "skip", "rewind", "stop"]


class GuardConfig(Config):
    """What counts as a spike, and what is done."""

    policy: Policy = Field(
        default="skip",
        description="warn: step all the same (never on NaN); skip: leave the batch out; rewind: back to the checkpoint "
        "before, leaving out this batch and those before it; stop: end the run",
    )
    window: Annotated[Count, Field(ge=16)] = Field(
        default=128, description="Accepted steps that a new one is compared with"
    )
    loss_sigmas: Annotated[float, Field(gt=0)] = Field(
        default=6.0, description="Spike: loss above the window's median by so many robust standard deviations"
    )
    grad_sigmas: Annotated[float, Field(gt=0)] = Field(
        default=8.0, description="The same for the logarithm of the gradient norm"
    )
    patience: Annotated[Count, Field(ge=1)] = Field(
        default=5,
        description="Rejected steps in a row, or rewinds that get no farther, after which the run stops",
    )
    rewind_steps: Annotated[Count, Field(ge=1)] = Field(
        default=8, description="rewind: batches left out, the rejected one and those before it"
    )


class BatchRamp(Config):
    """Other batches at the beginning of training."""

    until: Annotated[Count, Field(ge=1)] = Field(description="Tokens of training before which it holds")
    batch_tokens: Annotated[Count, Field(ge=1)] = Field(description="Tokens of one optimizer step")


class TrainConfig(Config):
    """Optimization, precision, checkpoints, and what is shown during training."""

    batch_tokens: AutoCount = Field(
        default="auto", description="Tokens of one optimizer step; `auto`: grows with the horizon"
    )
    batch_ramp: tuple[BatchRamp, ...] = Field(
        default=(), description="Other batches at the beginning, by rising `until`"
    )
    micro_batch_size: AutoCount = Field(
        default="auto",
        description="Sequences a forward pass; `auto`: what fits and is fast; halves when memory runs out",
    )
    optimizer: OptimizerName | Literal["auto"] = Field(
        default="auto",
        description="muon: orthogonalised matrices, AdamW for the rest; adamw8bit needs bitsandbytes; `auto`: muon, or "
        "adamw where muon's step would cost more than half of the model's own work",
    )
    learning_rate: AutoFloat = Field(
        default="auto", description="Peak learning rate; `auto`: by width and optimizer"
    )
    schedule: Schedule = Field(
        default="wsd",
        description="Warm-up, then: constant and a linear (wsd) or 1-sqrt (wsd_sqrt) decay at the end; or one of the "
        "others (cosine and linear not with a time budget: their horizon must be known)",
    )
    warmup_fraction: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.05, description="Warm-up / planned steps"
    )
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.35, description="WSD decay / planned steps"
    )
    cycle: Count = Field(default=0, description="cyclic: optimizer steps from one peak to the next")
    lr_floor: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0, description="Learning rate of the last step / peak"
    )
    weight_decay: Annotated[float, Field(ge=0)] = Field(
        default=0.1, description="Decoupled; never on norms, biases, embeddings"
    )
    betas: tuple[_Beta, _Beta] = Field(
        default=(0.9, 0.95), description="Moment decays of Adam's family, Lion"
    )
    momentum: _Beta = Field(default=0.95, description="Of momentum, nesterov and muon")
    clip: ClipKind = Field(
        default="norm", description="Clip gradients by their global L2 norm, element by element, or not"
    )
    grad_clip: Annotated[float, Field(gt=0)] = Field(
        default=1.0, description="Largest global gradient norm (or value)"
    )
    ema_decay: Annotated[float, Field(ge=0, lt=1)] = Field(
        default=0.0,
        description="Decay of a moving average of the weights, used for evaluation and export; 0: none",
    )
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16", "fp8"] = Field(
        default="auto",
        description="bf16: bf16 compute over fp32 master weights; fp16: the same with a dynamic loss scale; "
        "`auto`: the faster of fp32 and bf16 as measured here",
    )
    compile: Literal["auto", "off", "blocks", "model"] = Field(
        default="auto",
        description="torch.compile of each block (quick) or of the whole model; `auto`: what the length of the run earns back",
    )
    recompute: Literal["none", "full", "selective"] | Annotated[int, Field(ge=2)] = Field(
        default="none",
        description="Activations computed again in the backward pass, for memory: of all blocks, of every n-th (a number), "
        "or all but the matrix products (selective)",
    )
    guard: GuardConfig = GuardConfig()
    checkpoint_every: Seconds = Field(default=60.0, description="Time between checkpoints")
    keep_checkpoints: Annotated[Count, Field(ge=1)] = Field(
        default=2, description="Newest complete checkpoints kept"
    )
    keep_every: Count = Field(
        default=0, description="Besides, a checkpoint every so many steps that is never deleted; 0: none"
    )
    log_every: Annotated[Count, Field(ge=1)] = Field(
        default=1, description="Optimizer steps between metrics lines"
    )
    layers_every: Count = Field(
        default=50,
        description="Optimizer steps between statistics of every layer (gradients, updates, activations); 0: none",
    )
    validations: Annotated[Count, Field(ge=1)] = Field(
        default=8, description="Validation points over the run, last step included"
    )
    validation_tokens: Annotated[Count, Field(ge=1)] = Field(
        default=16_384, description="Tokens of each in-training validation"
    )
    sample_tokens: Count = Field(
        default=96, description="Length of the text samples written at each validation; 0: none"
    )
    trackers: tuple[Tracker, ...] = Field(
        default=(),
        description="Who gets the metrics besides metrics.jsonl, e.g. [tensorboard, wandb]; needs lavra[trackers]. wandb is "
        "offline unless WANDB_API_KEY or WANDB_MODE says otherwise",
    )
    profile: Annotated[int | str, AfterValidator(_check_profile)] = Field(
        default=0,
        description="Steps whose time and memory go to RUN/profile/: so many after the warm-up of the program (5), or "
        "these (100-104); 0: none",
    )
    init_from: str = Field(
        default="", description="Run directory whose weights and tokenizer training continues from"
    )
