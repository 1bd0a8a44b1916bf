"""Runs over tokenised sources, beside a corpus and without one; the text is that of the tiny run."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lavra import artifact, metrics
from lavra.artifact import read_json
from lavra.corpus.documents import content_id
from lavra.corpus.store import iter_documents
from lavra.errors import PreflightError, UsageError
from lavra.pipeline import Run
from lavra.recipe import load_recipe
from lavra.stages import load_trained, run_recipe
from lavra.tokens.build import open_windows
from lavra.tokens.sampler import Sampler
from lavra.watch import describer

RECIPE = """\
name: tiny
budget: {tokens: 3000}
corpus: {sources: [], workers: 1}
tokenizer: {path: TOKENIZER}
tokens: {seq_len: 32, sources: [{path: web}, {path: owt.bin, end_id: 50256}]}
model: {d_model: 32, n_layers: 1, n_heads: 1}
train:
  {batch_tokens: 128, micro_batch_size: 2, compile: off, precision: fp32,
   validations: 2, validation_tokens: 64, sample_tokens: 4}
"""


def texts_of(trained: Run) -> list[str]:
    folder = trained.artifacts["corpus"].path
    return [
        text
        for side in ("train", "validation")
        for batch in iter_documents(folder, side, ["text"])
        for text in batch["text"].to_pylist()
    ]


@pytest.fixture
def project(trained: Run, tmp_path: Path) -> Callable[..., Run]:
    """`project(*overrides, **options)`: the tiny recipe over `web` (Megatron) and `owt` (raw), made of its own text."""
    _, tokenizer = load_trained(trained.dir)
    encoded = tokenizer.encode_batch(texts_of(trained))
    web, owt = encoded[:15], encoded[15:]
    lengths = np.array([len(ids) for ids in web], np.int32)
    np.concatenate(web).astype(np.uint16).tofile(tmp_path / "web.bin")
    (tmp_path / "web.idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, 8, len(web), len(web) + 1)
        + lengths.tobytes()
        + (2 * (np.cumsum(lengths) - lengths)).astype(np.int64).tobytes()
        + np.arange(len(web) + 1).astype(np.int64).tobytes()
    )
    np.concatenate([[*ids, 50256] for ids in owt]).astype(np.uint16).tofile(tmp_path / "owt.bin")
    given = trained.dir / "tokenizer/tokenizer.json"
    (tmp_path / "tiny.yaml").write_text(RECIPE.replace("TOKENIZER", str(given)))

    def run(*overrides: str, **options: Any) -> Run:
        return run_recipe(load_recipe(str(tmp_path / "tiny.yaml"), overrides, {}), **options)

    return run


def test_a_run_without_a_corpus_goes_from_tokens_to_a_report(project, trained: Run, tmp_path: Path) -> None:
    run = project("tokens.mixture={web: 3, owt: 1}")
    tokens, results = run.artifacts["tokens"], read_json(run.dir / "eval/results.json")
    assert tokens.summary["train_documents"] + tokens.summary["validation_documents"] == 30
    assert tokens.summary["imported_documents"] == 30 and tokens.summary["dropped_empty_documents"] == 0
    held_out = {content_id(text)[1] for text in texts_of(trained)}
    assert results["documents"] == tokens.summary["validation_documents"]
    for row in results["files"]:
        assert row["bytes"] in held_out and row["path"].split("#")[0] in {
            f"{tmp_path}/web.bin",
            f"{tmp_path}/owt.bin",
        }
    assert "<html" in (run.dir / "report.html").read_text()
    assert artifact.file_hash(run.dir / "tokenizer/tokenizer.json") == artifact.file_hash(
        trained.dir / "tokenizer/tokenizer.json"
    )
    assert project("tokens.mixture={web: 3, owt: 1}").built == []
    ids = np.fromfile(tmp_path / "owt.bin", np.uint16)
    np.append(ids, ids[:5]).tofile(tmp_path / "owt.bin")
    changed = project("tokens.mixture={web: 3, owt: 1}", until="tokens")
    assert changed.built == ["plan", "tokens"]
    assert changed.artifacts["tokens"].summary["imported_documents"] == 31


def test_tokens_beside_a_corpus_follow_the_mixture_and_events_name_their_documents(
    project, trained: Run, tmp_path: Path
) -> None:
    text = trained.dir.parent.parent / "text"
    overrides = (f"corpus.sources=[{{path: {text}, name: raw}}]", "tokens.mixture={raw: 1, web: 1, owt: 2}")
    run = project(*overrides, until="tokens")
    _, tokenizer = load_trained(trained.dir)
    windows = open_windows(run.folder("tokens"), "train", tokenizer, "concat", 32)
    assert windows.store.sources == ["owt", "raw", "web"]
    assert windows.store.n_documents == run.artifacts["corpus"].summary["train_documents"] + sum(
        s["train"] for s in read_json(run.dir / "tokens/imported.json")["sources"].values()
    )
    sampler = Sampler(windows, 0)
    describe = describer(run, sampler, tokenizer)
    numbers = {tokenizer.decode(tokenizer.encode(t)): i for i, t in enumerate(texts_of(trained))}
    seen = set()
    for sample in range(windows.count):
        for span in sampler.documents(sample):
            facts = describe(span)
            name, _, number = facts["path"].partition("#")
            seen.add(facts["source"])
            if facts["source"] == "raw":
                assert name.endswith(".txt")
            else:
                assert name == f"{tmp_path}/{facts['source']}.bin"
                whole = windows.store.document(windows.store.documents_in(span.tokens, span.tokens + 1)[0])
                assert numbers[tokenizer.decode(whole[:-1].tolist())] == int(number) + 15 * (
                    name[-7:] == "owt.bin"
                )
    assert seen == {"owt", "raw", "web"}


def test_a_torn_file_is_refused_before_any_stage_has_run(project, tmp_path: Path) -> None:
    (tmp_path / "web.bin").write_bytes((tmp_path / "web.bin").read_bytes()[:-1])
    with pytest.raises(PreflightError, match="the file is torn"):
        project()
    assert not (tmp_path / "runs/tiny/corpus").exists() and not (tmp_path / "runs/tiny/plan.json").exists()


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["tokens.sources=[{path: a.bin}]"], "tokens.sources needs tokenizer.path"),
        (["corpus.sources=[]"], "corpus.sources is empty"),
        (["tokenizer={path: t.json, vocab_size: 300}"], "tokenizer.vocab_size is that of tokenizer.path"),
        (["tokenizer.path=t.json", "train.init_from=runs/a"], "not both"),
    ],
)
def test_recipes_whose_tokens_have_no_tokenizer_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        load_recipe("", overrides, {})


def test_a_tokenizer_that_is_not_there_is_refused_by_its_path(project, tmp_path: Path) -> None:
    with pytest.raises(PreflightError, match=f"no tokenizer at {tmp_path}/nothing.json"):
        project(f"tokenizer.path={tmp_path}/nothing.json", until="plan")


def test_a_run_goes_on_with_new_text_and_a_share_of_its_old_tokens(
    trained: Run, write_project, tmp_path: Path
) -> None:
    recipe = write_project(tmp_path, seed=7)
    overrides = [
        f"train.init_from={trained.dir}",
        "model.d_model=auto",
        "tokenizer.vocab_size=auto",
        f"corpus.sources=[{{path: {tmp_path}/text, name: new}}]",
        f"tokens.sources=[{{path: {trained.dir}, name: replay}}]",
        "tokens.mixture={new: 0.75, replay: 0.25}",
        "train.warmup_fraction=0.2",
    ]
    run = run_recipe(load_recipe(str(recipe), overrides, {}), until="pretrain")
    old = open_windows(trained.dir / "tokens", "train", load_trained(trained.dir)[1], "concat", 32).store
    new = open_windows(run.dir / "tokens", "train", load_trained(trained.dir)[1], "concat", 32).store
    first, last = new.source_offsets[new.sources.index("replay") :][:2]
    replayed = {new.document_id(i) for i in new.documents_in(int(first), int(last))}
    theirs = {old.document_id(i) for i in range(old.n_documents)}
    held_out = read_json(run.dir / "tokens/imported.json")["sources"]["replay"]["validation"]
    assert replayed <= theirs and len(replayed) == len(theirs) - held_out
    index = next(i for i in range(new.n_documents) if new.document_id(i) in replayed)
    same = next(i for i in range(old.n_documents) if old.document_id(i) == new.document_id(index))
    assert np.array_equal(new.document(index), old.document(same))
    log = list(metrics.read_jsonl(run.dir / "metrics.jsonl"))
    ledger = log[-1]["ledger"]
    assert ledger["replay"] / sum(ledger.values()) == pytest.approx(0.25, abs=0.02)
    assert log[0][metrics.LEARNING_RATE] < log[1][metrics.LEARNING_RATE], "it warms up again"


def test_tokens_of_a_run_with_another_tokenizer_are_refused(
    trained: Run, write_project, tmp_path: Path
) -> None:
    recipe = write_project(tmp_path, seed=7)
    other = run_recipe(load_recipe(str(recipe), ["tokenizer.vocab_size=290"], {}), until="tokens")
    overrides = [
        f"tokenizer.path={trained.dir}/tokenizer/tokenizer.json",
        "tokenizer.vocab_size=auto",
        f"tokens.sources=[{{path: {other.dir}, name: other}}]",
        f"run_dir={tmp_path}/again",
    ]
    with pytest.raises(PreflightError, match="were written by another tokenizer than"):
        run_recipe(load_recipe(str(recipe), overrides, {}), until="plan")
