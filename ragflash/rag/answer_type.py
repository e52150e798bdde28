"""What kind of thing a question asks for, and whether a text holds one.

"How many days …" wants a number of days, "how often …" a frequency, "in which year …" a date,
"who …" somebody. A quote without one cannot be the answer, however well its words match. English
questions only; others ask for anything.
"""

import re
from dataclasses import dataclass
from enum import StrEnum

from ragflash.rag.language import asks_in_english, is_in_other_script
from ragflash.rag.sparse import document_vector

_SPELT = """
    one two three four five six seven eight nine ten eleven twelve fifteen twenty thirty forty fifty
    sixty ninety hundred thousand million billion dozen half single both no none zero
"""
_NUMBER = re.compile(rf"\d[\d.,]*|\b(?:{'|'.join(_SPELT.split())})\b", re.IGNORECASE)
# Numbers that count nothing: of headings, sections, pages and versions.
_REFERENCE = re.compile(
    r"^\s*\d+(?:\.\d+)+\.?(?=\s)|\b(?:section|chapter|appendix|figure|table|page|version|release|step|bug)"
    r" #?[\d.]+",
    re.IGNORECASE,
)
_WORD = re.compile(r"[\w%$€£]+")
# A unit stands at most that many words behind its number: "five of the principal authors".
_REACH_WORDS = 4

_TIME = "second minute hour day week month year decade millisecond microsecond moment ms"
_SIZE = "byte bit kb mb gb tb kib mib gib kilobyte megabyte gigabyte page block pixel inch cm mm"
_LENGTH = "character letter word line column byte token inch cm mm metre meter km page"
_MONEY = "dollar euro pound cent usd eur $ € £"
_SIGNS = frozenset("$€£")
_PEOPLE = (
    "people person member developer user attendee participant author subscriber voter maintainer"
)
_FAMILIES = tuple(
    frozenset(names.split()) for names in (_TIME, _SIZE, _LENGTH, _MONEY, _PEOPLE, "percent % pct")
)
_OFTEN = re.compile(
    r"\b(?:once|twice|thrice|daily|weekly|monthly|yearly|annually|hourly|nightly|every|each|per"
    r"|times?|never|always)\b",
    re.IGNORECASE,
)
_BOUND = re.compile(
    r"\b(?:at (?:most|least)|up to|no (?:more|less|fewer)|not (?:exceed|more)|exceed\w*|maxim\w+"
    r"|minim\w+|limit\w*|under|below|above|over|than|only|between|restricted|until|unlimited|from"
    r"|largest|smallest|shorter|longer|default\w*|should|must|current\w*)\b",
    re.IGNORECASE,
)
_DATE = re.compile(
    r"\b(?:1[89]|20)\d\d\b|\b(?:(?i:january|february|march|april|june|july|august|september|october"
    r"|november|december)|May|MAY)\b"  # not the verb
)
_CAPITAL, _SMALL = "[A-ZÀ-ÖØ-Þ]", "[a-zß-öø-ÿ]"
_SOMEBODY = re.compile(
    rf"\b{_CAPITAL}{_SMALL}+ {_CAPITAL}"
    r"|\b(?:maintainers?|developers?|teams?|leaders?|secretary|authors?"
    r"|committee|users?|administrators?|owners?|members?)\b"
)


_BECAUSE = re.compile(
    r"\b(?:because|since|due to|so|in order to|reasons?|as a result|therefore|thus|otherwise"
    r"|to (?:avoid|prevent|allow|make|ensure|enable|help|reduce|keep)|for \w+ reasons?"
    r"|as (?:it|they|this|there)|would|might|may|did not|does not|cannot|lack\w*|problems?)\b",
    re.IGNORECASE,
)
# Names, codes and numbers, other than the word that begins a sentence.
_NAME = re.compile(r"(?<![.!?]\s)(?<!^)\b[A-Z][\w-]*|\b\w*[_/]\w[\w/]*|\b[A-Z]{2,}\b|\b\w*\d\w*")
# In other languages a capital says little: codes there, and ASCII words amid another script.
_CODE = re.compile(r"\b(?:[a-z]*[_0-9]\w+|[A-Z]{2,})\b", re.ASCII)
_ASCII_WORD = re.compile(r"\w\w+(?:[-./]\w+)*", re.ASCII)
_LATIN = (
    r"0-9a-z_\u00aa-\u024f"  # what may continue a word of ASCII; others are written close to it
)


class AnswerType(StrEnum):
    """Kind of answer that a question calls for."""

    COUNT = "count"
    DURATION = "duration"
    AMOUNT = "amount"
    FREQUENCY = "frequency"
    BOUND = "bound"
    PORT = "port"
    DATE = "date"
    PERSON = "person"
    REASON = "reason"
    ANY = "any"


