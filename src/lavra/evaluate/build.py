"""Stage `evaluate`: a trained model on whole validation documents, beside xz and zstd."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lavra import artifact, console
from lavra.artifact import Artifact
from lavra.corpus.store import iter_documents
from lavra.errors import PreflightError
from lavra.evaluate.compressors import xz_bytes, zstd_bytes
from lavra.evaluate.scoring import document_bits
from lavra.model.decoder import Decoder
from lavra.tokenizer.bpe import Tokenizer

FORMAT_VERSION = 1
CHUNK_BYTES = 200_000  # documents scored between two progress updates


@dataclass(frozen=True)
class Scored:
    """One validation document: sizes in bits."""

    path: str
    kind: str
    file_type: str
    bytes: int
    lavra: float
    xz: int
    zstd: int


def choose_documents(
    corpus: Artifact, max_bytes: int, imported: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Whole validation documents up to `max_bytes`, by content hash, kinds in their proportion.

    The order by hash makes the choice independent of reading order and stable when text is added.

    Args:
        imported: rows of validation documents that are not in the corpus.
    """
    columns = ["id", "text", "path", "key", "kind", "file_type", "bytes"]
    documents = [row for b in iter_documents(corpus.path, "validation", columns) for row in b.to_pylist()]
    documents += imported
    if not documents:
        raise PreflightError("there are no validation documents")
    share = min(1.0, max_bytes / sum(row["bytes"] for row in documents))
    chosen: list[dict[str, Any]] = []
    for kind in sorted({row["kind"] for row in documents}):
        members = sorted((r for r in documents if r["kind"] == kind), key=lambda r: r["id"])
        room = share * sum(r["bytes"] for r in members)
        for row in members:
            if row["bytes"] <= room + 1 or not any(c["kind"] == kind for c in chosen):
                chosen.append(row)
                room -= row["bytes"]
    return chosen


def evaluate(
    model: Decoder,
    tokenizer: Tokenizer,
    corpus: Artifact,
    out: Path,
    *,
    max_bytes: int,
    inputs: dict[str, Any],
    imported: Iterable[dict[str, Any]] = (),
) -> Artifact:
    """Score, compare, write `results.json`. All figures are bits per UTF-8 byte of the original text."""
    artifact.begin(out, "evaluate", inputs)
    documents = choose_documents(corpus, max_bytes, imported)
    with console.progress("  scoring", sum(row["bytes"] for row in documents)) as bar:
        scored = [s for chunk in _chunks(documents) for s in _score(model, tokenizer, chunk, bar)]
    together = "".join(row["text"] for row in documents).encode()
    total = _rates(scored)
    results: dict[str, Any] = {
        "bits_per_byte": total["lavra"],
        "documents": len(scored),
        "bytes": len(together),
        "total": total,
        "by_kind": _grouped(scored, lambda s: (s.kind, "all")),
        "by_file_type": _grouped(scored, lambda s: (s.kind, s.file_type)),
        "all_together": {
            "xz": 8 * xz_bytes(together) / len(together),
            "zstd": 8 * zstd_bytes(together) / len(together),
        },
        "files": [
            {"path": s.path, "kind": s.kind, "file_type": s.file_type, "bytes": s.bytes}
            | {name: getattr(s, name) / s.bytes for name in ("lavra", "xz", "zstd")}
            for s in scored
        ],
        "notes": [
            "lavra counts the bits of every token and of the end token, given only the document itself",
            "xz is `xz -9e`, zstd is `zstd -19`, each on one file by itself; all_together is one archive",
        ],
    }
    artifact.write_json(out / "results.json", results)
    by_kind = {row["kind"]: row["lavra"] for row in results["by_kind"]}
    summary = {
        "bits_per_byte": total["lavra"],
        "prose_bits_per_byte": by_kind.get("prose"),
        "code_bits_per_byte": by_kind.get("code"),
        "xz_ratio": total["lavra"] / total["xz"],
        "zstd_ratio": total["lavra"] / total["zstd"],
    }
    return artifact.finish(out, "evaluate", inputs, summary)


def _chunks(documents: list[dict[str, Any]]) -> Iterable[list[dict[str, Any]]]:
    chunk: list[dict[str, Any]] = []
    for row in documents:
        chunk.append(row)
        if sum(r["bytes"] for r in chunk) >= CHUNK_BYTES:
            yield chunk
            chunk = []
    if chunk:
        yield chunk


def _score(
    model: Decoder, tokenizer: Tokenizer, rows: list[dict[str, Any]], bar: console.Progress
) -> list[Scored]:
    bits = document_bits(model, tokenizer.encode_batch([r["text"] for r in rows]), end_id=tokenizer.end_id)
    scored = []
    for row, model_bits in zip(rows, bits, strict=True):
        data = row["text"].encode()
        name = f"{row['path']}#{row['key']}" if row["key"] not in ("", row["path"]) else row["path"]
        xz, zstd = 8 * xz_bytes(data), 8 * zstd_bytes(data)
        scored.append(Scored(name, row["kind"], row["file_type"], len(data), model_bits, xz, zstd))
        bar.advance(len(data))
    return scored


def _rates(scored: list[Scored]) -> dict[str, float]:
    """Total bits / total bytes (not a mean of means)."""
    size = sum(s.bytes for s in scored)
    return {name: sum(getattr(s, name) for s in scored) / size for name in ("lavra", "xz", "zstd")}


def _grouped(scored: list[Scored], key: Callable[[Scored], tuple[str, str]]) -> list[dict[str, Any]]:
    rows = []
    for kind, file_type in sorted({key(s) for s in scored}):
        members = [s for s in scored if key(s) == (kind, file_type)]
        rows.append(
            {
                "kind": kind,
                "file_type": file_type,
                "documents": len(members),
                "bytes": sum(s.bytes for s in members),
            }
            | _rates(members)
        )
    return rows


def results_table(results: dict[str, Any]) -> str:
    """The table that the command line prints."""
    rows = [
        (f"{r['kind']} {r['file_type']}", r["documents"], f"{r['bytes']:,}", *_cells(r))
        for r in [*results["by_kind"], *results["by_file_type"]]
    ]
    rows.append(("all", results["documents"], f"{results['bytes']:,}", *_cells(results["total"])))
    together = results["all_together"]
    rows.append(
        ("one archive", 1, f"{results['bytes']:,}", "-", f"{together['xz']:.3f}", f"{together['zstd']:.3f}")
    )
    return console.format_table(("bits per byte", "files", "bytes", "lavra", "xz -9e", "zstd -19"), rows)


def _cells(row: dict[str, Any]) -> tuple[str, str, str]:
    return tuple(f"{row[name]:.3f}" for name in ("lavra", "xz", "zstd"))  # type: ignore[return-value]
