"""The text that comes with Python itself."""

import inspect
import textwrap

from lavra.corpus import standard_library as library
from lavra.corpus.documents import Document

MODULE = '''\
"""Title of the module.

    An indented paragraph that explains at length what this module is for, and why.
    """
import os

class Box:
    """A box that holds things, described in more than a few words for the sake of length."""

    if os.name:
        def open(self):
            """Open the box, slowly and with care, because nobody knows what it may contain."""
            def inner():
                """Deep."""

    def silent(self):
        return "no docstring"
'''


def test_docstrings_come_in_order_below_their_qualified_names_and_dedented():
    text = library.docstrings(MODULE, "pkg.mod")
    headings = [line for line in text.split("\n") if line.startswith("pkg.mod")]
    assert headings == ["pkg.mod", "pkg.mod.Box", "pkg.mod.Box.open", "pkg.mod.Box.open.inner"]
    assert "\nAn indented paragraph" in text and "silent" not in text


def test_docstrings_agree_with_inspect_on_a_module_of_this_python():
    text = library.docstrings(inspect.getsource(textwrap), "textwrap")
    assert inspect.getdoc(textwrap.TextWrapper) in text and inspect.getdoc(textwrap.dedent) in text


def test_a_module_and_its_docstrings_share_a_group():
    code, prose = library.read_module("pkg/mod.py", MODULE.encode())
    assert (code.kind, code.file_type, prose.kind, prose.file_type) == ("code", ".py", "prose", "docstring")
    assert code.group == prose.group == "pkg/mod.py" and prose.key == "pkg.mod"


def test_little_documentation_makes_no_document():
    assert len(list(library.read_module("m.py", b'"""Short."""\nx = 1\n'))) == 1


def test_a_module_that_does_not_parse_keeps_its_source_and_counts_an_error():
    code, failure = library.read_module("m.py", b"print 'Python 2'\n")
    assert isinstance(code, Document) and failure.reason == "syntax_error"


def test_a_declared_encoding_is_honoured_and_a_wrong_one_is_quarantined():
    (code,) = library.read_module("m.py", b"# -*- coding: latin-1 -*-\nx = '\xe9'\n")
    assert "é" in code.text
    (failure,) = library.read_module("m.py", b"x = '\xe9'\n")
    assert failure.reason == "invalid_utf8"


def test_topics_are_parsed_not_imported():
    data = b'raise SystemExit\ntopics = {"if": "The if statement\\n***\\n", "while": "The while statement"}\n'
    first, second = library.read_topics(data)
    assert (first.key, first.group, first.kind) == ("if", "topic/if", "prose")
    assert first.text == "The if statement\n***\n" and second.position == 1


def test_broken_topics_are_one_error():
    assert [item.reason for item in library.read_topics(b"x = 1\n")] == ["syntax_error"]


def test_tests_caches_and_installed_packages_are_not_the_library(tmp_path):
    for name in (
        *("os.py", "json/decoder.py", "test/test_os.py", "json/tests/t.py", "site-packages/numpy/a.py"),
        *("__pycache__/os.py", "idlelib/idle_test/a.py", "_sysconfigdata__linux.py", "README.txt"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x = 1\n")
    (tmp_path / "json" / "__init__.py").touch()
    assert list(library.module_names(str(tmp_path))) == ["os.py", "json/decoder.py"]
