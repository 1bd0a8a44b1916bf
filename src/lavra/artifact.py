"""What a stage leaves behind: written atomically, fingerprinted, complete or not there at all.

An artifact is a folder. While it is being built it holds `IN_PROGRESS` (what it is being built
from); its last written file is `COMPLETE` (the same, plus every file's size and hash, plus a
summary of measurements). A fingerprint covers inputs and decisions only, never measurements.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lavra.errors import LavraError, PreflightError

COMPLETE = "COMPLETE"
IN_PROGRESS = "IN_PROGRESS"
TEMPORARY = ".tmp-"


def canonical_json(value: Any) -> str:
    """One text for one value: sorted keys, no spaces, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def fingerprint(inputs: Mapping[str, Any]) -> str:
    """16 hex digits of SHA-256 over the canonical JSON of `inputs`."""
    return hashlib.sha256(canonical_json(inputs).encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """BLAKE2b-128 of a file's bytes, as hex."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


# --- atomic writes ------------------------------------------------------------------------------


@contextmanager
def atomic_writer(path: Path) -> Iterator[IO[bytes]]:
    """Open a binary file that appears under `path` whole, or not at all.

    Temp file in the same folder, fsync, rename, fsync of the folder. On any failure the old
    content of `path` stays and the temp file is removed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not mkstemp: its files are private, and others may read a run.
    temporary = path.with_name(f".{path.name}{TEMPORARY}{os.getpid()}-{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
    fsync_folder(path.parent)


def write_bytes(path: Path, data: bytes) -> None:
    """Atomically replace `path` with `data`."""
    with atomic_writer(path) as file:
        file.write(data)


def write_json(path: Path, value: Any) -> None:
    """Atomically replace `path` with indented JSON."""
    write_bytes(path, (json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        PreflightError: the file cannot be read or is no JSON.
    """
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise PreflightError(f"cannot read {path}: {error}") from error


@contextmanager
def writing(what: str, folder: Path) -> Iterator[None]:
    """Tell a full disk, or a folder that is not ours, as what it is.

    Raises:
        LavraError: in place of any OSError.
    """
    try:
        yield
    except OSError as error:
        raise LavraError(
            f"cannot write the {what}: {error.strerror or error}",
            where=str(error.filename or folder),
            hint="make room or choose another run_dir=PATH; the same command continues",
        ) from error


def fsync_folder(folder: Path) -> None:
    """Make renames inside `folder` durable (where the system can)."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Delete temp files and folders that a killed process left below `folder`."""
    for leftover in list(folder.rglob(f".*{TEMPORARY}*")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)


def file_facts(folder: Path) -> dict[str, dict[str, Any]]:
    """Size and hash of every file below a folder, by relative path; its markers are not listed."""
    return {
        str(file.relative_to(folder)): {"bytes": file.stat().st_size, "blake2b": file_hash(file)}
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in (COMPLETE, IN_PROGRESS)
    }


# --- artifacts ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Artifact:
    """A complete artifact.

    Attributes:
        path: its folder.
        kind: the stage that made it.
        inputs: decisions, upstream fingerprints, format version.
        fingerprint: hash of `inputs`.
        summary: flat numbers for the report and for success criteria.
    """

    path: Path
    kind: str
    inputs: Mapping[str, Any]
    fingerprint: str
    summary: Mapping[str, Any] = field(default_factory=dict)


def set_aside(folder: Path) -> Path:
    """Rename a folder to the first free `NAME.old-N` and return that; nothing is deleted."""
    number = 1
    while (target := folder.with_name(f"{folder.name}.old-{number}")).exists():
        number += 1
    folder.rename(target)
    return target


def open_artifact(path: Path, kind: str) -> Artifact:
    """Open a complete artifact; sizes of all its files are checked.

    Raises:
        PreflightError: missing, unfinished, of another kind, or damaged.
    """
    marker = path / COMPLETE
    if not marker.exists():
        state = "unfinished" if (path / IN_PROGRESS).exists() else "missing"
        raise PreflightError(f"the {kind} artifact at {path} is {state}", hint="run the same command again")
    record = read_json(marker)
    if record["kind"] != kind:
        raise PreflightError(f"{path} holds a {record['kind']} artifact, not {kind}")
    for name, facts in record["files"].items():
        file = path / name
        if not file.exists() or file.stat().st_size != facts["bytes"]:
            raise PreflightError(f"{file} is missing or has changed size since it was written")
    return Artifact(path, kind, record["inputs"], record["fingerprint"], record["summary"])


@dataclass(frozen=True)
class Decision:
    """Whether a stage must run, and the reason in words."""

    reuse: Artifact | None
    reason: str


def decide(path: Path, kind: str, inputs: Mapping[str, Any]) -> Decision:
    """Reuse a complete artifact of equal fingerprint, or say why it must be built."""
    if not (path / COMPLETE).exists():
        if (path / IN_PROGRESS).exists():
            same = read_json(path / IN_PROGRESS)["fingerprint"] == fingerprint(inputs)
            return Decision(None, "continuing where it was interrupted" if same else "settings changed")
        return Decision(None, "not built yet")
    try:
        artifact = open_artifact(path, kind)
    except PreflightError as error:
        return Decision(None, f"rebuilding: {error.what}")
    if artifact.fingerprint == fingerprint(inputs):
        return Decision(artifact, f"reused, nothing upstream changed ({artifact.fingerprint})")
    return Decision(None, "rebuilding: " + "; ".join(_differences(artifact.inputs, inputs)))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Names and values of what changed, longest values cut."""

    def flat(value: Any, prefix: str) -> dict[str, Any]:
        if isinstance(value, Mapping) and value:
            return {k: v for key, item in value.items() for k, v in flat(item, f"{prefix}.{key}").items()}
        return {prefix.lstrip("."): value}

    before, after = flat(old, ""), flat(new, "")
    missing = object()
    changed = [k for k in {**before, **after} if before.get(k, missing) != after.get(k, missing)]
    return [f"{k}: {str(before.get(k))[:40]} -> {str(after.get(k))[:40]}" for k in changed[:5]] + (
        [f"and {len(changed) - 5} more"] if len(changed) > 5 else []
    )


def begin(path: Path, kind: str, inputs: Mapping[str, Any], *, continues: str = "") -> None:
    """Prepare a folder for building: keep finished parts of the same fingerprint, clear anything else.

    Args:
        continues: another fingerprint whose unfinished work is kept too.
    """
    record = {"kind": kind, "fingerprint": fingerprint(inputs), "inputs": inputs}
    marker = path / IN_PROGRESS
    unfinished = marker.exists() and not (path / COMPLETE).exists()
    if unfinished and read_json(marker)["fingerprint"] in (record["fingerprint"], continues):
        write_json(marker, record)
        remove_leftovers(path)
        return
    if path.exists():
        # The markers go first: a folder half cleared must never look complete, nor worth continuing.
        (path / COMPLETE).unlink(missing_ok=True)
        marker.unlink(missing_ok=True)
        fsync_folder(path)
        shutil.rmtree(path)
    path.mkdir(parents=True)
    write_json(marker, record)


def finish(path: Path, kind: str, inputs: Mapping[str, Any], summary: Mapping[str, Any]) -> Artifact:
    """Write `COMPLETE` last; from here on the artifact exists."""
    remove_leftovers(path)
    record = {
        "kind": kind,
        "fingerprint": fingerprint(inputs),
        "inputs": inputs,
        "summary": summary,
        "files": file_facts(path),
    }
    write_json(path / COMPLETE, record)
    (path / IN_PROGRESS).unlink(missing_ok=True)
    return Artifact(path, kind, inputs, fingerprint(inputs), summary)


# --- one process a run directory ----------------------------------------------------------------


@contextmanager
def run_lock(run_dir: Path) -> Iterator[None]:
    """Hold the run directory; a second process is refused. The lock dies with its process.

    Raises:
        PreflightError: another process holds it, or the folder cannot be written.
    """
    import fcntl

    path = run_dir / ".lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - held for the whole run
    except OSError as error:
        raise PreflightError(
            f"cannot write to {run_dir.resolve()}: {error.strerror}",
            hint="choose another folder: run_dir=PATH",
        ) from error
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            file.seek(0)
            raise PreflightError(
                f"{run_dir} is in use by process {file.read().strip() or 'unknown'}",
                hint="wait for it, stop it, or choose another run_dir=PATH",
            ) from None
        file.seek(0)
        file.truncate()
        file.write(str(os.getpid()))
        file.flush()
        yield
