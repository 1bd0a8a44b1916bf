"""Parts on disk."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lavra.corpus import store
from lavra.corpus.store import ERROR_SCHEMA, iter_documents, iter_part, row_writer


def write(path, count, excerpt="e"):
    with row_writer(path, ERROR_SCHEMA) as add:
        for i in range(count):
            add(("source", "path", f"place {i}", "reason", excerpt))


def test_rows_come_back_in_order_in_bounded_row_groups(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BATCH_BYTES", 1000)
    write(tmp_path / "a.parquet", 200, "x" * 50)
    places = [place for batch in iter_part(tmp_path / "a.parquet") for place in batch["place"].to_pylist()]
    assert places == [f"place {i}" for i in range(200)]
    assert pq.ParquetFile(tmp_path / "a.parquet").num_row_groups > 5


def test_a_part_without_rows_does_not_exist_and_reads_as_nothing(tmp_path):
    write(tmp_path / "a.parquet", 0)
    assert not list(tmp_path.iterdir()) and list(iter_part(tmp_path / "a.parquet")) == []


def test_a_part_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BATCH_ROWS", 10)
    with pytest.raises(RuntimeError), row_writer(tmp_path / "a.parquet", ERROR_SCHEMA) as add:
        for i in range(25):
            add(("s", "p", str(i), "r", "e"))
        raise RuntimeError
    assert not list(tmp_path.iterdir())


def test_equal_rows_give_equal_bytes(tmp_path):
    write(tmp_path / "a.parquet", 500)
    write(tmp_path / "b.parquet", 500)
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_documents_are_read_in_part_order_with_the_columns_asked_for(
    tmp_path, build, write_jsonl, prose_text
):
    source = write_jsonl(tmp_path / "a.jsonl", [{"id": f"{i}/x", "text": prose_text(i)} for i in range(40)])
    build(tmp_path / "out", source)
    batches = list(iter_documents(tmp_path / "out", "train", ["key", "bytes"]))
    assert all(
        isinstance(batch, pa.RecordBatch) and batch.schema.names == ["key", "bytes"] for batch in batches
    )
    keys = [key for batch in batches for key in batch["key"].to_pylist()]
    assert keys == sorted(keys, key=lambda key: int(key.split("/")[0])) and len(keys) > 30
