"""Readers: every bad record is quarantined alone, with its place."""

import bz2
import gzip
import json
import random
import tracemalloc
from itertools import pairwise

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lavra.corpus.config import Source
from lavra.corpus.documents import Document, Failure
from lavra.corpus.formats import Format
from lavra.corpus.readers import Span, read_span

RECORDS = [{"id": f"r{i}", "text": f"text number {i} of ten"} for i in range(10)]
LINES = [json.dumps(record).encode() for record in RECORDS]


def texts(items):
    return [item.text for item in items if isinstance(item, Document)]


def failures(items):
    return [item for item in items if isinstance(item, Failure)]


def test_one_invalid_byte_quarantines_its_line_only(tmp_path, write_jsonl, read_file):
    lines = list(LINES)
    lines[3] = b'{"id": "bad", "text": "caf\xe9"}'
    items = read_file(write_jsonl(tmp_path / "a.jsonl", lines))
    assert len(texts(items)) == 9
    (failure,) = failures(items)
    assert failure.reason == "invalid_utf8"
    assert failure.position == sum(len(line) + 1 for line in lines[:3])
    assert "caf\\xe9" in failure.excerpt


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "cut', "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"text": null}', "no_text"),
        (b'{"text": 12}', "no_text"),
        (b'{"text": {"nested": "text"}}', "no_text"),
        (b'{"body": "elsewhere"}', "no_text"),
        (b'["text"]', "no_text"),
        (b'{"text": ""}', "empty"),
        (b'{"text": " \\n\\t "}', "empty"),
        (b'{"text": "half an emoji \\ud83d"}', "invalid_utf8"),
        (b'{"id": "\\ud83d", "text": "an id that is no text"}', "invalid_utf8"),
        (b'{"text": "' + b"x" * (1 << 20) + b'"}', "oversize"),
    ],
)
def test_a_bad_line_is_one_failure_between_two_good_documents(tmp_path, write_jsonl, read_file, line, reason):
    items = read_file(write_jsonl(tmp_path / "a.jsonl", [LINES[0], line, LINES[1]]))
    first, bad, last = items
    assert texts([first, last]) == [RECORDS[0]["text"], RECORDS[1]["text"]]
    assert (bad.reason, bad.position, bad.bytes) == (reason, len(LINES[0]) + 1, len(line) + 1)


def test_a_line_of_100_megabytes_is_skipped_in_bounded_memory(tmp_path, read_file):
    path = tmp_path / "big.jsonl"
    with open(path, "wb") as file:
        file.write(LINES[0] + b'\n{"text": "')
        for _ in range(100):
            file.write(b"y" * 1_000_000)
        file.write(b'"}\n' + LINES[1] + b"\n")
    tracemalloc.start()
    items = read_file(path, max_bytes=1 << 20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert [type(item) for item in items] == [Document, Failure, Document]
    assert items[1].reason == "oversize" and items[1].bytes == 100_000_013
    assert items[2].text == RECORDS[1]["text"]
    assert peak < 8 << 20


def test_blank_lines_are_no_records(tmp_path, write_jsonl, read_file):
    items = read_file(write_jsonl(tmp_path / "a.jsonl", [b"", LINES[0], b"  \r", LINES[1], b""]))
    assert items.count(None) == 3 and len(texts(items)) == 2 and not failures(items)


def test_line_ends_and_byte_order_marks_are_normalised_before_the_identity(tmp_path, read_file):
    plain, windows = tmp_path / "plain.txt", tmp_path / "windows.txt"
    plain.write_bytes(b"one\ntwo\nthree\n")
    windows.write_bytes(b"\xef\xbb\xbfone\r\ntwo\rthree\r\n")
    (a,), (b,) = read_file(plain), read_file(windows)
    assert a.text == b.text == "one\ntwo\nthree\n" and a.id == b.id and b.bytes == 14


def test_a_byte_order_mark_before_the_first_jsonl_record_is_no_error(tmp_path, write_jsonl, read_file):
    items = read_file(write_jsonl(tmp_path / "a.jsonl", [b"\xef\xbb\xbf" + LINES[0] + b"\r", LINES[1]]))
    assert texts(items) == [RECORDS[0]["text"], RECORDS[1]["text"]]


def test_ids_of_any_plain_type_become_strings_and_nested_ones_are_absent(tmp_path, write_jsonl, read_file):
    records = [
        {"id": key, "text": f"text of record {i}"} for i, key in enumerate((7, "a", 1.5, {"x": 1}, None))
    ]
    items = read_file(write_jsonl(tmp_path / "a.jsonl", records))
    assert [item.key for item in items] == ["7", "a", "1.5", "", ""]


def test_a_nul_character_survives_as_text(tmp_path, write_jsonl, read_file):
    (item,) = read_file(write_jsonl(tmp_path / "a.jsonl", [{"text": "a\0b and more"}]))
    assert item.text == "a\0b and more"


@pytest.mark.parametrize("span", [1, 7, 50, 117, 10_000])
def test_byte_ranges_cover_every_line_once(tmp_path, write_jsonl, read_file, span):
    path = write_jsonl(tmp_path / "a.jsonl", LINES)
    size = path.stat().st_size
    items = [
        item for at in range(0, size, span) for item in read_file(path, start=at, stop=min(at + span, size))
    ]
    assert texts(items) == [record["text"] for record in RECORDS]


COMPRESSORS = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".zst": lambda data: pa.compress(data, "zstd", asbytes=True),
}


