"""The source `python:stdlib`: the code, docstrings and help topics of the Python that runs this."""

from __future__ import annotations

import ast
import io
import os
import sysconfig
import textwrap
import tokenize
import warnings
from collections.abc import Iterator

from lavra.corpus.documents import Document, Failure, make_document
from lavra.corpus.formats import CODE, PROSE

TOPICS = "pydoc_data/topics.py"
DOCSTRING_MIN_CHARACTERS = 200  # a module that documents less than this has no docstring document
_SKIPPED_FOLDERS = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
_BLOCKS = (ast.If, ast.Try, ast.With, ast.For, ast.While, ast.ExceptHandler)  # may hold definitions
_SKIPPED_PREFIX = "_sysconfigdata"  # how this one binary was built; nothing written by a person


def library_root() -> str:
    """Folder of the standard library of this Python."""
    return sysconfig.get_paths()["stdlib"]


def module_names(root: str) -> Iterator[str]:
    """Module files below `root`, relative with `/`, in an order that does not depend on the system."""
    for folder, folders, files in os.walk(root):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED_FOLDERS)
        for name in sorted(files):
            path = os.path.join(folder, name)
            # An empty __init__.py holds no text that could be lost.
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIX) and os.path.getsize(path):
                yield os.path.relpath(path, root).replace(os.sep, "/")


def read_module(name: str, data: bytes) -> Iterator[Document | Failure]:
    """The source of a module as code, then all its docstrings as prose, in one group."""
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (UnicodeDecodeError, SyntaxError):
        yield Failure("invalid_utf8", 0, len(data), repr(data[:300]))
        return
    yield make_document(text, kind=CODE, file_type=".py", key=name, group=name)
    try:
        prose = docstrings(text, _module(name))
    except (SyntaxError, ValueError, RecursionError) as error:
        yield Failure("syntax_error", 1, len(data), str(error)[:300])
        return
    if len(prose) >= DOCSTRING_MIN_CHARACTERS:
        yield make_document(
            prose, kind=PROSE, file_type="docstring", position=1, key=_module(name), group=name
        )


def docstrings(source: str, module: str) -> str:
    """Docstrings of a module, its classes and functions in order, each below its qualified name.

    Raises:
        SyntaxError, ValueError, RecursionError: the source does not parse.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old sources
        tree = ast.parse(source)
    return "\n\n".join(f"{name}\n\n{text}" for name, text in _documented(tree, module))


def _documented(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        name = f"{name}.{node.name}"
    elif not isinstance(node, (ast.Module, *_BLOCKS)):
        return  # no definition below
    if not isinstance(node, _BLOCKS) and (text := ast.get_docstring(node)):
        yield name, text
    for block in ("body", "handlers", "orelse", "finalbody"):
        for child in getattr(node, block, ()):
            yield from _documented(child, name)


def read_topics(data: bytes) -> Iterator[Document | Failure]:
    """Help topics (the language reference that `help("lambda")` shows), one prose document each."""
    try:
        topics = _topics(data)
    except (SyntaxError, ValueError, StopIteration) as error:
        yield Failure("syntax_error", 0, len(data), str(error)[:300])
        return
    for position, (name, text) in enumerate(topics.items()):
        yield make_document(
            textwrap.dedent(text).strip() + "\n",
            kind=PROSE,
            file_type="topic",
            position=position,
            key=name,
            group=f"topic/{name}",
        )


def _topics(data: bytes) -> dict[str, str]:
    """The dictionary assigned to `topics`; parsed, never imported."""
    for statement in ast.parse(data).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            return {str(name): str(text) for name, text in ast.literal_eval(statement.value).items()}
    raise ValueError("no dictionary of topics")


def _module(name: str) -> str:
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
