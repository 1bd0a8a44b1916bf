"""The corpus stage: sources -> deduplicated, split and accounted Parquet parts.

    manifest -> read units -> deduplicate -> split -> write units -> accounting.json -> COMPLETE

All intermediate files are below `work/` and go once `accounting.json` says that every part is
whole. Each step leaves atomically written files, so the same command continues after any
interruption, and its result does not depend on the number of workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lavra.artifact import Artifact, atomic_writer, begin, finish, read_json, write_json
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally, build_accounting, describe_losses, summarize
from lavra.corpus.config import CorpusConfig
from lavra.corpus.dedup import deduplicate, iter_kept
from lavra.corpus.executor import map_units
from lavra.corpus.read_pass import ReadTask, UnitPart, read_unit
from lavra.corpus.readers import Span
from lavra.corpus.records import KINDS
from lavra.corpus.sources import SourceScan
from lavra.corpus.split import Cut, check_cut, plan_split
from lavra.corpus.store import ACCOUNTING, read_accounting
from lavra.corpus.unit_files import WORK, UnitPaths, sealed_tally
from lavra.corpus.units import Manifest, plan_units
from lavra.corpus.write_pass import COPIES, DOCUMENTS, FILES, GROUPS, WriteTask, document_text, write_unit
from lavra.errors import LavraError, PreflightError

KIND = "corpus"
PLAN = "plan.json"


def build_corpus(
    config: CorpusConfig,
    scan: SourceScan,
    out: Path,
    *,
    max_bytes: int | None,
    validation_max_bytes: int,
    workers: int,
    inputs: Mapping[str, Any],
) -> Artifact:
    """Build the corpus in `out`, or continue an interrupted build of the same inputs.

    Args:
        config: rules and limits (its `max_bytes`, `validation_max_bytes` and `workers` are not read).
        scan: files to read, from `scan_sources`.
        out: folder of the artifact.
        max_bytes: text bytes to take, by a sample of whole documents; None for everything.
        validation_max_bytes: upper bound of the held-out bytes.
        workers: processes.
        inputs: decisions and upstream fingerprints of the artifact.

    Raises:
        PreflightError: nothing is kept.
        LavraError: the disk is full, a worker died, or the accounting does not add up.
    """
    try:
        begin(out, KIND, inputs)
        # accounting.json is written last: with it every part is whole, and `work` may be half gone.
        if not scan.files:  # all text comes tokenised
            write_json(out / ACCOUNTING, build_accounting(Tally(), {"validation_groups": 0}, []))
        if not (out / ACCOUNTING).exists():
            manifest = _manifest(scan, out, max_bytes)
            _read_units(config, scan, manifest, out, workers)
            cut = _decide(config, manifest, out, validation_max_bytes)
            _write_units(manifest, cut, out, workers)
            write_json(out / ACCOUNTING, _accounting(scan, manifest, out))
        if (out / WORK).exists():
            shutil.rmtree(out / WORK)
        return finish(out, KIND, inputs, summarize(read_accounting(out)))
    except OSError as error:
        raise LavraError(
            f"cannot write the corpus: {error.strerror or error}",
            where=str(error.filename or out),
            hint="make room or choose another run_dir=PATH; the same command continues",
        ) from error


def _manifest(scan: SourceScan, out: Path, max_bytes: int | None) -> Manifest:
    """The units, written once; parts of other units are cleared."""
    manifest = plan_units(scan, max_bytes)
    planned = manifest.to_json(scan)
    path = out / WORK / "manifest.json"
    if not path.exists() or read_json(path) != planned:
        for folder in (WORK, acc.TRAIN, acc.VALIDATION, acc.DROPPED, acc.ERRORS):
            shutil.rmtree(out / folder, ignore_errors=True)
        names = [[scan.names[f.source_index], f.name, f.format.reader] for f in scan.files]
        write_json(out / WORK / FILES, names)
        write_json(path, planned)
    return manifest


def _units(manifest: Manifest, out: Path) -> list[UnitPaths]:
    return [UnitPaths(out, unit) for unit in range(len(manifest.units))]


def _read_units(config: CorpusConfig, scan: SourceScan, manifest: Manifest, out: Path, workers: int) -> None:
    """First pass.

    Raises:
        PreflightError: no document passes.
    """

    def unit_part(file: int, start: int, stop: int) -> UnitPart:
        found = scan.files[file]
        span = Span(found.path, found.name, found.format, start, stop)
        return UnitPart(file, span, config.sources[found.source_index], scan.names[found.source_index])

    units = _units(manifest, out)
    tasks = [
        ReadTask(
            paths,
            [unit_part(*span) for span in spans],
            config.rules,
            config.max_document_bytes,
            manifest.sampling_rate,
        )
        for paths, spans in zip(units, manifest.units, strict=True)
    ]
    map_units(read_unit, tasks, manifest.weights, workers=workers, label="corpus: read")
    tally = _merged(units, "read")
    if not tally.sum("outcome", acc.PASSED)[0]:
        records = tally.sum("outcome", acc.RECORDS_IN)[0]
        raise PreflightError(
            f"nothing is kept of {records} records: {describe_losses(tally) or 'every file is empty'}",
            where=", ".join(scan.names),
            hint="no_text: set text_field; oversize: raise max_document_bytes; "
            "rules: see corpus.rules, or rules.enabled=false",
        )


def _merged(units: Sequence[UnitPaths], *passes: str) -> Tally:
    tallies = [sealed_tally(paths, name) for paths in units for name in passes]
    return Tally(row for tally in tallies if tally is not None for row in tally.to_rows())


def _decide(config: CorpusConfig, manifest: Manifest, out: Path, validation_max_bytes: int) -> Cut | None:
    """Find copies and choose what is held out; `plan.json` is written last."""
    work, units = out / WORK, _units(manifest, out)
    plan_file = work / PLAN
    if not plan_file.exists():
        record_files = [paths.records for paths in units]
        passed = _merged(units, "read").sum("outcome", acc.PASSED)[0]
        deduplicate(record_files, passed, work / COPIES)
        chunks = partial(iter_kept, record_files, work / COPIES)
        plan = plan_split(chunks, config.validation_fraction, validation_max_bytes, work / "scratch")
        if plan.cut:
            text = document_text(units[plan.cut.unit], plan.cut.row)
            check_cut(text, plan.cut.tail_bytes, chunks())
        for name, keys in ((GROUPS, plan.groups), (DOCUMENTS, plan.documents)):
            with atomic_writer(work / name) as file:
                np.save(file, keys)
        write_json(
            plan_file,
            {
                "cut": plan.cut,
                "notes": plan.notes,
                "split": {
                    "validation_groups": len(plan.groups),
                    "single_documents": len(plan.documents),
                    "target_bytes": dict(zip(KINDS, plan.target_bytes, strict=True)),
                },
            },
        )
    cut = read_json(plan_file)["cut"]
    return Cut(*cut) if cut else None


def _write_units(manifest: Manifest, cut: Cut | None, out: Path, workers: int) -> None:
    """Second pass."""
    tasks = [
        WriteTask(paths, cut if cut and cut.unit == paths.unit else None) for paths in _units(manifest, out)
    ]
    map_units(write_unit, tasks, manifest.weights, workers=workers, label="corpus: write")


def _accounting(scan: SourceScan, manifest: Manifest, out: Path) -> dict[str, Any]:
    plan = read_json(out / WORK / PLAN)
    tally = _merged(_units(manifest, out), "read", "write")
    notes = list(plan["notes"])
    if manifest.sampling_rate < 1:
        notes.append(f"a sample of {manifest.sampling_rate:.3g} of the documents, by content hash")
    if scan.ignored:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in scan.ignored.items())
        notes.append(f"files that are not readable were ignored: {seen}")
    accounting = build_accounting(tally, plan["split"], notes)
    return accounting | {"sampling_rate": manifest.sampling_rate, "ignored_files": dict(scan.ignored)}
