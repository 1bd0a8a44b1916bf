"""Oracles: the text itself, `tokenizers`' own GPT-2 splitter, published cuts of tricky strings."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers

from lavra.errors import PreflightError, UsageError
from lavra.tokenizer.bpe import (
    PATTERNS,
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    Tokenizer,
    load_tokenizer,
    sampled_texts,
    train_bpe,
)

TEXTS = [
    "The cat sat on the mat and the cat's hat was flat; we'll see what they'd say.\n\n",
    "def add(a, b):\n    return a + b  # 12345 <|endoftext|>\n",
    "Ünïcödé: 日本語の文章、émigré, Ελληνικά. 🎉🎉\r\n\tTabs\tand  spaces   \n",
    "<|im_start|>user<|im_end|><|pad|>" * 3,
] * 5
PATTERN_NAMES = sorted(PATTERNS)


@pytest.fixture(scope="module")
def trained() -> dict[str, Tokenizer]:
    return {name: Tokenizer(train_bpe(TEXTS, vocab_size=340, pattern=name)) for name in PATTERN_NAMES}


anything = st.text(st.characters(exclude_categories=("Cs",)), max_size=80)
tricky = st.lists(
    st.sampled_from(
        [
            *SPECIAL_TOKENS,
            "<|",
            "|>",
            "the ",
            " cat",
            "'s",
            "1234",
            " ",
            "\n",
            "\r\n",
            "\t",
            "é",
            "日",
            "🎉",
            "\0",
        ]
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
@settings(max_examples=30, deadline=None)
@given(text=st.one_of(anything, tricky))
def test_text_comes_back_whole_and_never_makes_a_special_token(trained, pattern: str, text: str) -> None:
    tokenizer = trained[pattern]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert "".join(tokenizer.pieces(text)) == text and len(tokenizer.pieces(text)) == len(ids)
    assert tokenizer.encode_batch([text, text]) == [ids, ids]
    special = {i for i in range(tokenizer.vocab_size) if tokenizer.decode([i]) in SPECIAL_TOKENS}
    assert len(special) == len(SPECIAL_TOKENS) and tokenizer.end_id in special
    assert not special & set(ids)


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
def test_special_names_in_text_stay_text_after_saving_and_loading(trained, tmp_path, pattern: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(train_bpe(TEXTS, vocab_size=340, pattern=pattern).to_str())
    loaded = load_tokenizer(path)
    for text in TEXTS[:4]:
        assert loaded.encode(text) == trained[pattern].encode(text)
    assert loaded.end_id not in loaded.encode("a <|endoftext|> b")


@pytest.mark.parametrize("pattern", PATTERN_NAMES)
def test_training_twice_gives_the_same_file(pattern: str) -> None:
    first, second = (train_bpe(iter(TEXTS), vocab_size=340, pattern=pattern).to_str() for _ in range(2))
    assert first == second


def test_more_entries_than_the_text_supports_are_refused_with_the_number_that_works() -> None:
    with pytest.raises(PreflightError) as error:
        train_bpe(["ababab cdcd"] * 3, vocab_size=1000, pattern="qwen2")
    supported = int(re.search(r"supports only (\d+)", error.value.what)[1])
    assert f"tokenizer.vocab_size={supported}" in error.value.hint
    assert train_bpe(["ababab cdcd"] * 3, vocab_size=supported, pattern="qwen2").get_vocab_size() == supported
    with pytest.raises(PreflightError):
        train_bpe(["ababab cdcd"] * 3, vocab_size=supported + 1, pattern="qwen2")


def test_fewer_entries_than_the_bytes_need_are_a_usage_error() -> None:
    assert (
        train_bpe([], vocab_size=SMALLEST_VOCABULARY, pattern="gpt-2").get_vocab_size() == SMALLEST_VOCABULARY
    )
    with pytest.raises(UsageError, match=str(SMALLEST_VOCABULARY)):
        train_bpe(TEXTS, vocab_size=SMALLEST_VOCABULARY - 1, pattern="qwen2")


def cuts(pattern: str, text: str) -> list[str]:
    split = pre_tokenizers.Split(Regex(PATTERNS[pattern]), behavior="isolated")
    return [piece for piece, _ in split.pre_tokenize_str(text)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12345", {"qwen2": ["1", "2", "3", "4", "5"], "llama-bpe": ["123", "45"], "gpt-2": ["12345"]}),
        (
            "x 1234",
            {
                "qwen2": ["x", " ", "1", "2", "3", "4"],
                "llama-bpe": ["x", " ", "123", "4"],
                "gpt-2": ["x", " 1234"],
            },
        ),
        # The upper-case contraction is one only where the pattern ignores case.
        ("I'LL I'll", {"qwen2": ["I", "'LL", " I", "'ll"], "gpt-2": ["I", "'", "LL", " I", "'ll"]}),
        ("a  b", {"qwen2": ["a", " ", " b"], "gpt-2": ["a", " ", " b"]}),
        ("a\n\n b", {"qwen2": ["a", "\n\n", " b"], "gpt-2": ["a", "\n\n", " b"]}),
        ("f(x)", {"qwen2": ["f", "(x", ")"], "llama-bpe": ["f", "(x", ")"], "gpt-2": ["f", "(", "x", ")"]}),
        ("x;\n\ny", {"qwen2": ["x", ";\n\n", "y"], "gpt-2": ["x", ";", "\n", "\n", "y"]}),
        ("\tdéjà vu", {"qwen2": ["\tdéjà", " vu"], "gpt-2": ["\t", "déjà", " vu"]}),
        ("日本 語", {"qwen2": ["日本", " 語"], "llama-bpe": ["日本", " 語"], "gpt-2": ["日本", " 語"]}),
        ("<|endoftext|>", {"qwen2": ["<|", "endoftext", "|>"], "gpt-2": ["<|", "endoftext", "|>"]}),
        ("end  ", {"qwen2": ["end", "  "], "gpt-2": ["end", "  "]}),
    ],
)
def test_text_is_cut_as_the_patterns_were_published(text: str, expected: dict[str, list[str]]) -> None:
    for pattern, pieces in expected.items():
        assert cuts(pattern, text) == pieces, pattern


@settings(max_examples=150, deadline=None)
@given(text=st.one_of(anything, tricky, st.text("aZ19 '\n\tséLT.,!-日", max_size=30)))
def test_gpt_2_cuts_like_the_splitter_built_into_tokenizers(text: str) -> None:
    built_in = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    spans = [span for _, span in built_in.pre_tokenize_str(text)]
    assert cuts("gpt-2", text) == [text[a:b] for a, b in spans]


def test_merges_never_cross_the_cuts() -> None:
    tokenizer = Tokenizer(
        train_bpe(["1234 1234 1234 12 12"] * 20, vocab_size=SMALLEST_VOCABULARY, pattern="qwen2")
    )
    assert tokenizer.pieces("1234") == ["1", "2", "3", "4"]
    with pytest.raises(PreflightError):  # single digits and single spaces: nothing to merge
        train_bpe(["1234 1234 1234 12 12"] * 20, vocab_size=SMALLEST_VOCABULARY + 1, pattern="qwen2")


def test_longest_entries_are_ordinary_tokens_longest_first(trained) -> None:
    found = trained["qwen2"].longest_tokens(10)
    assert [len(t) for t in found] == sorted((len(t) for t in found), reverse=True)
    assert not set(found) & set(SPECIAL_TOKENS)


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(PreflightError, match="no tokenizer at"):
        load_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(PreflightError, match=r"not a tokenizer\.json"):
        load_tokenizer(path)


def test_the_sample_to_learn_from_is_chosen_by_hash_and_about_as_large_as_asked() -> None:
    import hashlib

    import pyarrow as pa

    texts = [f"text {i}" for i in range(4000)]
    ids = [hashlib.blake2b(t.encode(), digest_size=16).hexdigest() for t in texts]
    batch = pa.RecordBatch.from_pydict({"id": ids, "text": texts})
    total = sum(map(len, texts))
    quarter = list(sampled_texts([batch], max_bytes=total // 4, total_bytes=total))
    assert 850 < len(quarter) < 1150
    halves = list(sampled_texts([batch[2000:], batch[:2000]], max_bytes=total // 4, total_bytes=total))
    assert sorted(halves) == sorted(quarter)  # the order of reading does not matter
    assert list(sampled_texts([batch], max_bytes=total, total_bytes=total)) == texts
