"""What kind of thing a question asks for, and whether a text holds one.

"How many …" wants a number, "in which year …" a date, "who …" somebody. A quote without one cannot
be
the answer, however well its words match. English questions only; others ask for anything.
"""

import re
from enum import StrEnum


class AnswerType(StrEnum):
    """Kind of answer that a question calls for."""

    NUMBER = "number"
    DATE = "date"
    PERSON = "person"
    ANY = "any"


_ASKS = {
    AnswerType.DATE: re.compile(
        r"\b(?:what|which) (?:year|date|day|month)\b|^when (?:was|did|were)\b", re.IGNORECASE
    ),
    AnswerType.NUMBER: re.compile(
        r"\bhow (?:many|much|long|often|large|big|high|old|few|fast|far|deep|small)\b"
        r"|\b(?:what|which) (?:number|percentage|share|size|amount|port)\b"
        r"|\b(?:maximum|minimum|at most|at least|largest|biggest|smallest)\b"
        r"|\bdefault (?:size|value|number|timeout|port)\b",
        re.IGNORECASE,
    ),
    AnswerType.PERSON: re.compile(r"^who(?:se|m)?\b", re.IGNORECASE),
}
_NUMBER_WORD = re.compile(
    r"\b(?:one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|once|twice|dozen|hundred"
    r"|thousand|million|half|single|double|daily|weekly|monthly|yearly|hourly|first|second|third"
    r"|no|never|always|every)\b",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"\b(?:1[89]|20)\d\d\b|\b(?:(?i:january|february|march|april|june|july|august|september|october"
    r"|november|december)|May|MAY)\b"  # not the verb
)
_TWO_WORDS = re.compile(r"\b(?=([^\W\d_])([^\W\d_]+) ([^\W\d_]))")
_SOMEBODY = re.compile(
    r"\b(?:maintainers?|developers?|teams?|leaders?|secretary|authors?"
    r"|committee|users?|administrators?|owners?|persons?|people|they|you|we|by the)\b"
)
_DIGITS = re.compile(r"\d+")


def expected(question: str) -> AnswerType:
    """Tell what a question asks for."""
    stripped = question.strip()
    for kind, pattern in _ASKS.items():
        if pattern.search(stripped):
            return kind
    return AnswerType.ANY


def holds(kind: AnswerType, text: str, question: str) -> bool:
    """Whether a text has something of the kind asked for; numbers of the question do not count."""
    match kind:
        case AnswerType.NUMBER:
            known = set(_DIGITS.findall(question))
            fresh = any(number not in known for number in _DIGITS.findall(text))
            return fresh or _NUMBER_WORD.search(text) is not None
        case AnswerType.DATE:
            return _DATE.search(text) is not None
        case AnswerType.PERSON:
            return _SOMEBODY.search(text) is not None or _holds_full_name(text)
        case AnswerType.ANY:
            return True


def _holds_full_name(text: str) -> bool:
    """Whether a capitalised word is followed by a capital."""
    pairs = _TWO_WORDS.findall(text)
    return any(a.isupper() and rest.islower() and b.isupper() for a, rest, b in pairs)
