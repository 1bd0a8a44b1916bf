"""One document, one failure, and the normalisation that every text passes through."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from lavra.corpus.formats import Kind
from lavra.corpus.store import EXCERPT_CHARACTERS

ERROR_REASONS = (
    "invalid_utf8",  # the record or file is no Unicode text
    "invalid_json",
    "no_text",  # no text field, or its value is null or no string
    "empty",  # nothing but white space
    "oversize",  # above max_document_bytes; skipped, never loaded
    "truncated_stream",  # a compressed file ends early or is damaged; what came before it is kept
    "syntax_error",  # a module whose docstrings cannot be read
    "unreadable",  # the file cannot be opened, or is not what its name says
)


class Document(NamedTuple):
    """A text with its origin.

    Attributes:
        id: BLAKE2b-128 of the UTF-8 text.
        text: newlines are `\\n`, no byte order mark.
        key: the record's own id, or "".
        group: what never straddles train and validation.
        kind: prose or code.
        file_type: suffix, or `docstring`, `topic`.
        url: where it came from, or "".
        bytes: of the UTF-8 text.
        position: byte offset of its line, row, or number in its file.
    """

    id: bytes
    text: str
    key: str
    group: str
    kind: Kind
    file_type: str
    url: str
    bytes: int
    position: int


class Failure(NamedTuple):
    """A record that is no document.

    Attributes:
        reason: one of `ERROR_REASONS`.
        position: as in `Document`.
        bytes: raw size of the record.
        excerpt: beginning of the raw record.
    """

    reason: str
    position: int
    bytes: int
    excerpt: str


def normalize(text: str) -> str:
    """Without byte order mark; CRLF and CR become LF."""
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n") if "\r" in text else text


def content_id(text: str) -> tuple[bytes, int]:
    """BLAKE2b-128 of the UTF-8 text, and its length in bytes.

    Raises:
        UnicodeEncodeError: the text holds a lone surrogate.
    """
    data = text.encode()
    return hashlib.blake2b(data, digest_size=16).digest(), len(data)


def make_document(
    text: str,
    *,
    kind: Kind,
    file_type: str,
    position: int = 0,
    key: str = "",
    group: str = "",
    url: str = "",
) -> Document | Failure:
    """Normalise and identify a text; without a group the document is its own group."""
    text = normalize(text)
    if not text or text.isspace():
        return Failure("empty", position, len(text.encode()), repr(text[:EXCERPT_CHARACTERS]))
    try:
        identity, size = content_id(text)
        for name in (key, group, url):
            name.encode()
    except UnicodeEncodeError:
        size = len(text.encode(errors="surrogatepass"))
        return Failure("invalid_utf8", position, size, ascii(text[:EXCERPT_CHARACTERS]))
    return Document(identity, text, key, group or key or identity.hex(), kind, file_type, url, size, position)
