"""Whole or not at all: every file and every artifact, whatever call fails or wherever the process dies."""

from __future__ import annotations

import errno
import functools
import io
import os
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lavra import artifact
from lavra.artifact import (
    COMPLETE,
    IN_PROGRESS,
    atomic_writer,
    begin,
    decide,
    finish,
    open_artifact,
    run_lock,
)
from lavra.errors import PreflightError

# --- atomic writes ------------------------------------------------------------------------------


class FullDisk(io.BufferedWriter):
    """A file whose `broken` method fails."""

    broken, code = "", errno.ENOSPC

    def write(self, data) -> int:
        return self._fail() if self.broken == "write" else super().write(data)

    def flush(self) -> None:
        if self.broken == "flush":
            FullDisk.broken = ""  # closing flushes again
            self._fail()
        super().flush()

    def _fail(self):
        raise OSError(self.code, os.strerror(self.code))


@contextmanager
def failing(call: str, code: int) -> Iterator[None]:
    """`call` raises OSError(code): a method of the open file, or a function of `os`."""

    def fail(*_args, **_kwargs):
        raise OSError(code, os.strerror(code))

    if call in ("write", "flush"):
        FullDisk.broken, FullDisk.code = call, code
        opened = mock.patch("os.fdopen", lambda handle, mode: FullDisk(io.FileIO(handle, mode)))
        with opened:
            yield
    else:
        with mock.patch(f"os.{call}", fail):
            yield


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize("call", ["open", "write", "flush", "fsync", "replace"])
@pytest.mark.parametrize("old", [b"old", None])
def test_a_failed_write_leaves_the_old_content_and_no_temporary_file(
    tmp_path: Path, call: str, code: int, old: bytes | None
) -> None:
    path = tmp_path / "file"
    if old is not None:
        path.write_bytes(old)
    with failing(call, code), pytest.raises(OSError) as caught:
        artifact.write_bytes(path, b"new" * 10_000)
    assert caught.value.errno == code
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == ({"file": old} if old else {})


def test_an_error_of_the_caller_leaves_the_old_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt), atomic_writer(path) as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"


