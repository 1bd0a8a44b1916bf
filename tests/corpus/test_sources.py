"""Finding files: everything is found, named as ignored, or refused with advice."""

import gzip
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from lavra.corpus import sources
from lavra.corpus.config import STANDARD_LIBRARY, CorpusConfig, Source
from lavra.corpus.sources import scan_sources
from lavra.errors import PreflightError


def scan(*paths, **source):
    return scan_sources(CorpusConfig(sources=tuple(Source(path=str(path), **source) for path in paths)))


@pytest.fixture
def tree(tmp_path):
    for name in (
        *("b/two.md", "a/one.txt", "c.jsonl", "photo.PNG", "b/data.csv", "b/more.csv", "code/x.py"),
        *(".git/config.txt", "a/__pycache__/one.py", "node_modules/m/index.js", ".hidden.txt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"contents of {name}\n")
    return tmp_path


def test_a_folder_gives_its_files_in_order_and_counts_what_it_cannot_read(tree):
    found = scan(tree)
    assert [file.name for file in found.files] == ["a/one.txt", "b/two.md", "c.jsonl", "code/x.py"]
    assert found.ignored == {".csv": 2, ".png": 1}
    assert found.total_bytes == sum(os.path.getsize(file.path) for file in found.files)


def test_a_glob_and_a_single_file_work_alike(tree):
    assert [file.name for file in scan(tree / "**" / "*.md").files] == ["b/two.md"]
    assert [file.name for file in scan(tree / "a" / "one.txt").files] == ["one.txt"]


def test_a_missing_path_names_the_path_tried_and_its_neighbours(tree):
    (tree / "books-en").mkdir()
    with pytest.raises(PreflightError) as error:
        scan(tree / "book-en" / "chapter.txt")
    assert str(tree / "book-en" / "chapter.txt") in str(error.value)
    assert "books-en" in error.value.hint and str(tree) in error.value.hint


def test_a_source_without_readable_files_says_what_it_saw(tmp_path):
    (tmp_path / "a.png").write_bytes(b"png")
    with pytest.raises(PreflightError, match=r"no readable file \(not readable: 1 \.png\)"):
        scan(tmp_path)
    with pytest.raises(PreflightError, match="no readable file"):
        scan(tmp_path / "*.txt")


def test_links_to_folders_are_followed_once_and_dangling_ones_do_not_stop_the_scan(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / "linked.txt").write_text("linked text")
    (tree / "link").symlink_to(other)
    (other / "back").symlink_to(tree)
    (tree / "nowhere.txt").symlink_to(tree / "gone")
    names = [file.name for file in scan(tree).files]
    assert names.count("link/linked.txt") == 1 and "nowhere.txt" in names and len(names) == 6


def test_inputs_change_with_size_and_time_but_not_with_the_place(tree, tmp_path_factory):
    before = scan(tree).inputs()
    os.utime(tree / "a" / "one.txt", ns=(1, 1))
    assert scan(tree).inputs() != before
    assert str(tree) not in str(before)


def test_two_sources_of_one_name_are_told_apart(tree, tmp_path_factory):
    other = tmp_path_factory.mktemp("x") / tree.name
    other.mkdir()
    (other / "z.txt").write_text("text")
    assert scan(tree, other).names == (tree.name, f"{tree.name} (2)")


def test_the_text_of_compressed_files_is_estimated_from_their_beginning(tmp_path):
    text = b"".join(b'{"text": "number %d and more of it"}\n' % i for i in range(100_000))
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(text))
    estimated = scan(tmp_path).estimated_text_bytes
    assert 0.8 * len(text) < estimated < 1.2 * len(text)


def test_a_parquet_file_without_the_text_column_is_refused_with_its_columns(tmp_path):
    pq.write_table(pa.table({"body": ["a"], "n": [1]}), tmp_path / "a.parquet")
    with pytest.raises(PreflightError, match="no column `text`; it has: body, n"):
        scan(tmp_path)
    with pytest.raises(PreflightError, match="holds int64, not text"):
        scan(tmp_path, text_field="n")
    assert len(scan(tmp_path, text_field="body").files) == 1


def test_html_without_its_package_is_refused_with_the_command_to_install_it(tmp_path, monkeypatch):
    (tmp_path / "a.html").write_text("<p>text</p>")
    monkeypatch.setattr(sources.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PreflightError) as error:
        scan(tmp_path)
    assert error.value.hint == 'pip install "lavra[web]"'


def test_the_standard_library_is_known_by_version_not_by_file(tree):
    found = scan(STANDARD_LIBRARY)
    assert len(found.files) > 100 and len(found.inputs()) == 1
