"""The documents artifact: sources -> every document that can be read, with its signals. Nothing is judged here.

    manifest -> read units -> COMPLETE

It stays beside the corpus that is built from it, so that changed rules are judged without reading anything again. A unit
is read once; its result does not depend on the number of workers.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lavra.artifact import Artifact, begin, finish, read_json, write_json, writing
from lavra.corpus import accounting as acc
from lavra.corpus.accounting import Tally, describe_losses
from lavra.corpus.config import CorpusConfig
from lavra.corpus.executor import map_units
from lavra.corpus.language import identify
from lavra.corpus.read_pass import ReadTask, UnitPart, read_unit
from lavra.corpus.readers import Span
from lavra.corpus.rulesets.ruleset import combine, splitters_of
from lavra.corpus.sources import SourceScan
from lavra.corpus.unit_files import ReadUnit, merged
from lavra.corpus.units import Manifest, plan_units
from lavra.corpus.write_pass import FILES
from lavra.errors import PreflightError

KIND = "documents"
MANIFEST = "manifest.json"


def read_documents(
    config: CorpusConfig,
    scan: SourceScan,
    out: Path,
    *,
    max_bytes: int | None,
    workers: int,
    inputs: Mapping[str, Any],
) -> Artifact:
    """Read all sources into `out`, or continue an interrupted reading of the same inputs.

    Args:
        config: fields of the sources and limits; of the rulesets, how they split words.
        scan: files to read, from `scan_sources`.
        out: folder of the artifact.
        max_bytes: text bytes to take, by a sample of whole documents; None for everything.
        workers: processes.
        inputs: decisions and upstream fingerprints of the artifact.

    Raises:
        PreflightError: no document can be read.
        LavraError: the disk is full, a worker died, or the accounting does not add up.
    """
    with writing(KIND, out):
        begin(out, KIND, inputs)
        manifest = _manifest(scan, out, max_bytes)
        units = [ReadUnit(out, unit) for unit in range(len(manifest.units))]
        _read_units(config, scan, manifest, units, workers)
        tally = merged([unit.seal for unit in units], out)
        if scan.files and not tally.sum("outcome", acc.READ)[0]:
            raise nothing_kept(tally, scan.names)
        return finish(out, KIND, inputs, _summary(scan, manifest, tally))


def _summary(scan: SourceScan, manifest: Manifest, tally: Tally) -> dict[str, Any]:
    """What the corpus is built from besides the files."""
    notes = []
    if manifest.sampling_rate < 1:
        notes.append(f"a sample of {manifest.sampling_rate:.3g} of the documents, by content hash")
    if scan.ignored:
        seen = ", ".join(f"{count} {suffix}" for suffix, count in scan.ignored.items())
        notes.append(f"files that are not readable were ignored: {seen}")
    documents, size = tally.sum("outcome", acc.READ)
    return {
        "documents": documents,
        "bytes": size,
        "units": len(manifest.units),
        "weights": manifest.weights,
        "sources": list(scan.names),
        "sampling_rate": manifest.sampling_rate,
        "ignored_files": dict(scan.ignored),
        "notes": notes,
    }


def nothing_kept(tally: Tally, names: Sequence[str]) -> PreflightError:
    """What to say where no document is left."""
    records = tally.sum("outcome", acc.RECORDS_IN)[0]
    return PreflightError(
        f"nothing is kept of {records} records: {describe_losses(tally) or 'every file is empty'}",
        where=", ".join(names),
        hint="no_text: set text_field; oversize: raise max_document_bytes; rules: see corpus.rulesets and "
        "corpus.thresholds, or corpus.rulesets=[]",
    )


def _manifest(scan: SourceScan, out: Path, max_bytes: int | None) -> Manifest:
    """The units, written once; files of other units are cleared."""
    manifest = plan_units(scan, max_bytes)
    planned = manifest.to_json(scan)
    path = out / MANIFEST
    if not path.exists() or read_json(path) != planned:
        for folder in ("units", "errors"):
            shutil.rmtree(out / folder, ignore_errors=True)
        names = [[scan.names[f.source_index], f.name, f.format.reader] for f in scan.files]
        write_json(out / FILES, names)
        write_json(path, planned)
    return manifest


def _read_units(
    config: CorpusConfig, scan: SourceScan, manifest: Manifest, units: list[ReadUnit], workers: int
) -> None:
    def unit_part(file: int, start: int, stop: int) -> UnitPart:
        found = scan.files[file]
        span = Span(found.path, found.name, found.format, start, stop)
        return UnitPart(file, span, config.sources[found.source_index], scan.names[found.source_index])

    if config.languages:
        identify([])  # a missing package is told before any work
    splitters = splitters_of([combine(config.rulesets, config.thresholds)])
    tasks = [
        ReadTask(
            unit,
            [unit_part(*span) for span in spans],
            splitters,
            bool(config.languages),
            config.pii.actions(),
            config.max_document_bytes,
            manifest.sampling_rate,
        )
        for unit, spans in zip(units, manifest.units, strict=True)
    ]
    map_units(read_unit, tasks, manifest.weights, workers=workers, label="corpus: read")