@pytest.mark.parametrize("suffix", COMPRESSORS)
def test_compressed_streams_of_several_members_are_read_whole(tmp_path, read_file, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    halves = (b"\n".join(LINES[:5]) + b"\n", b"\n".join(LINES[5:]) + b"\n")
    path.write_bytes(b"".join(COMPRESSORS[suffix](half) for half in halves))
    items = read_file(path)
    assert texts(items) == [record["text"] for record in RECORDS] and not failures(items)


@pytest.mark.parametrize("suffix", COMPRESSORS)
@pytest.mark.parametrize("damage", ["cut", "overwritten"])
def test_documents_before_the_damage_of_a_stream_survive(tmp_path, read_file, suffix, damage):
    many = [
        json.dumps({"id": f"{i}", "text": f"{i * 7919 % 10007} words " * 40}).encode() for i in range(4000)
    ]
    data = COMPRESSORS[suffix](b"\n".join(many) + b"\n")
    path = tmp_path / f"a.jsonl{suffix}"
    middle = len(data) * 3 // 4
    path.write_bytes(data[:middle] if damage == "cut" else data[:middle] + b"\0" * 400 + data[middle + 400 :])
    items = read_file(path)
    kept = texts(items)
    assert len(kept) > 500
    # gzip notices damage only at the end of a member: what it decodes in between may be garbled.
    sure = len(kept) if damage == "cut" else 500
    assert kept[:sure] == [json.loads(line)["text"] for line in many[:sure]]
    found = [failure.reason for failure in failures(items)]
    assert found == ["truncated_stream"] if damage == "cut" else found[-1] == "truncated_stream"


def test_a_text_file_with_an_invalid_byte_is_quarantined_alone(tmp_path, read_file):
    (tmp_path / "bad.md").write_bytes(b"# Title\xff\n")
    (tmp_path / "good.md.gz").write_bytes(gzip.compress(b"# Title\n"))
    assert [item.reason for item in read_file(tmp_path / "bad.md")] == ["invalid_utf8"]
    (good,) = read_file(tmp_path / "good.md.gz")
    assert (good.text, good.file_type, good.kind) == ("# Title\n", ".md", "prose")


def test_a_code_file_above_the_limit_is_not_loaded(tmp_path, read_file):
    (tmp_path / "a.py").write_text("x" * 5000)
    assert [item.reason for item in read_file(tmp_path / "a.py", max_bytes=4999)] == ["oversize"]
    assert len(read_file(tmp_path / "a.py", max_bytes=5000)[0].text) == 5000


@pytest.mark.parametrize("packed", [False, True])
def test_a_long_text_is_read_in_pieces_of_whole_paragraphs_and_nothing_is_lost(
    tmp_path, long_text, monkeypatch, packed
):
    monkeypatch.setattr("lavra.corpus.readers.PIECE_BYTES", 200)
    paragraphs = [f"Paragraph {i} of a book.\nIt has two lines." for i in range(100)]
    items = long_text(tmp_path, "\n\n".join(paragraphs).encode(), packed=packed)
    assert "\n\n".join(texts(items)) == "\n\n".join(paragraphs)
    assert len(items) > 10 and all(item.text.startswith("Paragraph") for item in items)
    assert max(item.bytes for item in items) < 2 * 200


def test_every_line_of_a_long_text_is_in_exactly_one_span(tmp_path, long_text, monkeypatch):
    monkeypatch.setattr("lavra.corpus.readers.PIECE_BYTES", 50)
    lines = [f"line {i}" for i in range(200)]
    data = "\n".join(lines).encode()
    for cuts in ((0, 7, 8, len(data)), (0, 500, 501, 900, len(data)), (0, 1, len(data))):
        pieces = [
            item for span in pairwise(cuts) for item in long_text(tmp_path, data, start=span[0], stop=span[1])
        ]
        assert "\n".join(texts(pieces)).split("\n") == lines
        assert [data[p.position :].startswith(p.text.encode()) for p in pieces] == [True] * len(pieces)


def test_bad_lines_of_a_long_text_are_quarantined_alone(tmp_path, long_text):
    data = b"good line\n" * 50 + b"caf\xe9\n" + b"y" * 5000 + b"\n" + b"last line\n" * 50
    items = long_text(tmp_path, data, max_bytes=1000)
    assert [(f.reason, f.position, f.bytes) for f in failures(items)] == [
        ("invalid_utf8", 500, 5),
        ("oversize", 505, 5001),
    ]
    assert "\n".join(texts(items)).split("\n") == ["good line"] * 50 + ["last line"] * 50


def test_a_long_text_cut_by_compression_keeps_what_came_before(tmp_path, long_text):
    draw = random.Random(0)
    data = "".join(f"line {draw.random()}\n" for _ in range(20_000)).encode()
    items = long_text(tmp_path, data, packed=True, cut=0.7)
    assert [f.reason for f in failures(items)] == ["truncated_stream"]
    kept = "\n".join(texts(items))
    assert len(kept) > 0.4 * len(data) and data.decode().startswith(kept)


@pytest.fixture
def long_text():
    """`long_text(folder, data, packed, cut)` -> items of data above the limit as a text file, gzipped or not."""

    def read(folder, data, *, packed=False, cut=1.0, start=0, stop=None, max_bytes=400):
        path = folder / ("long.txt.gz" if packed else "long.txt")
        stored = gzip.compress(data) if packed else data
        path.write_bytes(stored[: int(cut * len(stored))])
        layout = Format("text" if packed else "long_text", "prose", ".txt", "gzip" if packed else "")
        span = Span(str(path), path.name, layout, start, len(data) if stop is None else stop)
        return list(read_span(span, Source(path=str(path)), max_bytes))

    return read


def test_a_missing_file_is_a_record_not_an_exception(tmp_path, read_file):
    assert [item.reason for item in read_file(tmp_path / "gone.jsonl", stop=10)] == ["unreadable"]


def test_source_code_is_code_and_a_path_like_id_tells_the_kind_of_a_record(tmp_path, write_jsonl, read_file):
    (tmp_path / "main.rs").write_text("fn main() {}\n")
    (code,) = read_file(tmp_path / "main.rs")
    assert (code.kind, code.file_type) == ("code", ".rs")
    records = [{"id": key, "text": f"text {key}"} for key in ("repo/a/x.py", "repo/README.md", "42", "v1.c")]
    items = read_file(write_jsonl(tmp_path / "a.jsonl", records))
    seen = [(item.kind, item.file_type) for item in items]
    assert seen == [("code", ".py"), ("prose", ".md"), ("prose", ".jsonl"), ("prose", ".jsonl")]


@pytest.mark.parametrize(
    ("record", "field", "group"),
    [
        ({"id": "book/1"}, "auto", "book"),
        ({"id": "a/b/1"}, "auto", "a/b"),
        ({"id": "a/b", "group": "g"}, "auto", "g"),
        ({"id": "single"}, "auto", "single"),
        ({"id": "a/b", "repo": 3}, "repo", "3"),
    ],
)
def test_groups_follow_the_field_the_path_or_the_record(
    tmp_path, write_jsonl, read_file, record, field, group
):
    path = write_jsonl(tmp_path / "a.jsonl", [record | {"text": "some text"}])
    (item,) = read_file(path, source=Source(path=str(path), group_field=field))
    assert item.group == group


def test_a_record_without_id_is_its_own_group(tmp_path, write_jsonl, read_file):
    a, b = read_file(write_jsonl(tmp_path / "a.jsonl", [{"text": "one text"}, {"text": "two texts"}]))
    assert a.group == a.id.hex() != b.group


def test_parquet_row_groups_are_read_apart_with_row_numbers(tmp_path, read_file):
    table = pa.table({"id": [1, 2, 3, 4, 5], "text": ["one", None, "three", "", "x" * 50], "n": [0] * 5})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    items = [item for g in range(3) for item in read_file(tmp_path / "a.parquet", 40, start=g, stop=g + 1)]
    assert [(i.text, i.key) if isinstance(i, Document) else i.reason for i in items] == [
        ("one", "1"),
        "no_text",
        ("three", "3"),
        "empty",
        "oversize",
    ]
    assert [item.position for item in items] == [0, 1, 2, 3, 4]


def test_a_parquet_file_of_other_bytes_is_one_failure(tmp_path, read_file):
    (tmp_path / "a.parquet").write_bytes(b"this is no parquet file")
    assert [item.reason for item in read_file(tmp_path / "a.parquet")] == ["unreadable"]


@pytest.mark.parametrize("encoding", ["utf-8", "iso-8859-1", "utf-16"])
def test_html_in_any_encoding_gives_its_main_text(tmp_path, read_file, encoding):
    pytest.importorskip("resiliparse")
    meta = "" if encoding == "utf-16" else f'<meta charset="{encoding}">'
    paragraph = "Era uma vez uma ação de coração, contada à avó. " * 5
    page = f"<html><head>{meta}<title>t</title><script>var x;</script></head><body><nav>Menu Home</nav>"
    page += f"<main><h1>Título</h1><p>{paragraph}</p></main><footer>Copyright</footer></body></html>"
    (tmp_path / "a.html").write_bytes(page.encode(encoding))
    (item,) = read_file(tmp_path / "a.html")
    assert "ação de coração, contada à avó" in item.text and item.kind == "prose"
    assert "var x" not in item.text and "Copyright" not in item.text
