"""Small corpora: writing them, building them, reading them back."""

from __future__ import annotations

import hashlib
import json
import random
from pathlib import Path

import pytest

from lavra.artifact import Artifact
from lavra.console import set_quiet
from lavra.corpus.build import build_corpus
from lavra.corpus.config import CorpusConfig, Source
from lavra.corpus.formats import detect
from lavra.corpus.readers import Span, read_span
from lavra.corpus.reading import read_documents
from lavra.corpus.sources import scan_sources
from lavra.corpus.store import iter_documents, read_accounting


@pytest.fixture(autouse=True)
def quiet():
    set_quiet(True)
    yield
    set_quiet(False)


WORDS = [
    "amber",
    "bridge",
    "candle",
    "distant",
    "ember",
    "forest",
    "garden",
    "harbour",
    "island",
    "journey",
    "kettle",
    "lantern",
    "meadow",
    "narrow",
    "orchard",
    "pebble",
    "quiet",
    "river",
    "silver",
    "timber",
    "under",
    "valley",
    "winter",
    "yellow",
]


def prose(number: int, sentences: int = 8) -> str:
    """A distinct text that every rule lets pass."""
    draw = random.Random(number)
    return "\n".join(f"Tale {number}: " + " ".join(draw.choices(WORDS, k=7)) + "." for _ in range(sentences))


@pytest.fixture
def prose_text():
    return prose


@pytest.fixture
def write_jsonl():
    """(path, records or raw lines) -> path."""

    def write(path: Path, records) -> Path:
        lines = [r if isinstance(r, bytes) else json.dumps(r).encode() for r in records]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path

    return write


@pytest.fixture
def read_file():
    """(path, max_bytes) -> all items of one file."""

    def read(path: Path, max_bytes: int = 1 << 20, source: Source | None = None, **span):
        layout = detect(path.name)
        assert layout is not None
        start, stop = span.get("start", 0), span.get("stop") or path.stat().st_size
        whole = Span(str(path), path.name, layout, start, stop)
        return list(read_span(whole, source or Source(path=str(path)), max_bytes))

    return read


@pytest.fixture
def build():
    """(out, paths, options) -> artifact; what was read lies in `OUT.documents` beside it."""

    def run(
        out: Path, *paths: Path | str, workers: int = 1, max_bytes=None, held_out=1 << 30, **config
    ) -> Artifact:
        settings = CorpusConfig(sources=tuple(Source(path=str(path)) for path in paths), **config)
        scan = scan_sources(settings)
        read = {
            "files": scan.inputs(),
            "sources": len(paths),
            "max_bytes": max_bytes,
            "words": settings.rulesets,
        }
        folder = out.with_name(f"{out.name}.documents")
        documents = read_documents(settings, scan, folder, max_bytes=max_bytes, workers=workers, inputs=read)
        inputs = {"read": read, "config": settings.model_dump(mode="json", exclude={"workers"})}
        return build_corpus(
            settings, documents, out, validation_max_bytes=held_out, workers=workers, inputs=inputs
        )

    return run


@pytest.fixture
def rows():
    """(corpus, split) -> list of document dicts."""

    def read(corpus: Path, split: str):
        return [row for batch in iter_documents(corpus, split) for row in batch.to_pylist()]

    return read


@pytest.fixture
def accounting():
    return read_accounting


@pytest.fixture
def snapshot():
    """folder -> relative name -> content hash, for comparing builds byte by byte."""

    def take(folder: Path) -> dict[str, str]:
        return {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }

    return take
