"""Byte-level BPE through the `tokenizers` library: train, load, encode text that may contain anything."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lavra.errors import PreflightError, UsageError

if TYPE_CHECKING:
    import tokenizers

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|im_start|>", "<|im_end|>", "<|pad|>")
SMALLEST_VOCABULARY = 256 + len(SPECIAL_TOKENS)

# Split patterns as published with the models of these names; llama.cpp selects them by the same names.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PATTERNS = {
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}


class Tokenizer:
    """A loaded `tokenizer.json`. Text never produces a special token, whatever it contains."""

    def __init__(self, inner: tokenizers.Tokenizer) -> None:
        self._inner = inner
        # Special tokens inside text are encoded as plain characters; only ids can say "special".
        inner.encode_special_tokens = True
        end = inner.token_to_id(END_OF_TEXT)
        if end is None:
            raise UsageError(f"the tokenizer has no {END_OF_TEXT} token")
        self.end_id: int = end
        self.vocab_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values())  # ids may have gaps

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`; decode(encode(text)) == text for every str without lone surrogates."""
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` for many texts, on all cores."""
        return [e.ids for e in self._inner.encode_batch_fast(list(texts), add_special_tokens=False)]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; special tokens show as their names; incomplete UTF-8 becomes U+FFFD."""
        return self._inner.decode(list(ids), skip_special_tokens=False)

    def token_bytes(self) -> list[bytes]:
        """What each id stands for, `[vocab_size]`: the texts of ids are these, joined.

        Raises:
            PreflightError: not a byte-level tokenizer, whose tokens stand for the same bytes anywhere.
        """
        from tokenizers import decoders, pre_tokenizers

        if not isinstance(self._inner.decoder, decoders.ByteLevel):
            raise PreflightError(
                f"a byte-level tokenizer is needed, this one decodes by {self._inner.decoder}"
            )
        # Printable bytes stand for themselves, the others for U+0100 and on, in rising order.
        itself = {ord(c) for c in pre_tokenizers.ByteLevel.alphabet() if ord(c) < 256}
        others = [b for b in range(256) if b not in itself]
        byte_of = {chr(b): b for b in itself} | {chr(256 + i): b for i, b in enumerate(others)}
        table = [b""] * self.vocab_size
        for name, identity in self._inner.get_vocab(with_added_tokens=True).items():
            spelled = all(c in byte_of for c in name)  # an added token may be plain text
            table[identity] = bytes(byte_of[c] for c in name) if spelled else name.encode()
        return table

    def pieces(self, text: str) -> list[str]:
        """The text cut at token boundaries (a character cut across tokens shows in the first of them)."""
        encoding = self._inner.encode(text, add_special_tokens=False)
        pieces, done = [], 0
        for _, stop in encoding.offsets:
            pieces.append(text[done:stop])
            done = max(done, stop)
        return pieces

    def longest_tokens(self, count: int) -> list[str]:
        """The longest entries of the vocabulary, as text: what the corpus is full of."""
        ordinary = set(range(self.vocab_size)) - {self._inner.token_to_id(s) for s in SPECIAL_TOKENS}
        return sorted((self.decode([i]) for i in ordinary), key=lambda t: (-len(t), t))[:count]


def train_bpe(texts: Iterable[str], *, vocab_size: int, pattern: str) -> tokenizers.Tokenizer:
    """Learn merges (pairs seen at least twice) until the vocabulary has `vocab_size` entries.

    Raises:
        UsageError: `vocab_size` below 256 bytes + special tokens.
        PreflightError: the text does not support that many merges.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < SMALLEST_VOCABULARY:
        raise UsageError(f"tokenizer.vocab_size is {vocab_size}; the smallest is {SMALLEST_VOCABULARY}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    reached = tokenizer.get_vocab_size()
    if reached < vocab_size:
        raise PreflightError(
            f"a vocabulary of {vocab_size} was asked for, but this corpus supports only {reached}",
            where="tokenizer.vocab_size",
            hint=f"set tokenizer.vocab_size={reached} or less, or add text",
        )
    return tokenizer


def load_tokenizer(path: Path) -> Tokenizer:
    """Load a `tokenizer.json`.

    Raises:
        PreflightError: missing or not a tokenizer file.
    """
    from tokenizers import Tokenizer as Inner

    if not path.is_file():
        raise PreflightError(f"no tokenizer at {path.resolve()}", hint="train one: lavra tokenizer train")
    try:
        return Tokenizer(Inner.from_file(str(path)))
    except UsageError:
        raise
    except Exception as error:  # the library raises bare Exception
        raise PreflightError(f"{path} is not a tokenizer.json: {error}") from error


def sampled_texts(batches: Iterable, *, max_bytes: int, total_bytes: int) -> Iterator[str]:
    """Texts of Arrow batches with columns `id`, `text`: those whose hash falls under max/total."""
    threshold = int(min(1.0, max_bytes / max(total_bytes, 1)) * 2**32)
    for batch in batches:
        for identity, text in zip(batch["id"].to_pylist(), batch["text"].to_pylist(), strict=True):
            if int(identity[-8:], 16) < threshold or threshold >= 2**32:
                yield text
