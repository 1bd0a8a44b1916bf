"""Tokenizer: its numbers, and how it cuts text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lavra.report.quantities import quantity, words
from lavra.report.run import Run, items, part, sentences

MAX_EXAMPLES, MAX_TOKENS, MAX_LONGEST = 6, 400, 40  # shown
_SHOWN = {"examples", "longest_tokens"}


def view(run: Run) -> dict[str, Any]:
    """Context of the section "Tokenizer"."""
    summary, facts = part(run.facts("tokenizer/COMPLETE"), "summary"), run.facts("tokenizer/facts.json")
    if not summary and not facts:
        return run.missing("tokenizer/COMPLETE", "tokenizer")
    numbers = {k: v for k, v in {**facts, **summary}.items() if k not in _SHOWN}
    return {
        "facts": named(numbers),
        "tokens": named(part(run.facts("tokens/COMPLETE"), "summary")),
        "examples": [strip(example) for example in items(facts, "examples")[:MAX_EXAMPLES]],
        "longest": [visible(token) for token in sentences(facts, "longest_tokens")[:MAX_LONGEST]],
    }


def named(facts: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts as names and values."""
    return [(words(name), quantity(name, value)) for name, value in facts.items()]


def strip(example: Any) -> dict[str, Any]:
    """One segmentation: pieces to colour, and how many there are."""
    tokens = sentences(example, "tokens")
    text = str(example.get("text", ""))
    return {
        "pieces": [visible(token) for token in tokens[:MAX_TOKENS]],
        "count": len(tokens),
        "bytes": len(text.encode("utf-8", "replace")),
        "left_out": max(len(tokens) - MAX_TOKENS, 0),
    }


def visible(token: str) -> str:
    """A token with its line breaks and tabs made visible."""
    return token.replace("\r", "␍").replace("\n", "⏎\n").replace("\t", "⇥")
