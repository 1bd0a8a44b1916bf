"""The corpus artifact: documents -> judged, deduplicated, split and accounted Parquet parts.

    judge units -> deduplicate -> near-duplicates -> decontaminate -> split -> write units -> accounting.json -> COMPLETE

All intermediate files are below `work/` and go once `accounting.json` says that every part is
whole. Each step leaves atomically written files, so the same command continues after any
interruption, and its result does not depend on the number of workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lavra.artifact import Artifact, atomic_writer, begin, finish, read_json, write_json, writing
from lavra.console import progress
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import build_accounting, summarize
from lavra.corpus.config import CorpusConfig
from lavra.corpus.decontamination.find import FACTS, find_contaminated
from lavra.corpus.dedup import deduplicate, iter_kept
from lavra.corpus.executor import map_units
from lavra.corpus.judge_pass import Judge, iter_passed, judge_unit, make_judge
from lavra.corpus.near.find import JOINED, NEAR, find_near_duplicates, regroup
from lavra.corpus.reading import nothing_kept
from lavra.corpus.records import KINDS, Records
from lavra.corpus.split import Cut, check_cut, plan_split
from lavra.corpus.store import ACCOUNTING, read_accounting
from lavra.corpus.unit_files import WORK, ReadUnit, WriteUnit, merged
from lavra.corpus.write_pass import COPIES, DOCUMENTS, GROUPS, WriteTask, document_text, write_unit

KIND = "corpus"
PLAN = "plan.json"


def build_corpus(
    config: CorpusConfig,
    documents: Artifact,
    out: Path,
    *,
    validation_max_bytes: int,
    workers: int,
    inputs: Mapping[str, Any],
) -> Artifact:
    """Build the corpus in `out`, or continue an interrupted build of the same inputs.

    Args:
        config: rules and limits (its `max_bytes`, `validation_max_bytes` and `workers` are not read).
        documents: what was read, from `read_documents`.
        out: folder of the artifact.
        validation_max_bytes: upper bound of the held-out bytes.
        workers: processes.
        inputs: decisions and upstream fingerprints of the artifact.

    Raises:
        PreflightError: nothing is kept.
        LavraError: the disk is full, a worker died, or the accounting does not add up.
    """
    with writing(KIND, out):
        begin(out, KIND, inputs)
        # accounting.json is written last: with it every part is whole, and `work` may be half gone.
        if not (out / ACCOUNTING).exists():
            write_json(out / ACCOUNTING, _build(config, documents, out, validation_max_bytes, workers))
        if (out / WORK).exists():
            shutil.rmtree(out / WORK)
        return finish(out, KIND, inputs, summarize(read_accounting(out)))


def _build(
    config: CorpusConfig, documents: Artifact, out: Path, validation_max_bytes: int, workers: int
) -> dict[str, Any]:
    """All passes; contents of `accounting.json`."""
    facts, judge = documents.summary, make_judge(config)
    units = [WriteUnit(out, ReadUnit(documents.path, unit)) for unit in range(facts["units"])]
    read = merged([unit.read.seal for unit in units], documents.path)
    split, notes = {"validation_groups": 0}, list(facts["notes"])
    contamination: dict[str, Any] = {}
    if units:  # else all text comes tokenised
        _judge_units(units, judge)
        judged = merged([unit.seal("judge") for unit in units], out)
        if not judged.sum("outcome", acc.PASSED)[0]:
            raise nothing_kept(acc.Tally([*read.to_rows(), *judged.to_rows()]), facts["sources"])
        passed = judged.sum("outcome", acc.PASSED)[0]
        _find_copies(config, units, out / WORK, passed, facts["weights"], workers)
        plan = _decide(config, units, out, validation_max_bytes)
        cut = Cut(*plan["cut"]) if plan["cut"] else None
        contamination = read_json(out / WORK / FACTS)
        tasks = [
            WriteTask(u, judge.reasons, list(contamination), cut if cut and cut.unit == u.read.unit else None)
            for u in units
        ]
        map_units(write_unit, tasks, facts["weights"], workers=workers, label="corpus: write")
        split, notes = plan["split"], plan["notes"] + notes
    tally = merged([seal for unit in units for seal in (unit.seal("judge"), unit.seal("write"))], out)
    tally = acc.Tally([*read.to_rows(), *tally.to_rows()])
    accounting = build_accounting(tally, judge.reasons, split, notes)
    accounting["contamination"] = contamination
    return accounting | {name: facts[name] for name in ("sampling_rate", "ignored_files")}


def _judge_units(units: Sequence[WriteUnit], judge: Judge) -> None:
    with progress("corpus: judge", len(units)) as bar:
        for unit in units:
            judge_unit(unit, judge)
            bar.advance(1)


def _find_copies(
    config: CorpusConfig,
    units: Sequence[WriteUnit],
    work: Path,
    passed: int,
    weights: Sequence[int],
    workers: int,
) -> None:
    """Exact copies, near-duplicates among the others, benchmark items in what is left; once there is a plan, all is done."""
    copies = work / COPIES
    if (work / PLAN).exists():
        return
    if not (copies / NEAR).exists():
        deduplicate(iter_passed(units), passed, copies)
        if config.near_duplicates.enabled:
            find_near_duplicates(
                units, copies, config.near_duplicates, work, weights=weights, workers=workers
            )
        else:
            with atomic_writer(work / JOINED) as file:
                np.save(file, np.empty((0, 2), np.uint64))
    if config.decontamination.benchmarks:
        find_contaminated(units, copies, config.decontamination, work, weights=weights, workers=workers)
    else:
        write_json(work / FACTS, {})


def _decide(
    config: CorpusConfig, units: Sequence[WriteUnit], out: Path, validation_max_bytes: int
) -> dict[str, Any]:
    """Choose what is held out; `plan.json` is written last."""
    work = out / WORK
    plan_file = work / PLAN
    if plan_file.exists():
        return dict(read_json(plan_file))
    joined = np.load(work / JOINED)

    def kept() -> Iterator[Records]:
        return (regroup(chunk, joined) for chunk in iter_kept(iter_passed(units), work / COPIES))

    plan = plan_split(kept, config.validation_fraction, validation_max_bytes, work / "scratch")
    if plan.cut:
        text = document_text(units[plan.cut.unit].read, plan.cut.row)
        check_cut(text, plan.cut.tail_bytes, kept())
    for name, keys in ((GROUPS, plan.groups), (DOCUMENTS, plan.documents)):
        with atomic_writer(work / name) as file:
            np.save(file, keys)
    facts = {
        "cut": plan.cut,
        "notes": plan.notes,
        "split": {
            "validation_groups": len(plan.groups),
            "single_documents": len(plan.documents),
            "target_bytes": dict(zip(KINDS, plan.target_bytes, strict=True)),
        },
    }
    write_json(plan_file, facts)
    return facts
