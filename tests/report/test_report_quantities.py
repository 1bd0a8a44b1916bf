"""Numbers get the unit that their name says; any JSON becomes tables."""

from __future__ import annotations

import pytest

from lavra.report.quantities import ABSENT, difference, quantity, signed_percent, words
from lavra.report.tables import MAX_ROWS, Table, record_table, tables_of


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("parameters", 5_310_000, "5.31M"),
        ("flops", 3.31e14, "331 TFLOP"),
        ("peak_memory_bytes", 1536, "1.5 KiB"),
        ("bytes_per_token", 3.4123, "3.41 bytes/token"),
        ("tokens_per_second", 41_650, "41.6k tokens/s"),
        ("wall_seconds", 281.3, "4m41s"),
        ("final_loss", 2.9731, "2.973 nats/token"),
        ("final_bpb", 1.9123, "1.912 bits/byte"),
        ("kept_fraction", 0.871, "87.1 %"),
        ("gemm_gflops", {"float32": 412.0}, "float32: 412 GFLOP/s"),
        ("documents", 12345, "12,345"),
        ("compile", False, "no"),
        ("accelerators", [], ABSENT),
        ("x", None, ABSENT),
        ("loss", float("nan"), "not finite"),
        ("anything", "<b>", "<b>"),  # escaping is the template's work
    ],
)
def test_quantity(name: str, value: object, text: str) -> None:
    assert quantity(name, value) == text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("sampled_out", "sampled out"),
        ("peak_memory_bytes", "peak memory"),
        ("wall_seconds", "wall time"),
        ("bytes", "bytes"),
    ],
)
def test_words_leave_out_units_that_the_value_shows(name: str, text: str) -> None:
    assert words(name) == text


def test_difference_is_relative_to_the_prediction() -> None:
    assert difference(200, 150) == -0.25
    assert signed_percent(-0.25) == "−25.0 %"
    assert difference(0, 1) is None and difference(None, 1) is None and difference(1, "x") is None


def test_objects_of_objects_become_one_table_and_deeper_ones_several() -> None:
    tables = tables_of(
        {
            "totals": {"kept": {"documents": 3}, "dropped": {"documents": 0, "bytes": 2048}},
            "more": {"a": {}},
            "seed": 7,
        }
    )
    assert [(t.title, list(t.headers)) for t in tables] == [
        ("", ["", "value"]),
        ("totals", ["", "documents", "bytes"]),
    ]
    assert tables[1].rows == [["kept", "3", ABSENT], ["dropped", "0", "2.0 KiB"]]
    assert tables[1].numeric == [False, True, True]


def test_objects_that_share_nothing_are_tables_of_their_own() -> None:
    tables = tables_of({"split": {"groups": 3}, "ignored": {".png": 2}})
    assert [t.title for t in tables] == ["split", "ignored"]


def test_documents_and_bytes_share_a_cell() -> None:
    (table,) = tables_of({"by_kind": {"code": {"kept": {"documents": 3, "bytes": 2048}}}})
    assert table.rows == [["code", "3 · 2.0 KiB"]]


def test_a_long_table_says_how_much_is_left_out() -> None:
    assert record_table([{"a": i} for i in range(MAX_ROWS + 5)]).left_out == 5


def test_bottomless_json_ends() -> None:
    value: dict[str, object] = {}
    for _ in range(50):
        value = {"deeper": value, "fact": 1}
    assert len(tables_of(value)) < 10


def test_an_empty_table_has_no_numeric_columns() -> None:
    assert Table(["a"], []).numeric == [False]
