"""Personal data. Oracles: python-stdnum for check digits, the standard library for addresses, cases known by hand."""

from __future__ import annotations

import random
import time
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lavra.corpus import pii
from lavra.corpus.pii import KINDS, Pii, find_pii, luhn, without_pii

ALL = dict.fromkeys(KINDS)


def found(text: str, *kinds: str) -> list[str]:
    return [text[span.start : span.stop] for span in find_pii(text, dict.fromkeys(kinds or KINDS))]


@pytest.mark.parametrize(
    "text",
    ["a@b.co", "first.last+tag@sub.domain.com.br", "ÜBER@MÜNCHEN.DE", "x_1%y@host-name.io", "me@Big.COM"],
)
def test_addresses_are_found_between_any_neighbours(text: str) -> None:
    for around in ("{}", "<{}>", "mail {}.", "mailto:{}", "({})", "é{}\n".replace("é", "é "), "“{}”", "{},x"):
        assert found(around.format(text), "email") == [text], around


@pytest.mark.parametrize(
    "text", ["@handle", "a@b", "user@@host.com", "x @ y.com", "a@b.c", "me@example.org", "f@x.test"]
)
def test_what_is_no_address_or_nobodys_stays(text: str) -> None:
    assert found(text, "email") == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("8.8.8.8", ["8.8.8.8"]),
        ("at 8.8.8.8, and 1.1.1.1.", ["8.8.8.8", "1.1.1.1"]),
        ("10.1.2.3 172.16.0.9 192.168.1.1 127.0.0.1 169.254.3.4", []),
        ("192.0.2.1 198.51.100.7 203.0.113.9", []),
        ("999.1.1.1 108.0.0.01 1.2.3", []),
        ("version 1.2.3.4.5 and .3.3.3.0 and v8.8.8.8", []),
        ("2606:4700:4700::1111", ["2606:4700:4700::1111"]),
        ("::1 fe80::1 fc00::2 2001:db8::5 12:34:56 std::vector a::b", []),
    ],
)
def test_public_ip_addresses_only(text: str, expected: list[str]) -> None:
    assert found(text, "ip") == expected


@given(st.integers(0, 10**9 - 1), st.integers(0, 99))
def test_tax_numbers_of_persons_are_those_with_their_check_digits(base: int, check: int) -> None:
    from stdnum.br import cpf

    text = f"{base:09d}{check:02d}"
    text = f"{text[:3]}.{text[3:6]}.{text[6:9]}-{text[9:]}"
    assert bool(found(text, "cpf")) == cpf.is_valid(text)


def test_valid_tax_numbers_are_found() -> None:
    from stdnum.br import cnpj, cpf

    draw = random.Random(0)
    for _ in range(200):
        base = f"{draw.randrange(10**9):09d}"
        whole = base + cpf.calc_check_digits(base) if hasattr(cpf, "calc_check_digits") else None
        whole = whole or next(base + f"{c:02d}" for c in range(100) if cpf.is_valid(base + f"{c:02d}"))
        assert found(f"CPF {cpf.format(whole)}.", "cpf") == [cpf.format(whole)]
        base = f"{draw.randrange(10**12):012d}"
        whole = base + cnpj.calc_check_digits(base)
        assert found(f"CNPJ: {cnpj.format(whole)}", "cnpj") == [cnpj.format(whole)]
    assert found("00.000.000/0000-00 12.345.678/9012-34", "cnpj") == []


@given(st.text("0123456789", min_size=2, max_size=19))
def test_check_digits_of_cards_are_luhns(digits: str) -> None:
    from stdnum import luhn as oracle

    assert luhn(digits) == oracle.is_valid(digits)


@pytest.mark.parametrize(
    ("text", "hits"),
    [
        ("4111 1111 1111 1111", 1),
        ("4111111111111112", 0),
        ("3782-822463-10005", 1),
        ("order 1234567890123456", 0),
        ("6011000990139424", 1),
    ],
)
def test_cards_need_an_issuer_and_their_check_digit(text: str, hits: int) -> None:
    assert len(found(text, "card")) == hits


@pytest.mark.parametrize(
    "text",
    [
        "+55 11 91234-5678",
        "+1 (212) 555-0123",
        "(212) 555-0123",
        "212-555-0123",
        "(11) 91234-5678",
        "+442079460123",
    ],
)
def test_telephone_numbers(text: str) -> None:
    assert found(f"call {text} now", "phone") == [text]


@pytest.mark.parametrize(
    "text", ["2026-12-04", "1,234,567", "3.14159265", "12:30-14:00", "+1", "ISBN 978-3-16-148410-0"]
)
def test_other_numbers_are_no_telephone(text: str) -> None:
    assert found(text, "phone") == []


def test_social_security_numbers_that_were_never_issued_stay() -> None:
    assert found("078-05-1120 000-12-3456 666-12-3456 912-12-3456 123-00-4567", "ssn") == ["078-05-1120"]


