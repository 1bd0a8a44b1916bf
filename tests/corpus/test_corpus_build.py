"""The corpus stage as a whole: nothing lost, nothing on both sides, the same bytes however it ran."""

import codecs
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections import Counter

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lavra import artifact
from lavra.corpus import units as units_module
from lavra.corpus.accounting import IDENTITY
from lavra.corpus.config import STANDARD_LIBRARY, SUCCESS_METRICS
from lavra.corpus.store import DOCUMENT_SCHEMA, document_count, split_bytes
from lavra.errors import LavraError, PreflightError


@pytest.fixture
def mixed(tmp_path, write_jsonl, prose_text):
    """A folder with good, bad, repeated, short and code records in several files."""
    folder = tmp_path / "mixed"
    for part in range(3):
        records = [{"id": f"book{part}{i % 20}/{i}", "text": prose_text(part * 100 + i)} for i in range(40)]
        records += [
            {"text": prose_text(5)},
            {"text": "short"},
            {"text": None},
            b"{broken",
            b'{"text": "\xff"}',
            b"",
        ]
        write_jsonl(folder / f"part{part}.jsonl", records)
    for i in range(30):
        (folder / f"code{i}").mkdir()
        (folder / f"code{i}" / "x.py").write_text(f"def function_{i}():\n    return {i}\n" * 5)
    (folder / "notes.md").write_text(prose_text(999))
    (folder / "table.csv").write_text("a,b\n")
    return folder


@pytest.fixture
def small_units(monkeypatch):
    """Several units out of little data."""
    monkeypatch.setattr(units_module, "_MIN_UNIT_BYTES", 1 << 13)


def test_every_record_is_accounted_for_by_source_reason_kind_and_type(
    tmp_path, mixed, build, accounting, rows
):
    made = build(tmp_path / "out", mixed)
    found = accounting(tmp_path / "out")
    totals = found["totals"]
    assert totals["records_in"]["documents"] == 3 * 45 + 30 + 1
    assert totals["errors"]["documents"] == 9 and totals["blank_lines"] == 3
    assert {r: c["documents"] for r, c in found["errors"].items() if c["documents"]} == {
        "no_text": 3,
        "invalid_json": 3,
        "invalid_utf8": 3,
    }
    assert found["reasons"]["too_short"] == {"documents": 3, "bytes": 15, "only": 3}
    assert found["reasons"]["duplicate"]["documents"] == 3
    for table in ("by_source", "by_kind", "by_file_type"):
        for outcome in ("records_in", *IDENTITY, "train", "validation"):
            assert (
                sum(cell[outcome]["documents"] for cell in found[table].values())
                == totals[outcome]["documents"]
            )
    assert found["by_kind"]["code"]["validation"]["documents"] > 0
    for split in ("train", "validation"):
        documents = rows(tmp_path / "out", split)
        assert len(documents) == totals[split]["documents"] == document_count(tmp_path / "out", split)
        assert (
            sum(d["bytes"] for d in documents)
            == totals[split]["bytes"]
            == split_bytes(tmp_path / "out", split)
        )
    assert any("1 .csv" in note for note in found["notes"])
    assert set(SUCCESS_METRICS) <= set(made.summary) and made.summary["error_documents"] == 9


def test_dropped_and_bad_records_can_be_looked_up(tmp_path, mixed, build, prose_text):
    build(tmp_path / "out", mixed)
    dropped = pq.ParquetDataset(tmp_path / "out" / "dropped").read().to_pylist()
    copies = [row for row in dropped if row["reasons"] == ["duplicate"]]
    assert {row["duplicate_of"] for row in copies} == {
        "mixed: part0.jsonl:byte " + copies[0]["duplicate_of"].split()[-1]
    }
    offset = int(copies[0]["duplicate_of"].split()[-1])
    line = (mixed / "part0.jsonl").read_bytes()[offset:].split(b"\n")[0]
    assert json.loads(line)["text"] == prose_text(5) and copies[0]["excerpt"] == prose_text(5)[:300]
    errors = pq.ParquetDataset(tmp_path / "out.documents" / "errors").read().to_pylist()
    broken = next(row for row in errors if row["reason"] == "invalid_json")
    assert broken["place"].startswith("part0.jsonl:byte ") and broken["excerpt"] == "b'{broken'"


