"""Oracles: the full forward pass, the tokenizer's decoding of all ids, enumeration of all sets."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from lavra.errors import UsageError
from lavra.generate import decode as module
from lavra.generate.decode import Cache, extend, generate_ids, generate_text
from lavra.generate.sampling import Sampling, next_token
from lavra.tokenizer.bpe import SMALLEST_VOCABULARY, Tokenizer, train_bpe

GREEDY = Sampling(temperature=0)


def full_logits(model, ids: list[int]) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([ids]), torch.arange(len(ids))[None])[0]


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.integers(1, 5), min_size=1, max_size=16).filter(lambda p: sum(p) <= 16),
    kv_heads=st.sampled_from([1, 2, 4]),
    tied=st.booleans(),
    window=st.sampled_from([0, 1, 2, 5, 15, 16, 40]),
    soft_cap=st.sampled_from([0, 0.5, 3.0]),
    seed=st.integers(0, 99),
)
def test_cached_logits_equal_the_full_forward_pass(
    tiny_model, pieces, kv_heads, tied, window, soft_cap, seed
) -> None:
    model = tiny_model(
        seed=seed,
        scale=5,
        n_kv_heads=kv_heads,
        tie_embeddings=tied,
        attention_window=window,
        attention_soft_cap=soft_cap,
    )
    ids = torch.randint(48, (sum(pieces),), generator=torch.Generator().manual_seed(seed)).tolist()
    expected, cache, done = full_logits(model, ids), Cache(model), 0
    for size in pieces:
        found = extend(model, cache, ids[done : done + size])
        done += size
        torch.testing.assert_close(found, expected[done - 1], atol=1e-5, rtol=1e-5)
    assert cache.length == len(ids)


@pytest.mark.parametrize("prompt", [[], [5, 6, 7], list(range(1, 40))])
def test_decoding_goes_on_past_the_context_with_its_newest_half(tiny_model, prompt: list[int]) -> None:
    model = tiny_model(scale=8, seq_len=8)
    found = list(generate_ids(model, prompt, end_id=0, max_tokens=40, sampling=GREEDY))
    # By the definition: the window grows to the context, then restarts with the newest half.
    context, expected = [0, *prompt], []
    window = context[-8:]
    while len(expected) < 40:
        if len(window) > 8:
            window = context[-4:]
        token = int(full_logits(model, window)[-1].argmax())
        if token == 0:
            break
        expected.append(token)
        context.append(token)
        window = [*window, token]
    assert found == expected
    assert len(expected) > 8


def test_greedy_is_deterministic_and_seeds_decide_the_rest(tiny_model) -> None:
    model = tiny_model(scale=3)

    def run(**values) -> list[int]:
        return list(generate_ids(model, [3], end_id=0, max_tokens=30, sampling=Sampling(**values)))

    assert run(temperature=0) == run(temperature=0, seed=5)
    assert run(seed=1, temperature=1.0) == run(seed=1, temperature=1.0)
    assert len({tuple(run(seed=s, temperature=1.0)) for s in range(6)}) > 1
    assert run(temperature=1.0, top_k=1, seed=3) == run(temperature=0)
    torch.manual_seed(0)  # the global generator plays no part
    assert run(seed=1, temperature=1.0) == run(seed=1, temperature=1.0)


# --- one token ---


def kept(logits: list[float], sampling: Sampling) -> dict[int, float]:
    """Token -> probability that the draw is made from."""
    seen = []
    real = torch.multinomial

    def record(probabilities, *args, **kwargs):
        seen.append(probabilities.clone())
        return real(probabilities, *args, **kwargs)

    with mock.patch.object(torch, "multinomial", record):
        drawn = next_token(torch.tensor(logits), sampling, torch.Generator().manual_seed(0))
    result = {i: p for i, p in enumerate(seen[0].tolist()) if p > 0}
    assert drawn in result
    return result


logit_lists = st.lists(st.integers(-16, 16).map(lambda n: n / 4), min_size=1, max_size=7, unique=True)


@settings(max_examples=50, deadline=None)
@given(logits=logit_lists, top_p=st.floats(0.05, 0.99), temperature=st.sampled_from([0.5, 1.0, 2.0]))
def test_top_p_keeps_the_smallest_set_that_reaches_p(logits, top_p, temperature) -> None:
    probabilities = (torch.tensor(logits, dtype=torch.float64) / temperature).softmax(-1).tolist()
    masses = [
        (size, sum(probabilities[i] for i in chosen))
        for size in range(1, len(logits) + 1)
        for chosen in itertools.combinations(range(len(logits)), size)
    ]
    assume(all(abs(mass - top_p) > 1e-4 for _, mass in masses))  # rounding may decide either way
    smallest = min(size for size, mass in masses if mass >= top_p)
    found = kept(logits, Sampling(temperature=temperature, top_p=top_p))
    assert len(found) == smallest
    assert sum(probabilities[i] for i in found) >= top_p
    assert min(probabilities[i] for i in found) >= max(
        [0, *(p for i, p in enumerate(probabilities) if i not in found)]
    )


def test_top_k_keeps_exactly_k_of_equal_logits() -> None:
    assert len(kept([1.0] * 6, Sampling(temperature=1, top_k=2, top_p=1))) == 2


@settings(max_examples=30, deadline=None)
@given(logits=logit_lists, top_k=st.integers(1, 9))
def test_top_k_keeps_the_k_most_likely(logits, top_k) -> None:
    best = sorted(range(len(logits)), key=lambda i: -logits[i])[:top_k]
    assert sorted(kept(logits, Sampling(temperature=1, top_k=top_k, top_p=1))) == sorted(best)


def test_draws_follow_the_tempered_probabilities() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0]), torch.Generator().manual_seed(0)
    sampling = Sampling(temperature=2, top_p=1)
    counts = torch.zeros(3)
    for _ in range(3000):
        counts[next_token(logits, sampling, generator)] += 1
    torch.testing.assert_close(counts / 3000, (logits / 2).softmax(-1), atol=0.04, rtol=0)


@pytest.mark.parametrize("bad", [{"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}])
def test_settings_out_of_range_are_a_usage_error(bad: dict) -> None:
    with pytest.raises(UsageError, match="not all in range"):
        Sampling(**bad)


# --- text ---


@pytest.fixture(scope="module")
def byte_tokenizer() -> Tokenizer:
    return Tokenizer(train_bpe([], vocab_size=SMALLEST_VOCABULARY, pattern="gpt-2"))


def spoken(tiny_model, tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """What `generate_text` yields when the model says `ids`."""
    script = iter([*ids, tokenizer.end_id])
    model = tiny_model(vocab_size=tokenizer.vocab_size, seq_len=256)

    def scripted(*_: object) -> torch.Tensor:
        logits = torch.zeros(tokenizer.vocab_size)
        logits[next(script)] = 1
        return logits

    with mock.patch.object(module, "extend", scripted):
        return list(generate_text(model, tokenizer, "", max_tokens=200, sampling=GREEDY))


def test_a_character_is_shown_once_it_is_whole(tiny_model, byte_tokenizer) -> None:
    text = "aé日🎉b"
    ids = byte_tokenizer.encode(text)
    assert len(ids) == len(text.encode())  # bytes, so that every character comes in pieces
    assert spoken(tiny_model, byte_tokenizer, ids) == list(text)
    assert "".join(spoken(tiny_model, byte_tokenizer, ids[:-3])) == byte_tokenizer.decode(ids[:-3])


@settings(max_examples=30, deadline=None)
@given(
    ids=st.lists(st.integers(1, SMALLEST_VOCABULARY - 1), max_size=30),
    text=st.text(st.characters(exclude_categories=("Cs",)), max_size=10),
)
def test_the_pieces_join_to_the_decoding_of_all_ids(tiny_model, byte_tokenizer, ids, text) -> None:
    said = [*ids, *byte_tokenizer.encode(text)]
    assert "".join(spoken(tiny_model, byte_tokenizer, said)) == byte_tokenizer.decode(said)


def test_the_end_token_ends_and_is_not_shown(tiny_model, byte_tokenizer) -> None:
    ids = byte_tokenizer.encode("ab")
    assert spoken(tiny_model, byte_tokenizer, [*ids, byte_tokenizer.end_id, *ids]) == ["a", "b"]
