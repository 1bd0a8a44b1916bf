"""Stage `tokenizer`: corpus -> `tokenizer.json` and facts about how it cuts text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lavra import artifact, console
from lavra.artifact import Artifact
from lavra.corpus.store import iter_documents
from lavra.errors import PreflightError
from lavra.tokenizer.bpe import END_OF_TEXT, Tokenizer, load_tokenizer, sampled_texts, train_bpe
from lavra.tokenizer.config import TokenizerConfig

FORMAT_VERSION = 1
FERTILITY_BYTES = 1_000_000  # validation text measured
EXAMPLE_CHARACTERS = 240


def build_tokenizer(
    config: TokenizerConfig,
    corpus: Artifact,
    out: Path,
    *,
    vocab_size: int,
    given: Path | None,
    inputs: dict[str, Any],
) -> Artifact:
    """Train on the training split, or copy a tokenizer that is given.

    Args:
        given: a `tokenizer.json`, the recipe's or that of the run that training starts from; nothing is trained then.

    Raises:
        PreflightError: the corpus does not support the vocabulary.
    """
    artifact.begin(out, "tokenizer", inputs)
    file = out / "tokenizer.json"
    if given is not None:
        artifact.write_bytes(file, given.read_bytes())
    elif not file.exists():
        total = corpus.summary["train_bytes"]
        console.say(f"  learning {vocab_size} tokens from up to {config.train_max_bytes / 1e6:.1f} MB")
        texts = sampled_texts(
            iter_documents(corpus.path, "train", ["id", "text"]),
            max_bytes=config.train_max_bytes,
            total_bytes=total,
        )
        trained = train_bpe(texts, vocab_size=vocab_size, pattern=config.pattern)
        artifact.write_bytes(file, trained.to_str(pretty=True).encode())
    tokenizer = load_tokenizer(file)
    facts = _facts(tokenizer, corpus)
    artifact.write_json(out / "facts.json", facts)
    summary = {
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": facts["bytes_per_token"],
        "end_token": END_OF_TEXT,
        "pattern": config.pattern,
    }
    return artifact.finish(out, "tokenizer", inputs, summary)


def _facts(tokenizer: Tokenizer, corpus: Artifact) -> dict[str, Any]:
    """Fertility by kind of text on validation documents, examples of cuts, longest entries."""
    count: dict[str, list[int]] = {}
    examples: dict[str, str] = {}
    for batch in iter_documents(corpus.path, "validation", ["text", "kind"]):
        texts, kinds = batch["text"].to_pylist(), batch["kind"].to_pylist()
        for text, kind, ids in zip(texts, kinds, tokenizer.encode_batch(texts), strict=True):
            totals = count.setdefault(kind, [0, 0])
            totals[0] += len(text.encode())
            totals[1] += len(ids)
            examples.setdefault(kind, text[:EXAMPLE_CHARACTERS])
        if sum(totals[0] for totals in count.values()) > FERTILITY_BYTES:
            break
    if not count and corpus.summary["kept_documents"]:
        raise PreflightError("the corpus has no validation documents")
    size, tokens = (sum(totals[i] for totals in count.values()) for i in (0, 1))
    return {
        "bytes_per_token": size / tokens if tokens else None,  # without a corpus
        "bytes_per_token_by_kind": {kind: b / t for kind, (b, t) in count.items()},
        "examples": [{"text": t, "tokens": tokenizer.pieces(t)} for t in examples.values()],
        "longest_tokens": tokenizer.longest_tokens(20),
    }