def test_stored_documents_have_the_declared_schema_and_content_ids(tmp_path, mixed, build, rows):
    import hashlib

    build(tmp_path / "out", mixed)
    for path in (tmp_path / "out" / "train").iterdir():
        assert pq.read_schema(path).equals(DOCUMENT_SCHEMA)
    for row in rows(tmp_path / "out", "train"):
        assert row["id"] == hashlib.blake2b(row["text"].encode(), digest_size=16).hexdigest()
        assert row["bytes"] == len(row["text"].encode())


def test_no_text_and_no_group_is_on_both_sides(tmp_path, mixed, build, rows):
    build(tmp_path / "out", mixed)
    train, validation = rows(tmp_path / "out", "train"), rows(tmp_path / "out", "validation")
    for column in ("id", "text", "group"):
        assert not {row[column] for row in train} & {row[column] for row in validation}
    assert train and validation


@settings(
    max_examples=25,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lines=st.lists(
        st.one_of(
            st.builds(
                lambda t, g: json.dumps({"text": t, "group": g}).encode(),
                st.text(max_size=30),
                st.sampled_from("abc"),
            ),
            st.binary(max_size=20).map(lambda data: data.replace(b"\n", b" ")),
            st.sampled_from([b"", b"{}", b'{"text": null}', b'{"text": "again and again"}']),
        ),
        max_size=25,
    ),
    rules=st.booleans(),
    rate=st.sampled_from([None, 200]),
)
def test_records_in_equal_kept_dropped_errors_and_sampled_out(
    tmp_path_factory, write_jsonl, build, accounting, rows, lines, rules, rate
):
    folder = tmp_path_factory.mktemp("identity")
    source = write_jsonl(folder / "a.jsonl", [*lines, {"text": "a document that is always there\n" * 3}])
    try:
        settings = {"thresholds": {"min_characters": 10}} if rules else {"rulesets": ()}
        build(folder / "out", source, max_bytes=rate, **settings)
    except PreflightError as error:
        assert "nothing is kept" in error.what or "too little text" in error.what
        return
    totals = accounting(folder / "out")["totals"]
    start_of_file = [line.removeprefix(codecs.BOM_UTF8) for line in lines[:1]]
    blank = sum(1 for line in start_of_file + lines[1:] if not line.strip())
    assert totals["records_in"]["documents"] == len(lines) + 1 - blank and totals["blank_lines"] == blank
    for unit in ("documents", "bytes"):
        assert totals["records_in"][unit] == sum(totals[outcome][unit] for outcome in IDENTITY)
    texts = Counter(r["text"] for split in ("train", "validation") for r in rows(folder / "out", split))
    assert max(texts.values()) == 1
    assert totals["train"]["bytes"] > 0 and totals["validation"]["bytes"] > 0
    assert totals["train"]["bytes"] + totals["validation"]["bytes"] == totals["kept"]["bytes"]


def test_one_large_text_file_is_a_whole_corpus(tmp_path, build, accounting, rows, snapshot, prose_text):
    text = "\n\n".join(prose_text(i, 40) for i in range(1500))
    (tmp_path / "input.txt").write_text(text)
    assert len(text) > 2 << 20
    for workers in (1, 2):
        build(tmp_path / f"out{workers}", tmp_path / "input.txt", workers=workers, max_document_bytes=1 << 19)
    totals = accounting(tmp_path / "out1")["totals"]
    assert totals["errors"]["documents"] == 0 and totals["kept"] == totals["records_in"]
    assert 0.01 < totals["validation"]["bytes"] / totals["kept"]["bytes"] < 0.5
    found = "\n".join(
        row["text"] for side in ("train", "validation") for row in rows(tmp_path / "out1", side)
    )
    assert Counter(found.split()) == Counter(text.split())
    assert snapshot(tmp_path / "out1") == snapshot(tmp_path / "out2")


def test_the_number_of_workers_does_not_change_a_byte(tmp_path, mixed, build, snapshot, small_units):
    one = build(tmp_path / "one", mixed, workers=1)
    two = build(tmp_path / "two", mixed, workers=2)
    assert len(list((tmp_path / "one" / "train").iterdir())) > 2
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "two")
    assert one.fingerprint == two.fingerprint


