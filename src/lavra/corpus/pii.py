"""Personal data and secrets in a text: where they are, and the text without them.

Found by form and, where a number has one, by its check digits. Patterns have bounded repetitions only, so that hostile text
takes linear time; texts without an `@`, a run of digits or a known prefix are hardly looked at. What stands in for an
address is itself never found: replacing twice changes nothing.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Literal, NamedTuple, get_args

from pydantic import Field

from lavra.schema import Config

Kind = Literal["email", "ip", "phone", "cpf", "cnpj", "ssn", "card", "secret"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Action = Literal["keep", "replace", "drop"]
_LONGEST_LEAD = 80  # characters before an anchor: longer runs are no match
_ROUNDS = 8  # numbers side by side: each round finds every second one


class Pii(Config):
    """What happens to each kind of personal data: `keep`, `replace`, or `drop` the document."""

    email: Action = Field(default="replace", description="E-mail addresses; replaced by ones at example.com")
    ip: Action = Field(
        default="replace", description="Public IPv4 and IPv6 addresses; replaced by ones for documentation"
    )
    phone: Action = Field(
        default="keep", description="Telephone numbers with a country code, or in US or Brazilian form"
    )
    cpf: Action = Field(default="keep", description="Brazilian tax numbers of persons, check digits verified")
    cnpj: Action = Field(
        default="keep", description="Brazilian tax numbers of companies, check digits verified"
    )
    ssn: Action = Field(default="keep", description="US social security numbers, written with hyphens")
    card: Action = Field(
        default="replace", description="Payment cards: issuer's prefix and Luhn's check digit verified"
    )
    secret: Action = Field(
        default="replace", description="Private keys, and access tokens with a known prefix"
    )

    def actions(self) -> dict[Kind, Action]:
        """By kind."""
        return {kind: getattr(self, kind) for kind in KINDS}


class Span(NamedTuple):
    """Characters `start` to `stop` of a text are of a kind."""

    kind: Kind
    start: int
    stop: int


def find_pii(text: str, kinds: Mapping[Kind, object] | None = None) -> list[Span]:
    """Spans in order; where two overlap, the one that begins first, of those the longer.

    Args:
        kinds: those to look for; all by default.
    """
    wanted = KINDS if kinds is None else kinds
    found = sorted(
        (span for kind in KINDS if kind in wanted for span in _FINDERS[kind](text)),
        key=lambda span: (span.start, -span.stop),
    )
    apart: list[Span] = []
    for span in found:
        if not apart or span.start >= apart[-1].stop:
            apart.append(span)
    return apart


def without_pii(text: str, kinds: Mapping[Kind, object]) -> tuple[str, Counter[Kind]]:
    """The text with each span of some kinds replaced, and how many there were.

    Equal values get equal stand-ins within a text. What begins only where another one was taken away is found too:
    of the result nothing is replaced again.
    """
    counts: Counter[Kind] = Counter()
    numbers: dict[tuple[Kind, str], int] = {}
    for _ in range(_ROUNDS):
        spans = find_pii(text, kinds)
        if not spans:
            break
        counts.update(span.kind for span in spans)
        parts, end = [], 0
        for span in spans:
            value = text[span.start : span.stop]
            number = numbers.setdefault((span.kind, value.lower()), sum(k == span.kind for k, _ in numbers))
            parts += [text[end : span.start], _stand_in(span.kind, value, number)]
            end = span.stop
        text = "".join([*parts, text[end:]])
    return text, counts


def _stand_in(kind: Kind, value: str, number: int) -> str:
    if kind == "email":
        return f"person{number + 1}@example.com"
    if kind == "ip":
        # RFC 5737 and RFC 3849: addresses that belong to nobody.
        return f"2001:db8::{number + 1:x}" if ":" in value else f"192.0.2.{number % 254 + 1}"
    return f"<{kind.upper()}>"


# --- finders ---

_EMAIL = re.compile(
    r"(?<![\w.%+-])[\w.%+-]{1,64}@(?:[^\W_](?:[\w-]{0,61}[^\W_])?\.){1,8}[^\W\d_][\w-]{0,30}[^\W\d_](?![\w@-])"
)
_EXAMPLE = re.compile(
    r"(?:[\w-]+\.)*example\.(?:com|org|net|edu)|(?:[\w-]+\.)*(?:example|invalid|test|localhost)", re.I
)
_IPV4 = re.compile(r"(?<![\w.])(?:\d{1,3}\.){3}\d{1,3}(?!\.?\w)")
_IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9A-Fa-f]{0,4}:){2,7}(?:[0-9A-Fa-f]{1,4}|(?:\d{1,3}\.){3}\d{1,3})?(?![\w:]|\.\w)"
)
_PHONE = re.compile(
    r"(?<![\w+.])(?:\+[1-9]\d{0,2}(?:[ .\-]?\(?\d{1,4}\)?){2,6}"  # E.164, grouped
    r"|\(\d{3}\) ?\d{3}[-. ]\d{4}|\d{3}-\d{3}-\d{4}"  # North America
    r"|\(\d{2}\) ?9?\d{4}-\d{4})(?![\w-]|\.\d)"  # Brazil
)
_CPF = re.compile(r"(?<![\w.-])\d{3}\.\d{3}\.\d{3}-\d{2}(?![\w.-]*\d)")
_CNPJ = re.compile(r"(?<![\w./-])\d{2}\.\d{3}\.\d{3}/\d{4}-\d{2}(?![\w-])")
_SSN = re.compile(r"(?<![\w-])(?!000|666|9)\d{3}-(?!00)\d{2}-(?!0000)\d{4}(?![\w-])")
_CARD = re.compile(r"(?<![\w.-])[3-6]\d{3}[ -]?\d{4,6}[ -]?\d{4,5}(?:[ -]?\d{4})?(?![\w-]|\.\d)")
_ISSUERS = re.compile(
    r"4\d{12}(?:\d{3})?|5[1-5]\d{14}|2[2-7]\d{14}|3[47]\d{13}|6(?:011|5\d\d)\d{12}|3(?:0[0-5]|[68]\d)\d{11}"
)
_SECRET = re.compile(
    r"-----BEGIN (?:[A-Z]{1,12} ){0,2}PRIVATE KEY-----[A-Za-z0-9+/=\s:,\-]{16,8192}?-----END (?:[A-Z]{1,12} ){0,2}PRIVATE KEY-----"
    r"|(?<!\w)(?:AKIA|ASIA)[0-9A-Z]{16}(?!\w)"  # AWS
    r"|(?<!\w)gh[pousr]_[A-Za-z0-9]{36}(?!\w)|(?<!\w)github_pat_\w{82}(?!\w)"
    r"|(?<!\w)glpat-[\w-]{20}(?![\w-])|(?<!\w)xox[abprs]-[A-Za-z0-9-]{20,100}(?![\w-])"  # GitLab, Slack
    r"|(?<!\w)sk_live_[A-Za-z0-9]{24,99}(?!\w)|(?<!\w)AIza[\w-]{35}(?![\w-])"  # Stripe, Google
    r"|(?<!\w)hf_[A-Za-z]{34}(?!\w)|(?<!\w)sk-(?:proj-|ant-)?[\w-]{32,200}(?![\w-])"
)
_SECRET_STARTS = ("-----BEGIN ", "AKIA", "ASIA", "ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_", "glpat-",
                  "xox", "sk_live_", "AIza", "hf_", "sk-")  # fmt: skip


_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")  # no other IPv6 address has ever been given to anybody
Finder = Callable[[str], Iterator[Span]]


def _finder(
    kind: Kind, pattern: re.Pattern[str], anchor: str, before: str, valid: Callable[[str], bool]
) -> Finder:
    """Matches of a pattern, tried only where an anchor is: literals are looked for many times faster.

    Args:
        anchor: expression that begins with a literal or a few characters, found in every match.
        before: characters that a match may hold before its first anchor.
        valid: what else a match must be.
    """
    starts, lead = re.compile(anchor), re.compile(before)

    def find(text: str) -> Iterator[Span]:
        for hit in starts.finditer(text):
            start = hit.start()
            least = max(0, start - _LONGEST_LEAD)
            while start > least and lead.match(text, start - 1):
                start -= 1
            match = pattern.match(text, start)
            if match and valid(match[0]):
                yield Span(kind, *match.span())

    return find


def _chain(*finders: Finder) -> Finder:
    return lambda text: (span for find in finders for span in find(text))


def _secrets(text: str) -> Iterator[Span]:
    for literal in _SECRET_STARTS:
        start = text.find(literal)
        while start >= 0:
            if match := _SECRET.match(text, start):
                yield Span("secret", *match.span())
            start = text.find(literal, start + 1)


def _is_anybodys(address: str) -> bool:
    return not _EXAMPLE.fullmatch(address.rpartition("@")[2])


def _is_public(value: str) -> bool:
    """Private, loopback, documentation and other reserved addresses stay."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:  # 999.1.1.1, 108.0.0.01
        return False
    return address.is_global and (address.version == 4 or address in _GLOBAL_UNICAST)