@given(st.binary(max_size=2000))
def test_what_is_written_is_what_is_read_also_into_new_folders(tmp_path_factory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("written") / "a/b/file"
    artifact.write_bytes(path, data)
    assert path.read_bytes() == data
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_written_files_follow_the_umask_so_that_others_may_read_a_run(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        artifact.write_bytes(tmp_path / "file", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_data_reaches_the_disk_before_the_name_and_the_name_before_the_return(tmp_path: Path) -> None:
    calls: list[str] = []

    def recorded(name: str):
        real = getattr(os, name)

        def call(*args, **kwargs):
            kind = ""
            if name == "fsync":
                kind = "folder " if stat.S_ISDIR(os.fstat(args[0]).st_mode) else "file "
            calls.append(kind + name)
            return real(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in ("fsync", "replace"):
            stack.enter_context(mock.patch(f"os.{name}", recorded(name)))
        artifact.write_bytes(tmp_path / "file", b"data")
    assert calls == ["file fsync", "replace", "folder fsync"]


def test_json_without_a_number_is_refused_before_the_file_is_touched(tmp_path: Path) -> None:
    artifact.write_json(tmp_path / "a.json", {"text": "é", "n": 1})
    with pytest.raises(ValueError):
        artifact.write_json(tmp_path / "a.json", {"n": float("nan")})
    assert artifact.read_json(tmp_path / "a.json") == {"text": "é", "n": 1}


def test_json_that_is_missing_or_torn_is_a_preflight_error_that_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"a": ')
    for name in ("torn.json", "none.json"):
        with pytest.raises(PreflightError, match=name):
            artifact.read_json(tmp_path / name)


def test_leftovers_of_killed_writers_go_and_nothing_else_does(tmp_path: Path) -> None:
    for name in (
        f"a/.file{artifact.TEMPORARY}12",
        f".step{artifact.TEMPORARY}9/model",
        "a/.hidden",
        "file.tmp-1",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    artifact.remove_leftovers(tmp_path)
    assert {str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")} == {"a", "a/.hidden", "file.tmp-1"}


# --- fingerprints -------------------------------------------------------------------------------

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4))
def test_a_fingerprint_does_not_depend_on_the_order_of_keys(inputs: dict) -> None:
    assert artifact.fingerprint(dict(reversed(inputs.items()))) == artifact.fingerprint(inputs)


@given(st.dictionaries(st.text(max_size=3), plain, max_size=4), st.text(max_size=3), plain)
def test_a_fingerprint_changes_with_any_value(inputs: dict, key: str, value: object) -> None:
    changed = inputs | {key: [value, "changed"]}
    assert (artifact.fingerprint(changed) == artifact.fingerprint(inputs)) == (changed == inputs)


# --- begin, finish, decide ----------------------------------------------------------------------

A, B = (
    {"format": 1, "text": "a" * 40, "rules": {"min": 64}},
    {"format": 1, "text": "b" * 50, "rules": {"min": 32}},
)
PARTS = ("parts/part-0", "parts/part-1")
ALL_WRITTEN = "accounting"  # a builder that finds it takes the parts as they are, as the corpus does


def content(name: str, inputs: dict) -> bytes:
    return f"{name} {inputs['text']}".encode()


def build(folder: Path, inputs: dict) -> artifact.Artifact:
    """A stage as stages are: parts that exist are kept, a last file says that all are there."""
    begin(folder, "stage", inputs)
    if not (folder / ALL_WRITTEN).exists():
        for name in PARTS:
            if not (folder / name).exists():
                artifact.write_bytes(folder / name, content(name, inputs))
        artifact.write_bytes(folder / ALL_WRITTEN, b"yes")
    return finish(folder, "stage", inputs, {"parts": len(PARTS)})


def bring_up(folder: Path, inputs: dict) -> artifact.Artifact:
    return decide(folder, "stage", inputs).reuse or build(folder, inputs)


def assert_whole(opened: artifact.Artifact) -> None:
    """Every file has the bytes that the artifact's own inputs give, and the fingerprint is theirs."""
    inputs = dict(opened.inputs)
    assert opened.fingerprint == artifact.fingerprint(inputs)
    assert {name: (opened.path / name).read_bytes() for name in PARTS} == {
        n: content(n, inputs) for n in PARTS
    }


def test_an_artifact_is_built_once_and_then_reused(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    assert decide(folder, "stage", A) == artifact.Decision(None, "not built yet")
    built = build(folder, A)
    decision = decide(folder, "stage", A)
    assert decision.reuse == built == open_artifact(folder, "stage")
    assert built.fingerprint in decision.reason and "reused" in decision.reason
    assert not (folder / IN_PROGRESS).exists()
    assert_whole(built)


def test_measurements_are_no_part_of_the_fingerprint(tmp_path: Path) -> None:
    build(tmp_path / "stage", A)
    again = finish(tmp_path / "stage", "stage", A, {"seconds": 12.5})
    assert decide(tmp_path / "stage", "stage", A).reuse == again


def test_changed_settings_are_named_with_both_values(tmp_path: Path) -> None:
    build(tmp_path / "stage", A)
    decision = decide(tmp_path / "stage", "stage", A | {"rules": {"min": 32}, "seed": 7})
    assert decision == artifact.Decision(None, "rebuilding: rules.min: 64 -> 32; seed: None -> 7")
    many = {f"k{i}": i for i in range(9)}
    assert decide(tmp_path / "stage", "stage", A | many).reason.endswith("and 4 more")


@pytest.mark.parametrize("damage", ["missing", "shorter"])
def test_a_damaged_file_is_named_and_the_artifact_built_again(tmp_path: Path, damage: str) -> None:
    folder = tmp_path / "stage"
    build(folder, A)
    if damage == "missing":
        (folder / PARTS[1]).unlink()
    else:
        (folder / PARTS[1]).write_bytes(b"x")
    with pytest.raises(PreflightError, match="part-1 is missing or has changed size"):
        open_artifact(folder, "stage")
    decision = decide(folder, "stage", A)
    assert decision.reuse is None and "part-1" in decision.reason
    assert_whole(bring_up(folder, A))


def test_what_was_interrupted_continues_with_its_finished_parts(tmp_path: Path) -> None:
    folder = tmp_path / "stage"
    begin(folder, "stage", A)
    artifact.write_bytes(folder / PARTS[0], content(PARTS[0], A))
    before = (folder / PARTS[0]).stat().st_ino
    (folder / f".part{artifact.TEMPORARY}1").write_bytes(b"torn")
    assert decide(folder, "stage", A).reason == "continuing where it was interrupted"
    with pytest.raises(PreflightError, match="unfinished"):
        open_artifact(folder, "stage")
    built = build(folder, A)
    assert (folder / PARTS[0]).stat().st_ino == before
    assert not list(folder.glob(".*"))
    assert_whole(built)


def test_parts_of_other_settings_are_not_continued(tmp_path: Path) -> None:
    begin(tmp_path / "stage", "stage", A)
    artifact.write_bytes(tmp_path / "stage" / PARTS[0], content(PARTS[0], A))
    assert decide(tmp_path / "stage", "stage", B).reason == "settings changed"
    assert_whole(bring_up(tmp_path / "stage", B))


def test_an_artifact_of_another_stage_is_refused(tmp_path: Path) -> None:
    build(tmp_path / "stage", A)
    with pytest.raises(PreflightError, match="holds a stage artifact, not tokens"):
        open_artifact(tmp_path / "stage", "tokens")


class Died(BaseException):
    """The process is gone: nothing after this runs, no handler, no cleanup."""


class Mortal:
    """Call number `last` of the file system, and every later one, never happens."""

    CALLS = ("os.replace", "os.unlink", "os.rmdir", "os.mkdir", "os.fsync", "os.open", "shutil.rmtree")

    def __init__(self, last: int) -> None:
        self.last, self.calls = last, 0

    def __enter__(self) -> Mortal:
        self.stack = ExitStack()
        for name in self.CALLS:
            module, function = {"os": os, "shutil": shutil}[name.split(".")[0]], name.split(".")[1]
            patch = mock.patch(name, functools.partial(self._call, getattr(module, function)))
            self.stack.enter_context(patch)
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def _call(self, real, *args, **kwargs):
        self.calls += 1
        if self.calls >= self.last:
            raise Died
        return None if real is os.fsync else real(*args, **kwargs)


def prepare(folder: Path, state: str) -> None:
    """A folder as an earlier process may have left it."""
    if state == "complete":
        build(folder, A)
    elif state == "complete, marker of progress left":
        build(folder, A)
        artifact.write_json(folder / IN_PROGRESS, {"kind": "stage", "fingerprint": artifact.fingerprint(A)})
    elif state == "one part":
        begin(folder, "stage", A)
        artifact.write_bytes(folder / PARTS[0], content(PARTS[0], A))
    elif state == "all parts":
        build(folder, A)
        os.replace(folder / COMPLETE, folder / IN_PROGRESS)


STATES = ["nothing", "one part", "all parts", "complete", "complete, marker of progress left"]


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(("dying", "after"), [(A, A), (B, A)], ids=["A-A", "B-A"])
def test_whatever_opens_is_whole_though_the_process_dies_between_any_two_calls(
    tmp_path: Path, state: str, dying: dict, after: dict
) -> None:
    with mock.patch("os.fsync"):
        for last in range(1, 200):
            folder = tmp_path / str(last) / "stage"
            prepare(folder, state)
            with Mortal(last) as process:
                try:
                    bring_up(folder, dying)
                    died = False
                except Died:
                    died = True
            try:
                assert_whole(open_artifact(folder, "stage"))
            except PreflightError:
                assert died, "a finished build must open"
            done = bring_up(folder, after)
            assert_whole(done)
            assert done.inputs == after
            assert not list(folder.rglob(f"*{artifact.TEMPORARY}*"))
            if not died:
                break
        else:
            raise AssertionError("the build never came to its end")
        assert last > 5 or process.calls == 0, "deaths were tried at too few calls"


def test_a_folder_that_was_half_cleared_for_other_settings_is_never_continued(tmp_path: Path) -> None:
    """In the worst order: the parts are gone, what says that all are there is not."""
    folder = tmp_path / "stage"
    prepare(folder, "all parts")

    def die_after_the_parts(path: Path) -> None:
        for name in PARTS:
            (path / name).unlink()
        raise Died

    with mock.patch("shutil.rmtree", die_after_the_parts), pytest.raises(Died):
        bring_up(folder, B)
    assert_whole(bring_up(folder, A))


# --- one process a run directory ----------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from lavra.artifact import run_lock
with run_lock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path / "run")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    yield process
    process.kill()
    process.communicate()


def test_a_second_process_is_refused_and_told_who_holds_the_run(tmp_path: Path, holder) -> None:
    with pytest.raises(PreflightError, match=f"in use by process {holder.pid}"), run_lock(tmp_path / "run"):
        pass
    # The refusal must not loosen the lock.
    with pytest.raises(PreflightError), run_lock(tmp_path / "run"):
        pass


def test_a_killed_process_leaves_no_lock(tmp_path: Path, holder) -> None:
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with run_lock(tmp_path / "run"):
        assert (tmp_path / "run/.lock").read_text() == str(os.getpid())
    with run_lock(tmp_path / "run"):
        pass


def test_a_run_directory_that_is_a_file_is_a_preflight_error_with_its_absolute_path(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PreflightError, match=str(tmp_path / "file")), run_lock(Path("file")):
        pass
