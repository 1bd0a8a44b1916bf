"""Real text, real dirt: corpora and a short training run on the folder named by LAVRA_REALDATA."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lavra.artifact import Artifact
from lavra.corpus.build import build_corpus
from lavra.corpus.config import CorpusConfig, Source
from lavra.corpus.reading import read_documents
from lavra.corpus.sources import scan_sources
from lavra.corpus.store import iter_documents, read_accounting

pytestmark = pytest.mark.realdata


@pytest.fixture
def build(tmp_path: Path) -> Callable[..., Artifact]:
    def run(*paths: Path) -> Artifact:
        config = CorpusConfig(sources=tuple(Source(path=str(p)) for p in paths))
        scan = scan_sources(config)
        read = read_documents(config, scan, tmp_path / "documents", max_bytes=None, workers=1, inputs={})
        folder = tmp_path / "corpus"
        return build_corpus(config, read, folder, validation_max_bytes=300_000, workers=1, inputs={})

    return run


def test_every_record_of_a_real_corpus_is_accounted_for(
    realdata: Path, build: Callable[..., Artifact]
) -> None:
    corpus = build(realdata / "text/en-misc.jsonl.zst")
    totals: dict[str, Any] = read_accounting(corpus.path)["totals"]
    assert totals["records_in"]["documents"] == 1818  # as its description says
    parts = ("kept", "dropped", "errors", "sampled_out")
    assert sum(totals[p]["documents"] for p in parts) == totals["records_in"]["documents"]
    assert totals["kept"]["documents"] > 1500
    sides = [{i for b in iter_documents(corpus.path, s, ["id"]) for i in b["id"].to_pylist()} for s in ("train", "validation")]  # fmt: skip
    assert sides[0] and sides[1] and not sides[0] & sides[1]


def test_binary_garbage_saved_as_text_is_dropped_with_its_reason_and_good_text_beside_it_survives(
    realdata: Path, build: Callable[..., Artifact]
) -> None:
    corpus = build(realdata / "web/ungoliant-garbage.txt", realdata / "text/en-misc.jsonl.zst")
    assert read_accounting(corpus.path)["reasons"]["control_characters"]["documents"] >= 1
    kept = {p for s in ("train", "validation") for b in iter_documents(corpus.path, s, ["path"]) for p in b["path"].to_pylist()}  # fmt: skip
    assert "ungoliant-garbage.txt" not in kept
    assert corpus.summary["train_documents"] > 1500


@pytest.mark.slow
def test_a_short_run_on_real_text_learns_more_than_token_frequencies(realdata: Path, tmp_path: Path) -> None:
    from lavra.recipe import load_recipe
    from lavra.report.diagnosis import history
    from lavra.report.run import Run
    from lavra.stages import run_recipe
    from lavra.train.diagnosis.judge import judge

    source = f'corpus.sources=[{{"path": "{realdata / "text/en-misc.jsonl.zst"}"}}]'
    settings = [
        source,
        f"run_dir={tmp_path / 'run'}",
        "budget.time=null",
        "budget.tokens=150k",
        "train.compile=off",
    ]
    run = run_recipe(load_recipe("quickstart", settings))
    summary = run.artifacts["evaluate"].summary
    assert summary["bits_per_byte"] < 3.0
    assert (run.dir / "report.html").stat().st_size > 20_000
    assert run_recipe(load_recipe("quickstart", settings)).built == []
    assert judge(history(Run(run.dir))).findings == ()  # a healthy run is left in peace