_ASKS = {
    AnswerType.DATE: r"\b(?:what|which) (?:year|date|day|month)\b|^when (?:was|did|were)\b",
    AnswerType.FREQUENCY: r"\bhow (?:often|frequently|many times)\b",
    AnswerType.COUNT: r"\bhow (?:many|few)\b|\b(?:what|which|how many) percent\w*\b",
    AnswerType.DURATION: r"\bhow (?:long|old|much time)\b",
    AnswerType.AMOUNT: r"\bhow (?:much|large|big|high|fast|far|deep|small|tall|wide|heavy)\b",
    AnswerType.BOUND: r"\b(?:maximum|minimum|at most|at least|largest|biggest|smallest|highest"
    r"|lowest|longest|shortest)\b|\b(?:what|which) (?:number|share|size|amount)\b"
    r"|\bdefault (?:size|value|number|timeout)\b",
    AnswerType.PORT: r"\bwhich port\b|\bwhat port\b|\bport number\b",
    AnswerType.PERSON: r"^who(?:se|m)?\b",
    AnswerType.REASON: r"^why\b|\bwhat (?:is|was) the (?:cause|reason)\b",
}
_PATTERNS = {kind: re.compile(pattern, re.IGNORECASE) for kind, pattern in _ASKS.items()}
# What a text must hold beside, or instead of, a number.
_MARKS = {
    AnswerType.DATE: _DATE,
    AnswerType.PERSON: _SOMEBODY,
    AnswerType.FREQUENCY: _OFTEN,
    AnswerType.REASON: _BECAUSE,
}
_WITHOUT_NUMBER = frozenset(AnswerType) - {
    AnswerType.COUNT,
    AnswerType.DURATION,
    AnswerType.AMOUNT,
    AnswerType.BOUND,
    AnswerType.PORT,
}
_COUNTED = re.compile(r"\bhow (?:many|few) (?P<words>(?:[\w-]+ ?){1,4})", re.IGNORECASE)
_NOT_COUNTED_WORDS = """
    do does did can could may might must should will would is are was were have has had of the a in
    on at to for per there i you we they different other more new
"""
_NOT_COUNTED = frozenset(_NOT_COUNTED_WORDS.split())


@dataclass(frozen=True, slots=True)
class Asked:
    """What a question asks for.

    Attributes:
        units: For a number: words that say of what, one family or the counted noun.
        is_bounded: It wants a limit: the text must speak of one.
        known: Numbers that the question itself names.
    """

    kind: AnswerType
    units: frozenset[str] = frozenset()
    is_bounded: bool = False
    known: frozenset[str] = frozenset()


def expected(question: str) -> Asked:
    """Tell what a question asks for."""
    stripped = question.strip()
    if not asks_in_english(stripped):
        return Asked(AnswerType.ANY)
    known = frozenset(re.findall(r"\d+", stripped))
    for kind, pattern in _PATTERNS.items():
        if pattern.search(stripped):
            is_bounded = _PATTERNS[AnswerType.BOUND].search(stripped) is not None
            return Asked(kind, _units(kind, stripped), is_bounded, known)
    return Asked(AnswerType.ANY)


def names(text: str) -> frozenset[str]:
    """List the names, codes and numbers of a question, in lower case.

    In other languages than English those that a capital does not tell: codes and abbreviations,
    and in another script than Latin every word of two ASCII letters or more.
    """
    if asks_in_english(text):
        return frozenset(name.lower() for name in _NAME.findall(text.strip()) if name != "I")
    pattern = _ASCII_WORD if is_in_other_script(text) else _CODE
    return frozenset(name.lower() for name in pattern.findall(text))


def holds_words(text: str, words: frozenset[str]) -> bool:
    """Whether a text, in lower case, holds each of the words whole."""
    return all(_whole(word).search(text) for word in words)


def _whole(word: str) -> re.Pattern[str]:
    letters = _LATIN if word.isascii() else r"\w"
    return re.compile(rf"(?<![{letters}]){re.escape(word)}(?![{letters}])")


def holds(asked: Asked, text: str) -> bool:
    """Whether an English text has something of the kind asked for."""
    if asked.is_bounded and _BOUND.search(text) is None:
        return False
    pattern = _MARKS.get(asked.kind)
    if pattern is not None and pattern.search(text) is None:
        return False
    if asked.kind in _WITHOUT_NUMBER:
        return True
    return any(_fits(asked.units, following) for following in _after_numbers(asked, text))


def _units(kind: AnswerType, question: str) -> frozenset[str]:
    if kind is AnswerType.DURATION:
        return frozenset(f"{_TIME} {_LENGTH}".split())
    if kind is AnswerType.AMOUNT:
        return frozenset(f"{_TIME} {_SIZE} {_LENGTH} {_MONEY} percent %".split())
    if kind is not AnswerType.COUNT:
        return frozenset()
    counted = _COUNTED.search(question)
    words = counted["words"].lower().split() if counted else ["percent"]
    nouns = []
    for word in words:
        if word in _NOT_COUNTED:
            break
        nouns.append(_singular(word))
    for family in _FAMILIES:
        if family & set(nouns):
            return family
    return frozenset(nouns)


def _after_numbers(asked: Asked, text: str) -> list[list[str]]:
    """List the words behind each number that the question does not name, and a sign before it."""
    found = []
    text = _REFERENCE.sub(lambda match: " " * len(match.group()), text)
    for match in _NUMBER.finditer(text):
        number = match.group().rstrip(".,")
        if number not in asked.known:
            following = _WORD.findall(text[match.end() : match.end() + 60])
            words = [_singular(word) for word in following[:_REACH_WORDS]]
            sign = text[max(match.start() - 1, 0) : match.start()]
            found.append([sign, *words] if sign in _SIGNS else words)
    return found


def _fits(units: frozenset[str], following: list[str]) -> bool:
    if not units:
        return True
    if units & set(following):
        return True
    wanted = {term for unit in units for term in document_vector(unit)}
    return any(wanted & document_vector(word).keys() for word in following)


def _singular(word: str) -> str:
    word = word.lower()
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
