"""The pretrain stage: the train room wired to a run directory."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lavra import artifact, console, metrics
from lavra.artifact import Artifact
from lavra.errors import DivergedError, PreflightError
from lavra.hardware.probe import keep_freed_memory, release_memory
from lavra.model.config import ModelShape
from lavra.pipeline import Run, build_or_reuse
from lavra.watch import Bar, EventLog, describer, profiler, trackers, validator

if TYPE_CHECKING:
    from lavra.model.decoder import Decoder
    from lavra.tokenizer.bpe import Tokenizer
    from lavra.tokens.mixture import Mixture
    from lavra.tokens.ramps import StepPlan
    from lavra.tokens.windows import Windows
    from lavra.train.horizon import Horizon
    from lavra.train.state import TrainSettings, TrainState

FORMAT_VERSION = 2

# Decisions and settings that change what training computes; the others (checkpoints, logging) do not rebuild anything.
_DECISIONS = ("model", "batch_size", "optimizer", "learning_rate", "warmup_steps", "precision", "compile")
_OPTIMIZATION = {
    "batch_ramp", "schedule", "decay_fraction", "cycle", "lr_floor", "weight_decay", "betas", "momentum",
    "clip", "grad_clip", "ema_decay", "recompute", "guard",
}  # fmt: skip


def pretrain_stage(run: Run) -> Artifact:
    """Tokens -> checkpoints, metrics, samples."""
    inputs = _inputs(run)

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        changes = run.plan.get("changes")
        continues = changes[-1]["from"] if changes else ""
        _keep_previous_checkpoints(folder, {artifact.fingerprint(inputs), continues})
        artifact.begin(folder, "pretrain", inputs, continues=continues)
        release_memory()
        keep_freed_memory()
        state = _train(run, artifact.fingerprint(inputs))
        return artifact.finish(folder, "pretrain", inputs, _summary(run, state))

    return build_or_reuse(run, "pretrain", inputs, build)


def _inputs(run: Run) -> dict[str, Any]:
    recipe, decisions, horizon = run.recipe, run.plan["decisions"], run.plan["horizon"]
    start = inherited(run)
    changes = [{k: c[k] for k in ("step", "settings")} for c in run.plan.get("changes", [])]
    return {
        "format": FORMAT_VERSION,
        "tokens": run.artifacts["tokens"].fingerprint,
        "rows": recipe.tokens.model_dump(
            mode="json", include={"packing", "mixture", "max_epochs", "curriculum", "seq_len_ramp"}
        ),
        "seed": recipe.seed,
        "init_from": start[1] if start else "",
        "horizon": "by wall time"
        if recipe.budget.time is not None
        else {k: horizon[k] for k in ("steps", "decay")},
        "decisions": {k: decisions[k] for k in _DECISIONS},
        "optimization": recipe.train.model_dump(mode="json", include=_OPTIMIZATION),
    } | ({"changes": changes} if changes else {})


def _train(run: Run, fingerprint: str) -> TrainState:
    import torch

    from lavra.optim.build import optimizer_groups
    from lavra.optim.groups import describe_groups
    from lavra.parallel.recompute import apply_recompute
    from lavra.tokens.build import open_windows
    from lavra.tokens.sampler import Sampler
    from lavra.train.horizon import Horizon
    from lavra.train.layers import LayerStatistics
    from lavra.train.loop import train
    from lavra.train.precision import apply_precision, check_precision
    from lavra.train.signals import stop_requests

    decisions, packing = run.plan["decisions"], run.recipe.tokens.packing
    tokenizer = _load_tokenizer(run)
    shape = ModelShape(**decisions["model"])
    model = _initial_model(run, shape)
    device = next(model.parameters()).device
    if note := check_precision(decisions["precision"], device):
        console.say(f"  {note}")
    apply_precision(model, decisions["precision"], device)
    if described := apply_recompute(model, run.recipe.train.recompute):
        console.say(f"  recompute: {described}")
    windows = open_windows(run.folder("tokens"), "train", tokenizer, packing, shape.seq_len)
    if windows.store.n_tokens < shape.seq_len:
        raise PreflightError(
            f"the training split has {windows.store.n_tokens} tokens, fewer than one row of {shape.seq_len}",
            where="tokens.seq_len",
            hint=f"set tokens.seq_len={max(16, windows.store.n_tokens // 8)} or less, or add text",
        )
    settings = _settings(run, background_checkpoints=device.type == "cuda")
    horizon = _horizon(run, Horizon)
    mixture = _mixture(run, windows, settings.steps, horizon)
    sampler = Sampler(windows, run.recipe.seed, mixture)
    console.say(describe_groups(optimizer_groups(model, settings.optimizer)))
    if mixture is not None:
        console.say(_mixture_lines(mixture, settings.steps, horizon))
    events = EventLog(run.dir / "events.jsonl")

    def on_horizon(decided: Horizon, step: int) -> None:
        _freeze_horizon(run, settings.steps, steps=decided.steps, decay=decided.decay, decided=True)
        if mixture is not None:
            _begin_decay_stage(run, mixture, settings.steps, step)
        text = f"decay begins; the last step is {decided.steps}, by the time left"
        events({"step": step, "kind": "horizon", "text": text})

    for change in run.plan.get("changes", []):
        text = ", ".join(f"{path} {old} -> {new}" for path, (old, new) in change["settings"].items())
        events({"step": change["step"], "kind": "settings", "text": text})
    validation = open_windows(run.folder("tokens"), "validation", tokenizer, packing, shape.seq_len)
    try:
        with (
            stop_requests() as stop,
            Bar(horizon) as bar,
            trackers(run, events, fingerprint) as tracked,
            profiler(run, events) as profiled,
        ):
            return train(
                model,
                sampler,
                settings,
                horizon,
                run_dir=run.dir,
                stop=stop,
                callbacks=[validator(run, validation, tokenizer, horizon), bar, tracked, *profiled],
                observer=LayerStatistics(run.recipe.train.layers_every, decisions["precision"]),
                on_horizon=on_horizon,
                on_event=events,
                describe=describer(run, sampler, tokenizer),
                peak_flops=run.plan["calibration"]["gemm_gflops"].get(decisions["precision"], 0.0) * 1e9,
            )
    except DivergedError as error:
        error.hint += f"\n  -> `lavra diagnose {run.dir}` says what its records show"
        raise
    finally:
        events.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _settings(run: Run, *, background_checkpoints: bool) -> TrainSettings:
    from lavra.optim.build import OptimizerSettings
    from lavra.tokens.ramps import Ramp, StepPlan
    from lavra.train.state import TrainSettings

    config, decisions = run.recipe.train, run.plan["decisions"]
    seq_len = decisions["seq_len"]
    return TrainSettings(
        steps=StepPlan(
            decisions["batch_size"],
            seq_len,
            [Ramp(r.until, max(1, round(r.batch_tokens / seq_len))) for r in config.batch_ramp],
            [Ramp(r.until, r.seq_len) for r in run.recipe.tokens.seq_len_ramp],
        ),
        micro_batch_size=decisions["micro_batch_size"],
        optimizer=OptimizerSettings(
            name=decisions["optimizer"],
            learning_rate=decisions["learning_rate"],
            weight_decay=config.weight_decay,
            betas=config.betas,
            momentum=config.momentum,
        ),
        schedule=config.schedule,
        warmup=decisions["warmup_steps"],
        clip=config.clip,
        grad_clip=config.grad_clip,
        precision=decisions["precision"],
        compile=decisions["compile"],
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        log_every=config.log_every,
        guard=config.guard,
        cycle=config.cycle,
        lr_floor=config.lr_floor,
        ema_decay=config.ema_decay,
        keep_every=config.keep_every,
        background_checkpoints=background_checkpoints,
    )


# --- the horizon and the mixture ---


def _horizon(run: Run, horizon_type: type[Horizon]) -> Horizon:
    """The plan's horizon; a time budget gets its training seconds here, when training first starts."""
    plan = run.plan["horizon"]
    if not plan["decided"] and plan["seconds"] is None:
        after = sum(run.plan["predictions"]["stage_seconds"][stage] for stage in ("evaluate", "report"))
        assert run.recipe.budget.time is not None
        seconds = max(run.recipe.budget.time - run.elapsed() - after, 5.0)
        _freeze_horizon(run, seconds=round(seconds, 2))
    plan = run.plan["horizon"]
    return horizon_type(
        steps=plan["steps"],
        decay=plan["decay"],
        decided=plan["decided"],
        seconds=plan["seconds"],
        decay_fraction=run.recipe.train.decay_fraction,
    )


