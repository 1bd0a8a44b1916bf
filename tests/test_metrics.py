"""The run's log survives torn lines, resumes and numbers that JSON has no word for."""

from __future__ import annotations

import json
import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from lavra.metrics import JsonlWriter, read_jsonl, truncate_after


def write(path: Path, *records: dict) -> None:
    writer = JsonlWriter(path)
    for record in records:
        writer.write(record)
    writer.close()


def test_each_line_can_be_read_before_the_writer_closes(tmp_path: Path) -> None:
    writer = JsonlWriter(tmp_path / "logs/m.jsonl")
    writer.write({"step": 1, "text": "línea\nnueva"})
    assert list(read_jsonl(tmp_path / "logs/m.jsonl")) == [{"step": 1, "text": "línea\nnueva"}]
    writer.close()


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    nested = [{"loss": math.nan, "sample": 3}, (math.inf, 1.0)]
    write(path, {"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf, "d": 0.5, "e": nested})
    strict = json.loads(path.read_text(), parse_constant=lambda name: 1 / 0)  # NaN would be no JSON
    assert strict == {"step": 1, "a": None, "b": None, "c": None, "d": 0.5,
                      "e": [{"loss": None, "sample": 3}, [None, 1.0]]}  # fmt: skip


def test_a_missing_log_has_no_records(tmp_path: Path) -> None:
    assert list(read_jsonl(tmp_path / "none.jsonl")) == []
    truncate_after(tmp_path / "none.jsonl", 3)
    assert not (tmp_path / "none.jsonl").exists()


@given(st.data())
def test_a_log_torn_at_any_byte_loses_only_its_last_line_and_can_be_continued(
    tmp_path_factory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "m.jsonl"
    records = [{"step": i, "text": "é" * i} for i in range(4)]
    write(path, *records)
    whole = path.read_bytes()
    kept = whole[: data.draw(st.integers(0, len(whole)))]
    path.write_bytes(kept)
    complete = records[: kept.count(b"\n")]
    assert list(read_jsonl(path)) == complete
    write(path, {"step": 9})
    assert list(read_jsonl(path)) == [*complete, {"step": 9}]


def test_truncate_drops_later_steps_and_the_torn_line_and_keeps_the_rest_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    write(path, *({"step": i, "loss": i / 3, "text": "é"} for i in range(1, 6)))
    first = path.read_bytes().splitlines(keepends=True)[:3]
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "lo')
    truncate_after(path, 3)
    assert path.read_bytes() == b"".join(first)
    truncate_after(path, 0)
    assert path.read_bytes() == b""
