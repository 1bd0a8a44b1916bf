"""One function a stage: the rooms wired to the run directory."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lavra import __version__, artifact, console
from lavra.artifact import Artifact
from lavra.corpus.config import CorpusConfig
from lavra.corpus.executor import run_apart
from lavra.corpus.sources import SourceScan, scan_sources
from lavra.errors import PreflightError
from lavra.hardware.probe import probe_machine, usable_cores
from lavra.model.config import ModelShape
from lavra.pipeline import Run, build_or_reuse, run_pipeline, success_results
from lavra.pretrain import inherited, pretrain_stage
from lavra.recipe import LoadedRecipe, Recipe
from lavra.resume import WATCHING, amend_plan, training_step
from lavra.train.trackers import check_installed
from lavra.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from lavra.model.decoder import Decoder
    from lavra.plan.solve import Wishes
    from lavra.tokenizer.bpe import Tokenizer
    from lavra.tokens.config import TokenSource
    from lavra.tokens.pretokenized import TokenFile

PLAN_FORMAT, DOCUMENTS_FORMAT, CORPUS_FORMAT = 3, 1, 2


# --- plan ---------------------------------------------------------------------------------------


def plan_stage(run: Run) -> None:
    """Decide and predict; a plan whose inputs did not change is kept as it is."""
    check_installed(run.recipe.train.trackers)
    for seen in (source_scan, token_files):
        seen.cache_clear()  # an earlier run of this process may have seen other files
    scan = source_scan(run.recipe.corpus)
    files = token_files(run.recipe.tokens.sources, run.recipe.corpus)
    inputs = _plan_inputs(run, scan, files)
    file = run.dir / "plan.json"
    if file.exists():
        run.plan = artifact.read_json(file)
        if run.plan["fingerprint"] == artifact.fingerprint(inputs):
            console.say(f"[{format_seconds(run.seconds())}] plan: reused, nothing upstream changed")
            return
        if run.plan["format"] == PLAN_FORMAT and (step := training_step(run)):
            changes = amend_plan(run, inputs, step)
            artifact.write_json(file, run.plan)
            console.say(f"[{format_seconds(run.seconds())}] plan: kept; settings changed after step {step}")
            console.say("\n".join(f"  {change}" for change in changes))
            return
    console.say(f"[{format_seconds(run.seconds())}] plan: measuring this machine")
    run.built.append("plan")
    run.plan = make_plan(run, scan) | {"inputs": inputs, "fingerprint": artifact.fingerprint(inputs)}
    artifact.write_json(file, run.plan)
    console.say(plan_summary(run.plan))


def make_plan(run: Run, scan: SourceScan) -> dict[str, Any]:
    """Measure this machine and solve for the budget (writes environment.json)."""
    from lavra.experiment.calibrate import calibrate
    from lavra.plan.solve import Situation, solve
    from lavra.tokenizer.bpe import load_tokenizer

    recipe = run.recipe
    machine = probe_machine()
    calibration = calibrate(machine, recipe.train.precision)
    _write_environment(run, machine.as_dict(), calibration.gemm_gflops)
    kind = next(k for k in ("time", "tokens", "flops") if getattr(recipe.budget, k) is not None)
    start = inherited(run)
    tokenizer = recipe.tokenizer
    if tokenizer.path:
        size = load_tokenizer(Path(tokenizer.path)).vocab_size
        tokenizer = tokenizer.model_copy(update={"vocab_size": size})
    plan = solve(
        Situation(
            budget_kind=kind,
            budget_value=float(getattr(recipe.budget, kind)),
            model=recipe.model,
            tokenizer=tokenizer,
            wishes=_wishes(recipe),
            text_bytes=scan.estimated_text_bytes,
            ready_tokens=sum(f.n_tokens for f in token_files(recipe.tokens.sources, recipe.corpus)),
            machine=machine,
            calibration=calibration,
            elapsed=run.seconds(),
            inherited=start[0] if start else None,
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
        optimizer=train.optimizer,
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
        f"({d['gradient_accumulation']} x {d['micro_batch_size']} sequences), {d['optimizer']}, lr {d['learning_rate']:g}, "
        f"{d['precision']}, {'eager' if d['compile'] == 'off' else 'compiled ' + d['compile']}, {d['device']}",
        f"  expect   {format_seconds(p['wall_seconds'])}, {p['tokens_per_second']:,.0f} tokens/s, "
        f"{format_bytes(p['peak_memory_bytes'])} memory, {format_bytes(p['disk_bytes'])} disk, "
        f"{p['final_bpb']:.2f} bits per byte",
    ]
    return "\n".join(lines + [f"  note     {note}" for note in plan["notes"]])


@cache
def source_scan(config: CorpusConfig) -> SourceScan:
    """The sources of a run, looked at once a run."""
    return scan_sources(config)


@cache
def token_files(sources: tuple[TokenSource, ...], corpus: CorpusConfig) -> list[TokenFile]:
    """The tokenised files of a run, looked at once a run."""
    from lavra.tokens.pretokenized import scan_token_sources

    return scan_token_sources(sources, source_scan(corpus).names)


def _plan_inputs(run: Run, scan: SourceScan, files: list[TokenFile]) -> dict[str, Any]:
    from lavra.tokens.pretokenized import file_inputs

    start = inherited(run)
    given = _given_tokenizer(run.recipe)
    if given is not None:
        _check_tokenizers_of_runs(run.recipe, given)
    recipe = run.recipe.model_dump(
        mode="json", exclude={"name": True, "run_dir": True, "success": True, "preset": True, **WATCHING}
    )
    return {
        "format": PLAN_FORMAT,
        "recipe": recipe,
        "sources": scan.inputs(),
        "token_sources": file_inputs(files),
        "tokenizer": artifact.file_hash(given) if given else "",
        "init_from": start[1] if start else "",
    }


def _given_tokenizer(recipe: Recipe) -> Path | None:
    """The tokenizer.json that is used instead of a trained one.

    Raises:
        PreflightError: it is not there.
    """
    start, path = recipe.train.init_from, recipe.tokenizer.path
    given = Path(start) / "tokenizer/tokenizer.json" if start else Path(path) if path else None
    if given is not None and not given.is_file():
        raise PreflightError(f"no tokenizer at {given}", hint="name a tokenizer.json")
    return given


def _check_tokenizers_of_runs(recipe: Recipe, given: Path) -> None:
    """Tokens of another run stand for the same text only under the tokenizer that wrote them."""
    from lavra.tokens.pretokenized import tokens_folder

    for source in recipe.tokens.sources:
        theirs = Path(source.path) / "tokenizer/tokenizer.json"
        if tokens_folder(source.path) and artifact.file_hash(theirs) != artifact.file_hash(given):
            raise PreflightError(
                f"the tokens of {source.path} were written by another tokenizer than {given}",
                where="tokens.sources",
                hint=f"tokenizer.path={theirs}, or name the run's text in corpus.sources",
            )


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
    """Sources -> documents with signals -> judged, deduplicated, split, accounted."""
    from lavra.corpus.build import build_corpus
    from lavra.corpus.decontamination.items import read_items
    from lavra.corpus.reading import read_documents
    from lavra.corpus.rulesets.ruleset import combine, splitters_of

    config, decisions = run.recipe.corpus, run.plan["decisions"]
    scan, rules = source_scan(config), combine(config.rulesets, config.thresholds)
    workers = usable_cores() if config.workers == "auto" else config.workers
    read_items(config.decontamination)  # what is wrong with a benchmark is told before hours of reading
    read_inputs = {
        "format": DOCUMENTS_FORMAT,
        "sources": [s.model_dump(mode="json", exclude={"path"}) for s in config.sources],
        "files": scan.inputs(),
        "max_document_bytes": config.max_document_bytes,
        "words": splitters_of([rules]),
        "languages": bool(config.languages),
        "pii": config.pii.actions(),
        "max_bytes": decisions["corpus_max_bytes"],
    }
    inputs = {
        "format": CORPUS_FORMAT,
        "documents": artifact.fingerprint(read_inputs),
        "rules": rules.to_json(),
        "languages": [*config.languages, config.min_language_score] if config.languages else [],
        "decontamination": config.decontamination.model_dump(mode="json", exclude={"benchmarks"}),
        "benchmarks": [
            [b.title, list(b.fields), artifact.file_hash(Path(b.path))]
            for b in config.decontamination.benchmarks
        ],
        "near_duplicates": config.near_duplicates.model_dump(mode="json"),
        "validation_fraction": config.validation_fraction,
        "validation_max_bytes": decisions["validation_max_bytes"],
    }

    def read(folder: Path, inputs: dict[str, Any]) -> Artifact:
        limit = decisions["corpus_max_bytes"]
        return read_documents(config, scan, folder, max_bytes=limit, workers=workers, inputs=inputs)

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        documents = build_or_reuse(run, "documents", read_inputs, read)
        limit = decisions["validation_max_bytes"]
        result = build_corpus(
            config, documents, folder, validation_max_bytes=limit, workers=workers, inputs=inputs
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
    given = _given_tokenizer(run.recipe)
    inputs = {
        "format": FORMAT_VERSION,
        "corpus": corpus.fingerprint,
        "config": config.model_dump(mode="json", exclude={"vocab_size", "path"}),
        "vocab_size": vocab_size,
        "inherited": artifact.file_hash(given) if given else "",
    }

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        result = run_apart(
            build_tokenizer, config, corpus, folder, vocab_size=vocab_size, given=given, inputs=inputs
        )
        if rate := result.summary["bytes_per_token"]:
            console.say(f"  {rate:.2f} bytes a token on validation text")
        return result

    return build_or_reuse(run, "tokenizer", inputs, build)


def tokens_stage(run: Run) -> Artifact:
    """Corpus and tokenised sources + tokenizer -> token shards."""
    from lavra.tokens.build import FORMAT_VERSION, build_tokens
    from lavra.tokens.importing import Import
    from lavra.tokens.pretokenized import file_inputs

    corpus, tokenizer = run.artifacts["corpus"], run.artifacts["tokenizer"]
    packing, seq_len = run.recipe.tokens.packing, run.plan["decisions"]["seq_len"]
    inputs = {"format": FORMAT_VERSION, "corpus": corpus.fingerprint, "tokenizer": tokenizer.fingerprint}
    if packing != "concat":  # rows are planned and stored
        inputs |= {"packing": packing, "seq_len": seq_len}
    config, wanted = run.recipe.corpus, None
    if files := token_files(run.recipe.tokens.sources, config):
        workers = usable_cores() if config.workers == "auto" else config.workers
        limit = run.plan["decisions"]["validation_max_bytes"]
        wanted = Import(files, config.validation_fraction, limit, workers)
        inputs |= {"files": file_inputs(files), "validation": [config.validation_fraction, limit]}

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        result = run_apart(
            build_tokens,
            corpus,
            tokenizer,
            folder,
            packing=packing,
            seq_len=seq_len,
            inputs=inputs,
            wanted=wanted,
        )
        console.say(f"  {format_count(result.summary['train_tokens'])} training tokens")
        return result

    return build_or_reuse(run, "tokens", inputs, build)


# --- evaluate, report ---------------------------------------------------------------------------


def evaluate_stage(run: Run) -> Artifact:
    """Final weights on whole validation documents."""
    from lavra.checkpoint.store import latest_checkpoint, weights_file
    from lavra.evaluate.build import FORMAT_VERSION, evaluate, results_table
    from lavra.tokens.importing import held_out_documents

    checkpoint = latest_checkpoint(run.folder("pretrain"))
    assert checkpoint is not None
    max_bytes = run.plan["decisions"]["evaluate_max_bytes"]
    corpus = run.artifacts["corpus"]
    inputs = {
        "format": FORMAT_VERSION,
        "weights": artifact.file_hash(checkpoint / weights_file(checkpoint)),
        "corpus": corpus.fingerprint,
        "tokenizer": run.artifacts["tokenizer"].fingerprint,
        "max_bytes": max_bytes,
    }
    if run.recipe.tokens.sources:
        inputs["tokens"] = run.artifacts["tokens"].fingerprint

    def build(folder: Path, inputs: dict[str, Any]) -> Artifact:
        model, tokenizer = load_trained(run.dir)
        imported = held_out_documents(run.folder("tokens"), tokenizer)
        result = evaluate(
            model, tokenizer, corpus, folder, max_bytes=max_bytes, inputs=inputs, imported=imported
        )
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
    from lavra.checkpoint.store import latest_checkpoint, load_model, weights_file
    from lavra.experiment.calibrate import training_device
    from lavra.model.decoder import Decoder
    from lavra.tokenizer.bpe import load_tokenizer

    checkpoint = latest_checkpoint(run_dir / "checkpoints")
    if checkpoint is None:
        raise PreflightError(f"no trained model in {run_dir.resolve()}", hint="train one: lavra run RECIPE")
    shape = ModelShape(**artifact.read_json(run_dir / "plan.json")["decisions"]["model"])
    model = Decoder(shape)
    load_model(checkpoint, model, file=weights_file(checkpoint))
    return model.to(training_device()).eval(), load_tokenizer(run_dir / "tokenizer/tokenizer.json")


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
    force: bool = False,
    started: float | None = None,
) -> Run:
    """Bring a run up to `until`; arguments and errors as in `pipeline.run_pipeline`."""
    return run_pipeline(
        loaded,
        STAGE_FUNCTIONS,
        from_stage=from_stage,
        until=until,
        fresh=fresh,
        force=force,
        started=started,
    )
