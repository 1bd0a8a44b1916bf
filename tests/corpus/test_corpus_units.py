"""Work units cover every file once and are balanced by bytes."""

from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lavra.corpus import units as units_module
from lavra.corpus.config import CorpusConfig, Source
from lavra.corpus.sources import scan_sources
from lavra.corpus.units import plan_units


def scan(path):
    return scan_sources(CorpusConfig(sources=(Source(path=str(path)),)))


@pytest.fixture(autouse=True)
def small_units(monkeypatch):
    monkeypatch.setattr(units_module, "_MIN_UNIT_BYTES", 1000)


def test_spans_cover_every_file_once_and_units_are_balanced(tmp_path):
    (tmp_path / "big.jsonl").write_bytes(b"x" * 9_999)
    for i in range(50):
        (tmp_path / f"{i:02d}.txt").write_bytes(b"y" * 130)
    found = scan(tmp_path)
    manifest = plan_units(found, None)
    covered = {}
    for span in (span for unit in manifest.units for span in unit):
        assert covered.get(span.file, 0) == span.start
        covered[span.file] = span.stop
    assert [covered[i] for i in range(len(found.files))] == [file.size for file in found.files]
    assert max(manifest.weights) <= 1100 and sum(manifest.weights) == found.estimated_text_bytes
    assert manifest.sampling_rate == 1


def test_row_groups_of_parquet_are_divided(tmp_path):
    table = pa.table({"text": [f"{i:0100d}" for i in range(100)]})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, use_dictionary=False)
    spans = [span for unit in plan_units(scan(tmp_path), None).units for span in unit]
    assert len(spans) > 3 and spans[0].start == 0 and spans[-1].stop == 10
    assert all(a.stop == b.start for a, b in pairwise(spans))


def test_an_empty_file_is_still_looked_at(tmp_path):
    (tmp_path / "empty.jsonl").touch()
    assert plan_units(scan(tmp_path), None).units == [[(0, 0, 0)]]


@pytest.mark.parametrize(("wanted", "rate"), [(None, 1), (10_000, 1), (2_500, 0.25)])
def test_the_sampling_rate_is_wanted_over_estimated_bytes(tmp_path, wanted, rate):
    (tmp_path / "a.txt").write_bytes(b"z" * 10_000)
    assert plan_units(scan(tmp_path), wanted).sampling_rate == rate