def _digits(value: str) -> str:
    return "".join(c for c in value if c.isdecimal() and c.isascii())


def _is_phone(value: str) -> bool:
    return 8 <= len(_digits(value)) <= 15


def _is_card(value: str) -> bool:
    digits = _digits(value)
    return bool(_ISSUERS.fullmatch(digits)) and luhn(digits)


def luhn(digits: str) -> bool:
    """Whether the last digit is the check digit of the others (ISO/IEC 7812-1)."""
    doubled = [sum(divmod(2 * int(d), 10)) for d in digits[-2::-2]]
    return (sum(doubled) + sum(map(int, digits[-1::-2]))) % 10 == 0


def _check_digits(value: str, weights: tuple[tuple[int, ...], tuple[int, ...]]) -> bool:
    """The two last digits modulo 11, as Receita Federal defines them; all digits equal is no number."""
    digits = [int(d) for d in _digits(value)]
    if len(digits) != len(weights[1]) + 1 or len(set(digits)) == 1:
        return False
    for factors in weights:
        rest = sum(f * d for f, d in zip(factors, digits, strict=False)) % 11
        if digits[len(factors)] != (0 if rest < 2 else 11 - rest):
            return False
    return True


_CPF_WEIGHTS = (tuple(range(10, 1, -1)), tuple(range(11, 1, -1)))
_CNPJ_WEIGHTS = ((5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2), (6, 5, 4, 3, 2, 9, 8, 7, 6, 5, 4, 3, 2))
_FINDERS: Mapping[Kind, Finder] = {
    "email": _finder("email", _EMAIL, "@", r"[\w.%+-]", _is_anybodys),
    "ip": _chain(
        _finder("ip", _IPV4, r"\.\d{1,3}\.", r"\d", _is_public),
        _finder("ip", _IPV6, r":[0-9A-Fa-f]{0,4}:", r"[0-9A-Fa-f]", _is_public),
    ),
    "phone": _chain(
        _finder("phone", _PHONE, r"\+[1-9]", r"(?!)", _is_phone),
        _finder("phone", _PHONE, r"\(\d", r"(?!)", _is_phone),
        _finder("phone", _PHONE, r"-\d{3}-\d{4}", r"\d", _is_phone),
    ),
    "cpf": _finder("cpf", _CPF, r"\.\d{3}\.", r"\d", lambda value: _check_digits(value, _CPF_WEIGHTS)),
    "cnpj": _finder("cnpj", _CNPJ, r"/\d{4}-", r"[\d.]", lambda value: _check_digits(value, _CNPJ_WEIGHTS)),
    "ssn": _finder("ssn", _SSN, r"-\d{2}-\d{4}", r"\d", lambda value: True),
    "card": _finder("card", _CARD, r"[3-6]\d{3}(?=[ -]?\d{4})", r"\d", _is_card),
    "secret": _secrets,
}