def test_secrets_by_their_prefix_and_whole_keys() -> None:
    key = "-----BEGIN RSA PRIVATE KEY-----\n" + "MIIEpAIBAAKCAQEA7\n" * 20 + "-----END RSA PRIVATE KEY-----"
    token = "ghp_" + "a1B2" * 9
    assert found(f"x {key} y {token} AKIA{'ABCD' * 4} ghp_short", "secret") == [
        key,
        token,
        f"AKIA{'ABCD' * 4}",
    ]


def test_equal_values_get_equal_stand_ins_and_offsets_hold_after_characters_of_many_bytes() -> None:
    text = "漢字👍 ana@empresa.com.br, bob@x.org and Ana@empresa.com.br from 8.8.8.8 or 2606:4700:4700::1111"
    assert without_pii(text, ALL)[0] == (
        "漢字👍 person1@example.com, person2@example.com and person1@example.com from 192.0.2.1 or 2001:db8::2"
    )


PIECES = [
    "ana@x.org",
    "8.8.8.8",
    "+55 11 91234-5678",
    "4111 1111 1111 1111",
    "529.982.247-25",
    "::",
    "@",
    ".",
    "1",
    "a",
    " ",
    "é",
    "-",
    "078-05-1120",
]


@settings(deadline=None, max_examples=300)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join))
def test_replacing_twice_changes_nothing_and_spans_never_overlap(text: str) -> None:
    spans = find_pii(text)
    assert all(a.stop <= b.start for a, b in pairwise(spans))
    assert all(0 <= span.start < span.stop <= len(text) for span in spans)
    once, counts = without_pii(text, ALL)
    assert without_pii(once, ALL) == (once, {}) and sum(counts.values()) >= len(spans)


@settings(deadline=None, max_examples=400)
@given(st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=4)), max_size=14).map("".join))
@example("+55 11 91234-5678 4111 1111 1111 1111")  # four digits of another number before the card
def test_anchors_lead_to_every_match_of_the_patterns(text: str) -> None:
    patterns = [
        (pii._EMAIL, "email"),
        (pii._IPV4, "ip"),
        (pii._IPV6, "ip"),
        (pii._PHONE, "phone"),
        (pii._SSN, "ssn"),
    ]
    patterns += [(pii._CPF, "cpf"), (pii._CNPJ, "cnpj"), (pii._CARD, "card"), (pii._SECRET, "secret")]
    valid = {"email": pii._is_anybodys, "ip": pii._is_public, "phone": pii._is_phone, "card": pii._is_card}
    valid["cpf"] = lambda value: pii._check_digits(value, pii._CPF_WEIGHTS)
    valid["cnpj"] = lambda value: pii._check_digits(value, pii._CNPJ_WEIGHTS)
    for pattern, kind in patterns:
        everywhere = {m.span() for m in pattern.finditer(text) if valid.get(kind, bool)(m[0])}
        assert everywhere <= {(span.start, span.stop) for span in pii._FINDERS[kind](text)}


def test_hostile_texts_take_linear_time() -> None:
    for piece in (
        "a@",
        "a.",
        "1.",
        "1:",
        "+1 1",
        "1-",
        "-----BEGIN PRIVATE KEY-----",
        "sk-",
        "a" * 70 + "@",
        "::",
        "1 ",
    ):
        short, long = piece * (2_000 // len(piece)), piece * (40_000 // len(piece))
        seconds = []
        for text in (short, long):
            start = time.process_time()
            find_pii(text)
            seconds.append(time.process_time() - start)
        assert seconds[1] < 200 * max(seconds[0], 1e-3), piece  # quadratic would be 400 times as long


def test_a_corpus_is_written_without_and_says_how_many(
    tmp_path, write_jsonl, prose_text, build, accounting, rows
) -> None:
    texts = [f"{prose_text(i)} Write to reader{i}@mail.com or call 212-555-01{i:02d}." for i in range(30)]
    write_jsonl(tmp_path / "a.jsonl", [{"text": text, "id": f"{i}/x"} for i, text in enumerate(texts)])
    build(tmp_path / "out", tmp_path / "a.jsonl")
    kept = [row["text"] for side in ("train", "validation") for row in rows(tmp_path / "out", side)]
    assert len(kept) == 30 and all("person1@example.com" in text and "212-555" in text for text in kept)
    assert accounting(tmp_path / "out")["pii"] == {"email": {"documents": 30, "spans": 30}}
    records = [{"text": prose_text(99 + i), "id": f"{i}/y"} for i in range(9)]
    write_jsonl(tmp_path / "b.jsonl", records)
    build(
        tmp_path / "dropped", tmp_path / "a.jsonl", tmp_path / "b.jsonl", pii=Pii(phone="drop", email="keep")
    )
    found = accounting(tmp_path / "dropped")
    assert found["reasons"]["personal_data"]["documents"] == 30 and found["totals"]["kept"]["documents"] == 9
