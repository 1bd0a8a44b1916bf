"""One function a stage: the rooms wired to the run directory."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lavra import __version__, artifact, console, metrics
from lavra.artifact import Artifact
from lavra.corpus.config import CorpusConfig
from lavra.corpus.executor import run_apart
from lavra.corpus.sources import SourceScan, scan_sources
from lavra.errors import PreflightError
from lavra.hardware.probe import keep_freed_memory, probe_machine, release_memory, usable_cores
from lavra.model.config import ModelShape
from lavra.pipeline import Run, build_or_reuse, run_pipeline, success_results
from lavra.recipe import LoadedRecipe, Recipe
from lavra.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from lavra.model.decoder import Decoder
    from lavra.plan.solve import Wishes
    from lavra.tokenizer.bpe import Tokenizer
    from lavra.tokens.windows import Windows
    from lavra.train.loop import Callback, StepFacts, TrainState

PLAN_FORMAT = CORPUS_FORMAT = PRETRAIN_FORMAT = 1


# --- plan ---------------------------------------------------------------------------------------


def plan_stage(run: Run) -> None:
    """Decide and predict; a plan whose inputs did not change is kept as it is."""
    source_scan.cache_clear()  # an earlier run of this process may have seen other files
    scan = source_scan(run.recipe.corpus)
    inputs = _plan_inputs(run, scan)
    file = run.dir / "plan.json"
    if file.exists():
        run.plan = artifact.read_json(file)
        if run.plan["fingerprint"] == artifact.fingerprint(inputs):
            console.say(f"[{format_seconds(run.seconds())}] plan: reused, nothing upstream changed")
            return
    console.say(f"[{format_seconds(run.seconds())}] plan: measuring this machine")
    run.built.append("plan")
    run.plan = make_plan(run, scan) | {"fingerprint": artifact.fingerprint(inputs)}
    artifact.write_json(file, run.plan)
    console.say(plan_summary(run.plan))


def make_plan(run: Run, scan: SourceScan) -> dict[str, Any]:
    """Measure this machine and solve for the budget (writes environment.json)."""
    from lavra.experiment.calibrate import calibrate
    from lavra.plan.solve import Situation, solve

    recipe = run.recipe
    machine = probe_machine()
    calibration = calibrate(machine, recipe.train.precision)
    _write_environment(run, machine.as_dict(), calibration.gemm_gflops)
    kind = next(k for k in ("time", "tokens", "flops") if getattr(recipe.budget, k) is not None)
    inherited = _inherited(run)
    plan = solve(
        Situation(
            budget_kind=kind,
            budget_value=float(getattr(recipe.budget, kind)),
            model=recipe.model,
            tokenizer=recipe.tokenizer,
            wishes=_wishes(recipe),
            text_bytes=scan.estimated_text_bytes,
            machine=machine,
            calibration=calibration,
            elapsed=run.seconds(),
            inherited=inherited[0] if inherited else None,
        )
    )
    return {"format": PLAN_FORMAT, **plan, "calibration": calibration.as_dict()}


def _wishes(recipe: Recipe) -> Wishes:
    from lavra.plan.solve import Wishes

    train = recipe.train
    return Wishes(
        seq_len=recipe.tokens.seq_len,
        batch_tokens=train.batch_tokens,
        micro_batch_size=train.micro_batch_size,
        learning_rate=train.learning_rate,
        precision=train.precision,
        compile=train.compile,
        warmup_fraction=train.warmup_fraction,
        decay_fraction=train.decay_fraction,
        keep_checkpoints=train.keep_checkpoints,
        corpus_max_bytes=recipe.corpus.max_bytes,
        validation_max_bytes=recipe.corpus.validation_max_bytes,
        evaluate_max_bytes=recipe.evaluate.max_bytes,
    )


def plan_summary(plan: dict[str, Any]) -> str:
    """The plan in a few lines."""
    d, p, h = plan["decisions"], plan["predictions"], plan["horizon"]
    shape = d["model"]
    lines = [
        f"  model    {format_count(p['parameters'])} parameters: {shape['n_layers']} layers, width {shape['d_model']}, "
        f"{shape['n_heads']} heads, vocabulary {shape['vocab_size']}, context {shape['seq_len']}",
        f"  train    {format_count(h['tokens'])} tokens in {h['steps']} steps of {d['batch_tokens']} "
        f"({d['gradient_accumulation']} x {d['micro_batch_size']} sequences), lr {d['learning_rate']:g}, "
        f"{d['precision']}, {'compiled' if d['compile'] else 'eager'}, {d['device']}",
        f"  expect   {format_seconds(p['wall_seconds'])}, {p['tokens_per_second']:,.0f} tokens/s, "
        f"{format_bytes(p['peak_memory_bytes'])} memory, {format_bytes(p['disk_bytes'])} disk, "
        f"{p['final_bpb']:.2f} bits per byte",
    ]
    return "\n".join(lines + [f"  note     {note}" for note in plan["notes"]])


@cache
def source_scan(config: CorpusConfig) -> SourceScan:
    """The sources of a run, looked at once a run."""
    return scan_sources(config)


def _plan_inputs(run: Run, scan: SourceScan) -> dict[str, Any]:
    inherited = _inherited(run)
    recipe = run.recipe.model_dump(mode="json", exclude={"name", "run_dir", "success", "preset"})
    return {
        "format": PLAN_FORMAT,
        "recipe": recipe,
        "sources": scan.inputs(),
        "init_from": inherited[1] if inherited else "",
    }


def _write_environment(run: Run, machine: dict[str, Any], gemm: dict[str, float]) -> None:
    import torch

    facts = {
        "lavra": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        **{name: importlib.metadata.version(name) for name in ("tokenizers", "pyarrow", "numpy")},
        **machine,
        **{f"gemm_gflops_{dtype}": value for dtype, value in gemm.items()},
    }
    artifact.write_json(run.dir / "environment.json", facts)


# --- corpus, tokenizer, tokens ------------------------------------------------------------------


def corpus_stage(run: Run) -> Artifact:
    """Sources -> documents, split, accounting."""
    from lavra.corpus.build import build_corpus

    config, decisions = run.recipe.corpus, run.plan["decisions"]
    scan = source_scan(config)
    inputs = {
        "format": CORPUS_FORMAT,
        "config": config.model_dump(
            mode="json", exclude={"workers", "max_bytes", "validation_max_bytes", "sources"}
        ),
        "sources": [s.model_dump(mode="json", exclude={"path"}) for s in config.sources],
        "files": scan.inputs(),
        "max_bytes": decisions["corpus_max_bytes"],
        "validation_max_bytes": decisions["validation_max_bytes"],
    }

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        result = build_corpus(
            config,
            scan,
            folder,
            max_bytes=decisions["corpus_max_bytes"],
            validation_max_bytes=decisions["validation_max_bytes"],
            workers=usable_cores() if config.workers == "auto" else config.workers,
            inputs=inputs,
        )
        console.say(corpus_summary(result))
        return result

    return build_or_reuse(run, "corpus", inputs, build)


def corpus_summary(corpus: Artifact) -> str:
    """Accounting in two lines."""
    from lavra.corpus.store import read_accounting

    accounting = read_accounting(corpus.path)
    totals = accounting["totals"]

    def part(name: str) -> str:
        return f"{totals[name]['documents']:,} {name.replace('_', ' ')}"

    reasons = sorted(accounting["reasons"].items(), key=lambda item: -item[1]["documents"])
    dropped = ", ".join(f"{name} {facts['documents']:,}" for name, facts in reasons[:6] if facts["documents"])
    return (
        f"  {part('records_in')} = {part('kept')} + {part('dropped')} + {part('errors')} + {part('sampled_out')}; "
        f"train {format_bytes(totals['train']['bytes'])}, validation {format_bytes(totals['validation']['bytes'])}"
        + (f"\n  dropped: {dropped}" if dropped else "")
    )


def tokenizer_stage(run: Run) -> Artifact:
    """Corpus -> tokenizer.json."""
    from lavra.tokenizer.build import FORMAT_VERSION, build_tokenizer

    corpus = run.artifacts["corpus"]
    config = run.recipe.tokenizer
    vocab_size = run.plan["decisions"]["vocab_size"]
    inherited = (
        Path(run.recipe.train.init_from) / "tokenizer/tokenizer.json" if run.recipe.train.init_from else None
    )
    inputs = {
        "format": FORMAT_VERSION,
        "corpus": corpus.fingerprint,
        "config": config.model_dump(mode="json", exclude={"vocab_size"}),
        "vocab_size": vocab_size,
        "inherited": artifact.file_hash(inherited) if inherited else "",
    }

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        result = run_apart(
            build_tokenizer, config, corpus, folder, vocab_size=vocab_size, inherited=inherited, inputs=inputs
        )
        console.say(f"  {result.summary['bytes_per_token']:.2f} bytes a token on validation text")
        return result

    return build_or_reuse(run, "tokenizer", inputs, build)


def tokens_stage(run: Run) -> Artifact:
    """Corpus + tokenizer -> token shards."""
    from lavra.tokens.build import FORMAT_VERSION, build_tokens

    corpus, tokenizer = run.artifacts["corpus"], run.artifacts["tokenizer"]
    inputs = {"format": FORMAT_VERSION, "corpus": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        result = run_apart(build_tokens, corpus, tokenizer, folder, inputs=inputs)
        console.say(f"  {format_count(result.summary['train_tokens'])} training tokens")
        return result

    return build_or_reuse(run, "tokens", inputs, build)


# --- pretrain -----------------------------------------------------------------------------------


def pretrain_stage(run: Run) -> Artifact:
    """Tokens -> checkpoints, metrics, samples."""
    tokens = run.artifacts["tokens"]
    decisions, horizon = run.plan["decisions"], run.plan["horizon"]
    time_boxed = run.recipe.budget.time is not None
    inherited = _inherited(run)
    train = run.recipe.train
    inputs = {
        "format": PRETRAIN_FORMAT,
        "tokens": tokens.fingerprint,
        "seed": run.recipe.seed,
        "init_from": inherited[1] if inherited else "",
        "horizon": "by wall time" if time_boxed else {k: horizon[k] for k in ("steps", "decay")},
        "decisions": {
            k: decisions[k]
            for k in ("model", "batch_size", "learning_rate", "warmup_steps", "precision", "compile")
        },
        "optimizer": train.model_dump(
            mode="json", include={"schedule", "weight_decay", "betas", "grad_clip", "decay_fraction"}
        ),
    }

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        _keep_previous_checkpoints(folder, inputs)
        artifact.begin(folder, "pretrain", inputs)
        release_memory()
        keep_freed_memory()
        state = _train(run)
        return artifact.finish(folder, "pretrain", inputs, _pretrain_summary(run, state))

    return build_or_reuse(run, "pretrain", inputs, build)


def _train(run: Run) -> TrainState:
    import torch

    from lavra.optim.adamw import describe_groups, parameter_groups
    from lavra.tokens.build import open_store
    from lavra.tokens.windows import Sampler, Windows
    from lavra.train.loop import Horizon, TrainSettings, train
    from lavra.train.signals import stop_requests

    config, decisions = run.recipe.train, run.plan["decisions"]
    tokenizer = _load_tokenizer(run)
    shape = ModelShape(**decisions["model"])
    model = _initial_model(run, shape)
    windows = Windows(open_store(run.folder("tokens"), "train", tokenizer), shape.seq_len)
    if windows.store.n_tokens < shape.seq_len:
        raise PreflightError(
            f"the training split has {windows.store.n_tokens} tokens, fewer than one window of {shape.seq_len}",
            where="tokens.seq_len",
            hint=f"set tokens.seq_len={max(16, windows.store.n_tokens // 8)} or less, or add text",
        )
    settings = TrainSettings(
        batch_size=decisions["batch_size"],
        micro_batch_size=decisions["micro_batch_size"],
        learning_rate=decisions["learning_rate"],
        schedule=config.schedule,
        warmup=decisions["warmup_steps"],
        weight_decay=config.weight_decay,
        betas=config.betas,
        grad_clip=config.grad_clip,
        precision=decisions["precision"],
        compile=decisions["compile"],
        seed=run.recipe.seed,
        checkpoint_every=config.checkpoint_every,
        keep_checkpoints=config.keep_checkpoints,
        log_every=config.log_every,
    )
    horizon = _horizon(run, Horizon)
    console.say(describe_groups(parameter_groups(model, config.weight_decay)))
    events = metrics.JsonlWriter(run.dir / "events.jsonl")

    def on_event(step: int, kind: str, text: str) -> None:
        events.write({"step": step, "kind": kind, "text": text})
        console.say(f"  step {step}: {kind}: {text}")

    def on_horizon(decided: Horizon, step: int) -> None:
        _freeze_horizon(run, steps=decided.steps, decay=decided.decay, decided=True)
        on_event(step, "horizon", f"decay begins; the last step is {decided.steps}, by the time left")

    validation = Windows(open_store(run.folder("tokens"), "validation", tokenizer), shape.seq_len)
    try:
        with stop_requests() as stop, _Bar(horizon) as bar:
            return train(
                model,
                Sampler(windows, run.recipe.seed),
                settings,
                horizon,
                run_dir=run.dir,
                stop=stop,
                callbacks=[_validator(run, validation, tokenizer, horizon), bar],
                on_horizon=on_horizon,
                on_event=on_event,
                peak_flops=run.plan["calibration"]["gemm_gflops"][decisions["precision"]] * 1e9,
            )
    finally:
        events.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _horizon(run: Run, horizon_type: type) -> Any:
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


def _freeze_horizon(run: Run, **values: Any) -> None:
    run.plan["horizon"] |= values
    if "steps" in values:
        run.plan["horizon"]["tokens"] = values["steps"] * run.plan["decisions"]["batch_tokens"]
    artifact.write_json(run.dir / "plan.json", run.plan)


def _keep_previous_checkpoints(folder: Path, inputs: dict[str, Any]) -> None:
    """Weights trained under other settings are set aside, never deleted."""
    if not any(folder.glob("step-*")):
        return
    marker = next(
        (folder / m for m in (artifact.COMPLETE, artifact.IN_PROGRESS) if (folder / m).exists()), None
    )
    if marker and artifact.read_json(marker)["fingerprint"] == artifact.fingerprint(inputs):
        return
    console.say(f"  checkpoints of the earlier settings are kept at {artifact.set_aside(folder)}")


def _initial_model(run: Run, shape: ModelShape) -> Decoder:
    from lavra.checkpoint.store import latest_checkpoint, load_model
    from lavra.experiment.calibrate import training_device
    from lavra.model.decoder import build_decoder

    model = build_decoder(shape, seed=run.recipe.seed, device=training_device())
    if run.recipe.train.init_from:
        checkpoint = latest_checkpoint(Path(run.recipe.train.init_from) / "checkpoints")
        assert checkpoint is not None
        load_model(checkpoint, model)
        console.say(f"  weights from {checkpoint}")
    return model


def _inherited(run: Run) -> tuple[ModelShape, str] | None:
    """Shape and weight hash of the run that training starts from."""
    from lavra.checkpoint.store import latest_checkpoint

    if not run.recipe.train.init_from:
        return None
    source = Path(run.recipe.train.init_from)
    checkpoint = latest_checkpoint(source / "checkpoints")
    if checkpoint is None or not (source / "plan.json").exists():
        raise PreflightError(
            f"no trained run at {source}", where="train.init_from", hint="name a run directory"
        )
    shape = ModelShape(**artifact.read_json(source / "plan.json")["decisions"]["model"])
    return shape, artifact.file_hash(checkpoint / "model.safetensors")


def _validator(run: Run, windows: Windows, tokenizer: Tokenizer, horizon: Any) -> Callback:
    """Validation loss and text samples at a few moments of the run, the last step included."""
    import math
    import time

    import numpy as np

    from lavra.generate.decode import generate_text
    from lavra.generate.sampling import Sampling
    from lavra.train.step import validation_loss

    config, decisions = run.recipe.train, run.plan["decisions"]
    count = min(windows.count, max(1, config.validation_tokens // decisions["seq_len"]))
    chosen = np.linspace(0, windows.count - 1, count).astype(np.int64)
    batches = windows.batch(chosen, chosen).split(decisions["micro_batch_size"])
    bytes_per_token = run.artifacts["tokenizer"].summary["bytes_per_token"]
    interval = (horizon.seconds or 0) / config.validations
    last = {"step": 0, "time": time.monotonic()}

    def due(facts: StepFacts) -> bool:
        if facts.last or facts.step == 1:
            return True
        if horizon.seconds is not None:
            return time.monotonic() - last["time"] >= interval
        return facts.step % max(1, horizon.steps // config.validations) == 0

    def callback(facts: StepFacts) -> None:
        if not due(facts):
            return
        last["time"] = time.monotonic()
        loss = validation_loss(facts.model, batches, precision=decisions["precision"])
        facts.metrics[metrics.VALIDATION_LOSS] = loss
        facts.metrics[metrics.VALIDATION_BPB] = loss / math.log(2) / bytes_per_token
        if config.sample_tokens:
            sampling = Sampling(temperature=0.8, top_p=0.95, seed=run.recipe.seed)
            pieces = generate_text(
                facts.model, tokenizer, "", max_tokens=config.sample_tokens, sampling=sampling
            )
            text = f"step {facts.step}, validation loss {loss:.3f}\n\n{''.join(pieces)}\n"
            artifact.write_bytes(run.dir / f"samples/step-{facts.step:08d}.md", text.encode())

    return callback


class _Bar:
    """Progress of training: by steps, or by time while the horizon is open."""

    def __init__(self, horizon: Any) -> None:
        self.horizon = horizon
        self.context = console.progress("  training", horizon.seconds or horizon.steps)
        self.done = 0.0

    def __enter__(self) -> _Bar:
        self.bar = self.context.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def __call__(self, facts: StepFacts) -> None:
        m = facts.metrics
        now = m["time"] if self.horizon.seconds is not None else float(facts.step)
        loss = f"step {facts.step} loss {m[metrics.TRAIN_LOSS]:.3f}"
        if metrics.VALIDATION_LOSS in m:
            loss += f" val {m[metrics.VALIDATION_LOSS]:.3f} ({m[metrics.VALIDATION_BPB]:.2f} bits/byte)"
        speed = f"lr {m[metrics.LEARNING_RATE]:.1e} {m[metrics.TOKENS_PER_SECOND]:,.0f} tok/s mfu {m.get(metrics.MFU, 0):.0%}"
        self.bar.advance(now - self.done, f"{loss} {speed}")
        self.done = now


def _pretrain_summary(run: Run, state: TrainState) -> dict[str, Any]:
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


# --- evaluate, report ---------------------------------------------------------------------------


def evaluate_stage(run: Run) -> Artifact:
    """Final weights on whole validation documents."""
    from lavra.checkpoint.store import latest_checkpoint
    from lavra.evaluate.build import FORMAT_VERSION, evaluate, results_table

    checkpoint = latest_checkpoint(run.folder("pretrain"))
    assert checkpoint is not None
    max_bytes = run.plan["decisions"]["evaluate_max_bytes"]
    corpus = run.artifacts["corpus"]
    inputs = {
        "format": FORMAT_VERSION,
        "weights": artifact.file_hash(checkpoint / "model.safetensors"),
        "corpus": corpus.fingerprint,
        "tokenizer": run.artifacts["tokenizer"].fingerprint,
        "max_bytes": max_bytes,
    }

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        model, tokenizer = load_trained(run.dir)
        result = evaluate(model, tokenizer, corpus, folder, max_bytes=max_bytes, inputs=inputs)
        console.say(results_table(artifact.read_json(folder / "results.json")))
        return result

    return build_or_reuse(run, "evaluate", inputs, build)


def report_stage(run: Run) -> None:
    """Everything measured -> report.html; success criteria judged."""
    from lavra.report.render import render_report

    artifact.write_json(run.dir / "success.json", success_results(run))
    size = sum(f.stat().st_size for f in run.dir.rglob("*") if f.is_file())
    if run.built:
        run.built.append("report")
        run.record(disk_bytes=size)
        seconds = run.measured()["stage_seconds"]
        # Rendered last, so the report states its own time as planned.
        run.record(wall_seconds=run.elapsed() + seconds.get("pretrain", 0.0) * ("pretrain" not in run.built))
    path = render_report(run.dir)
    console.say(f"[{format_seconds(run.seconds())}] report: {path}")


def load_trained(run_dir: Path) -> tuple[Decoder, Tokenizer]:
    """Model and tokenizer of a run's newest checkpoint.

    Raises:
        PreflightError: nothing has been trained there.
    """
    from lavra.checkpoint.store import latest_checkpoint, load_model
    from lavra.experiment.calibrate import training_device
    from lavra.model.decoder import Decoder
    from lavra.tokenizer.bpe import load_tokenizer

    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise PreflightError(f"no trained model in {run_dir.resolve()}", hint="train one: lavra run RECIPE")
    shape = ModelShape(**artifact.read_json(run_dir / "plan.json")["decisions"]["model"])
    model = Decoder(shape)
    load_model(checkpoint, model)
    return model.to(training_device()).eval(), load_tokenizer(run_dir / "tokenizer/tokenizer.json")


def _load_tokenizer(run: Run) -> Tokenizer:
    from lavra.tokenizer.bpe import load_tokenizer

    return load_tokenizer(run.folder("tokenizer") / "tokenizer.json")


STAGE_FUNCTIONS: dict[str, Callable[[Run], Artifact | None]] = {
    "plan": plan_stage,
    "corpus": corpus_stage,
    "tokenizer": tokenizer_stage,
    "tokens": tokens_stage,
    "pretrain": pretrain_stage,
    "evaluate": evaluate_stage,
    "report": report_stage,
}


def run_recipe(
    loaded: LoadedRecipe,
    *,
    from_stage: str = "",
    until: str = "report",
    fresh: bool = False,
    started: float | None = None,
) -> Run:
    """Bring a run up to `until`; arguments and errors as in `pipeline.run_pipeline`."""
    return run_pipeline(
        loaded, STAGE_FUNCTIONS, from_stage=from_stage, until=until, fresh=fresh, started=started
    )