def test_a_sample_keeps_about_the_bytes_asked_for_and_copies_share_one_fate(
    tmp_path, write_jsonl, build, accounting, rows, prose_text
):
    records = [{"text": prose_text(i % 300)} for i in range(600)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    build(tmp_path / "out", source, max_bytes=source.stat().st_size // 4)
    totals = accounting(tmp_path / "out")["totals"]
    assert 0.15 < 1 - totals["sampled_out"]["documents"] / 600 < 0.35
    assert totals["kept"]["documents"] == totals["dropped"]["documents"]  # of each pair one is a copy
    assert "sample" in accounting(tmp_path / "out")["notes"][0]


def test_a_single_document_gives_its_tail_to_validation(tmp_path, build, rows, accounting, prose_text):
    text = prose_text(1, 60)
    (tmp_path / "only.txt").write_text(text)
    build(tmp_path / "out", tmp_path / "only.txt")
    (head,), (tail,) = rows(tmp_path / "out", "train"), rows(tmp_path / "out", "validation")
    assert head["text"] + tail["text"] == text and head["text"].endswith("\n")
    assert 0.02 * len(text) < tail["bytes"] < 0.06 * len(text)
    found = accounting(tmp_path / "out")
    assert found["totals"]["kept"]["documents"] == 1 and "tail" in found["notes"][0]


def test_nothing_kept_says_what_happened_to_every_record(tmp_path, write_jsonl, build):
    source = write_jsonl(tmp_path / "a.jsonl", [{"text": "short"}, {"body": "x"}, {"body": "y"}])
    with pytest.raises(PreflightError, match="nothing is kept of 3 records: 2 no_text, 1 too_short"):
        build(tmp_path / "out", source)


def test_the_standard_library_becomes_a_corpus_of_both_kinds(tmp_path, build, accounting, rows, monkeypatch):
    from lavra.corpus import standard_library

    some = [
        name
        for name in standard_library.module_names(standard_library.library_root())
        if "json" in name or "http" in name
    ]
    monkeypatch.setattr(standard_library, "module_names", lambda root: some)
    build(tmp_path / "out", STANDARD_LIBRARY)
    train, validation = rows(tmp_path / "out", "train"), rows(tmp_path / "out", "validation")
    assert {row["kind"] for row in train} == {"code", "prose"} and validation
    assert not {row["group"] for row in train} & {row["group"] for row in validation}


# --- interruptions ------------------------------------------------------------------------------


class Killed(BaseException):
    """Stands for kill -9: nothing cleans up after it."""


def fail_at(monkeypatch, call, name, error):
    """Let the `call`-th use of artifact.os.NAME raise; returns a counter of uses."""
    real, seen = getattr(os, name), [0]

    def wrapped(*args):
        seen[0] += 1
        if seen[0] == call:
            raise error
        return real(*args)

    proxy = type(os)("os")
    proxy.__dict__.update(os.__dict__)
    setattr(proxy, name, wrapped)
    if isinstance(error, Killed):
        proxy.unlink = lambda path: None  # a killed process leaves its temporary files
    monkeypatch.setattr(artifact, "os", proxy)
    return seen


def test_killed_at_any_write_the_next_run_gives_the_same_bytes(
    tmp_path, mixed, build, snapshot, small_units, monkeypatch
):
    # Each file is fsynced before it is renamed, its folder after: these calls are all states between writes.
    monkeypatch.setattr(units_module, "_MIN_UNIT_BYTES", 1 << 15)
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a killed process loses nothing that it wrote
    build(tmp_path / "whole", mixed)
    expected = snapshot(tmp_path / "whole")
    call = 0
    while True:
        call += 1
        out = tmp_path / f"out{call}"
        with monkeypatch.context() as patch:
            seen = fail_at(patch, call, "fsync", Killed())
            with contextlib.suppress(Killed):
                build(out, mixed)
        if seen[0] < call:
            break
        build(out, mixed)
        assert snapshot(out) == expected, f"call {call}"
    assert call > 10


def test_a_continued_build_does_not_repeat_finished_units(tmp_path, mixed, build, small_units, monkeypatch):
    from lavra.corpus import read_pass

    with monkeypatch.context() as patch:
        fail_at(patch, 20, "replace", Killed())
        with pytest.raises(Killed):
            build(tmp_path / "out", mixed)
    documents = tmp_path / "out.documents"
    done = len(list(documents.rglob("read.json")))
    total = len(artifact.read_json(documents / "manifest.json")["units"])
    read, real = [], read_pass.row_writer
    monkeypatch.setattr(
        read_pass, "row_writer", lambda path, *rest: read.append(path.parent) or real(path, *rest)
    )
    build(tmp_path / "out", mixed)
    units = {path.name for path in read if path.parent.name == "units"}
    assert 0 < done < total and len(units) == total - done


def test_a_half_removed_work_folder_is_no_obstacle(tmp_path, mixed, build, snapshot, monkeypatch):
    from lavra.corpus import build as build_module

    build(tmp_path / "whole", mixed)

    real = shutil.rmtree

    def half(path, **options):
        if path.name == "work" and (path / "plan.json").exists():
            (path / "copies").rename(path / "gone")
            raise Killed
        real(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(build_module.shutil, "rmtree", half)
        with pytest.raises(Killed):
            build(tmp_path / "out", mixed)
    assert (tmp_path / "out" / "work").exists()
    build(tmp_path / "out", mixed)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_a_full_disk_names_the_path_and_the_next_run_continues(tmp_path, mixed, build, snapshot, monkeypatch):
    build(tmp_path / "whole", mixed)
    for call in (1, 4, 7):
        with monkeypatch.context() as patch:
            fail_at(patch, call, "fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
            with pytest.raises(LavraError, match="No space left on device") as error:
                build(tmp_path / "out", mixed)
        assert str(tmp_path / "out") in str(error.value)
    build(tmp_path / "out", mixed)
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_a_file_size_limit_of_the_system_is_an_error_with_a_path_not_a_crash(
    tmp_path, write_jsonl, prose_text
):
    source = write_jsonl(
        tmp_path / "a.jsonl", [{"text": os.urandom(200).hex() + prose_text(i)} for i in range(3000)]
    )
    code = f"""
        import resource, signal
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        {BUILD}
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            build({str(source)!r}, {str(tmp_path / "out")!r}, 1)
        except LavraError as error:
            print("refused:", error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("refused:") and "File too large" in done.stdout
    assert str(tmp_path / "out") in done.stdout


BUILD = """
        from pathlib import Path
        from lavra.corpus.build import build_corpus
        from lavra.corpus.config import CorpusConfig, Source
        from lavra.corpus.reading import read_documents
        from lavra.corpus.sources import scan_sources
        from lavra.errors import LavraError

        def build(path, out, workers):
            config = CorpusConfig(sources=(Source(path=path),))
            scan = scan_sources(config)
            inputs = {"files": scan.inputs()}
            documents = read_documents(config, scan, Path(out + ".documents"), max_bytes=None,
                                       workers=workers, inputs=inputs)
            build_corpus(config, documents, Path(out), validation_max_bytes=1 << 30, workers=workers,
                         inputs=inputs)
"""


def test_workers_end_with_a_killed_parent_and_the_next_run_gives_the_same_bytes(
    tmp_path, write_jsonl, prose_text, snapshot
):
    records = [{"id": f"{i % 50}/{i}", "text": prose_text(i, 40)} for i in range(1200)]
    source = write_jsonl(tmp_path / "a.jsonl", records)
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(f"""
        import sys
        {BUILD}
        if __name__ == "__main__":
            build(sys.argv[1], sys.argv[2], 2)
    """)
    )

    def start(out):
        return subprocess.Popen(
            [sys.executable, str(script), str(source), str(out)], stderr=subprocess.DEVNULL
        )

    assert start(tmp_path / "whole").wait() == 0
    killed = start(tmp_path / "out")
    while not list((tmp_path / "out.documents").rglob("read.json")) and killed.poll() is None:
        time.sleep(0.02)
    import psutil

    workers = psutil.Process(killed.pid).children(recursive=True)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    psutil.wait_procs(workers, timeout=20)
    assert not [
        worker for worker in workers if worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE
    ]
    assert not (tmp_path / "out" / "COMPLETE").exists()
    assert start(tmp_path / "out").wait() == 0
    assert snapshot(tmp_path / "out") == snapshot(tmp_path / "whole")


def test_the_room_imports_no_torch():
    code = "import sys, lavra.corpus.build, lavra.corpus.executor; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_changed_files_of_the_same_inputs_discard_earlier_work(
    tmp_path, mixed, build, small_units, monkeypatch
):
    from lavra.corpus.config import CorpusConfig, Source
    from lavra.corpus.reading import read_documents
    from lavra.corpus.sources import scan_sources

    def run():
        config = CorpusConfig(sources=(Source(path=str(mixed)),))
        scan = scan_sources(config)
        return read_documents(config, scan, tmp_path / "out", max_bytes=None, workers=1, inputs={})

    with monkeypatch.context() as patch:
        fail_at(patch, 30, "replace", Killed())
        with pytest.raises(Killed):
            run()
    for part in range(3):
        (mixed / f"part{part}.jsonl").unlink()
    run()
    assert not (tmp_path / "out" / "errors").exists()  # the errors of the removed files are gone with them