def _freeze_horizon(run: Run, plan: StepPlan | None = None, **values: Any) -> None:
    run.plan["horizon"] |= values
    if plan is not None:
        run.plan["horizon"]["tokens"] = plan.tokens_before(values["steps"])
    artifact.write_json(run.dir / "plan.json", run.plan)


def _mixture(run: Run, windows: Windows, steps: StepPlan, horizon: Horizon) -> Mixture | None:
    """The recipe's mixture over the rows that there are; None: every source by its size.

    Raises:
        PreflightError: it names sources that have no tokens, or is used up before the last step.
    """
    import numpy as np

    from lavra.tokens.mixture import Mixture, Stage

    config = run.recipe.tokens
    if not config.mixture:
        return None
    rows = dict(zip(windows.store.sources, np.diff(windows.rows.source_rows).tolist(), strict=True))
    stages = [Stage(0, config.mixture)]
    stages += [Stage(s.start // steps.seq_len, s.mixture) for s in config.curriculum if s.start != "decay"]
    mixture = Mixture(rows, stages, config.max_epochs, seed=run.recipe.seed)
    mixture.check_sources(name for stage in config.curriculum for name in stage.mixture)
    if horizon.decided:
        _begin_decay_stage(run, mixture, steps, horizon.steps - horizon.decay)
    needed = steps.at(horizon.steps).first
    if mixture.end is not None and mixture.end < needed:
        raise PreflightError(
            f"the mixture is used up after {mixture.end * steps.seq_len} tokens, the plan wants {needed * steps.seq_len}",
            where="tokens.max_epochs",
            hint="raise tokens.max_epochs, add text, or lower the budget",
        )
    return mixture


def _begin_decay_stage(run: Run, mixture: Mixture, steps: StepPlan, step: int) -> None:
    from lavra.tokens.mixture import Stage

    for stage in run.recipe.tokens.curriculum:
        if stage.start == "decay":
            mixture.begin_stage(Stage(steps.at(step).first, stage.mixture))


def _mixture_lines(mixture: Mixture, steps: StepPlan, horizon: Horizon) -> str:
    lines = [
        f"  mixture from {first * steps.seq_len:,} tokens: "
        + ", ".join(f"{name} {share:.1%}" for name, share in shares.items())
        for first, shares in mixture.changes()
        if first < steps.at(horizon.steps).first
    ]
    epochs = mixture.epochs(steps.at(horizon.steps).first)
    lines.append("  epochs at the end: " + ", ".join(f"{n} {e:.2f}" for n, e in epochs.items()))
    if many := [name for name, e in epochs.items() if e > 4]:
        lines.append(
            f"  note: {', '.join(many)} more than 4 times; repeats teach little beyond that (Muennighoff et al. 2023)"
        )
    return "\n".join(lines)


# --- where training starts ---


def _keep_previous_checkpoints(folder: Path, fingerprints: set[str]) -> None:
    """Weights of a training with another fingerprint are set aside, never deleted."""
    if not any(folder.glob("step-*")):
        return
    marker = next(
        (folder / m for m in (artifact.COMPLETE, artifact.IN_PROGRESS) if (folder / m).exists()), None
    )
    if marker and artifact.read_json(marker)["fingerprint"] in fingerprints:
        return
    console.say(f"  checkpoints of the earlier settings are kept at {artifact.set_aside(folder)}")


def _initial_model(run: Run, shape: ModelShape) -> Decoder:
    from lavra.checkpoint.store import latest_checkpoint, load_model, weights_file
    from lavra.experiment.calibrate import training_device
    from lavra.model.decoder import build_decoder

    model = build_decoder(shape, seed=run.recipe.seed, device=training_device())
    if run.recipe.train.init_from:
        checkpoint = latest_checkpoint(Path(run.recipe.train.init_from) / "checkpoints")
        assert checkpoint is not None
        load_model(checkpoint, model, file=weights_file(checkpoint))
        console.say(f"  weights from {checkpoint}")
    return model


def inherited(run: Run) -> tuple[ModelShape, str] | None:
    """Shape and weight hash of the run that training starts from."""
    from lavra.checkpoint.store import latest_checkpoint, weights_file

    if not run.recipe.train.init_from:
        return None
    source = Path(run.recipe.train.init_from)
    checkpoint = latest_checkpoint(source / "checkpoints")
    if checkpoint is None or not (source / "plan.json").exists():
        raise PreflightError(
            f"no trained run at {source}", where="train.init_from", hint="name a run directory"
        )
    shape = ModelShape(**artifact.read_json(source / "plan.json")["decisions"]["model"])
    return shape, artifact.file_hash(checkpoint / weights_file(checkpoint))


def _summary(run: Run, state: TrainState) -> dict[str, Any]:
    """Final figures; the same go to measured.json beside the predictions."""
    import statistics

    records = list(metrics.read_jsonl(run.dir / "metrics.jsonl"))
    final = records[-1]
    steady = records[min(10, len(records) // 2) :]
    tail = [r[metrics.TRAIN_LOSS] for r in records[-max(1, len(records) // 20) :]]
    rate = statistics.median(r[metrics.TOKENS_PER_SECOND] for r in steady)
    shape = ModelShape(**run.plan["decisions"]["model"])
    summary = {
        "steps": state.step,
        "tokens": state.tokens,
        "train_loss": statistics.fmean(tail),
        "val_loss": final.get(metrics.VALIDATION_LOSS),
        "val_bpb": final.get(metrics.VALIDATION_BPB),
    }
    run.record(
        parameters=shape.parameter_count(),
        flops=shape.flops_per_token() * state.tokens,
        tokens_per_second=rate,
        peak_memory_bytes=int(max(r[metrics.RSS_GIB] for r in steady) * 2**30),
        final_loss=summary["val_loss"],
        final_bpb=summary["val_bpb"],
    )
    return summary


def _load_tokenizer(run: Run) -> Tokenizer:
    from lavra.tokenizer.bpe import load_tokenizer

    return load_tokenizer(run.folder("tokenizer") / "tokenizer.json")
