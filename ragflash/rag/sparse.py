"""Words as sparse vectors, by one function for documents and questions in every script.

Text is folded (NFKC, case, accents, width), then cut into terms: words and their stems, words
made of parts both whole and split, pairs of neighbouring characters for scripts without spaces
and each ideograph, and codes such as `E4304` however they are spaced. Of a document's long nouns
the beginnings and ends are terms as well (`Paketverwaltung` in `Paketverwaltungssystem`). A term is
a 32-bit hash. A chunk's vector holds
the saturated term frequencies of BM25 (Robertson and Zaragoza, "The Probabilistic Relevance
Framework: BM25 and Beyond", 2009); a question's holds inverse document frequencies, so that their
dot product is the BM25 score.
"""

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from ragflash.rag.language import DIGITS, IDEOGRAPH
from ragflash.rag.stems import stem

K1 = 1.2
B = 0.75
AVERAGE_TERMS = 240.0  # of a chunk of about 1,100 characters; a constant keeps vectors comparable
DERIVED_WEIGHT = 0.5  # of a stem or a part, beside the word as written
PAIR_LENGTH = 0.25  # of a pair or an ideograph, in words: a chunk has some 900 of them

# Han with iteration marks, kana, bopomofo, Hangul: characters follow each other without spaces,
# or (Hangul) carry endings that no space sets apart. Then Thai, Lao, Khmer, Myanmar.
_IDEOGRAPHS = "\u3005-\u3007\u3041-\u3096\u3099\u309a\u30a1-\u30fa\u30fc-\u30fe\u3105-\u312f"
_IDEOGRAPHS += "\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_HANGUL = "\u1100-\u11ff\uac00-\ud7a3"
_SOUTH_EAST = "\u0e01-\u0e3a\u0e40-\u0e4e\u0e80-\u0edf\u1780-\u17d3\u1000-\u109f"
_PAIRED = f"{_IDEOGRAPHS}{_HANGUL}{_SOUTH_EAST}"
# Indic vowel signs and viramas are marks, not letters, yet part of a word.
_SIGNS = "\u0900-\u0903\u093a-\u094f\u0962\u0963\u0980-\u0983\u09bc-\u09cd\u0a01-\u0a4d"
_SIGNS += "\u0a81-\u0acd\u0b01-\u0b4d\u0b82-\u0bcd\u0c00-\u0c4d\u0c80-\u0ccd\u0d00-\u0d4d"
_HIRAGANA_PAIR = re.compile(r"[\u3041-\u3096\u3099\u309a]+")
_LETTER = rf"(?:(?![{_PAIRED}])[^\W_]|[{_SIGNS}])"
_JOINT = r"(?:[-./:@+'\u2019\u2010\u2011\u200c]|_+|(?<=\d),(?=\d{3}(?!\d)))"
_TOKEN = re.compile(
    rf"(?P<ideographs>[{_IDEOGRAPHS}]+)|(?P<hangul>[{_HANGUL}]+)|(?P<paired>[{_SOUTH_EAST}]+)"
    rf"|(?P<word>{_LETTER}+(?:{_JOINT}{_LETTER}+)*)"
)
_PART = re.compile(  # digits, other scripts, and camelCase at its humps
    rf"\d+|(?:[^\W\d_a-zA-Z]|[{_SIGNS}])+|[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[A-Z]+"
)
_BETWEEN_JOINTS = re.compile(_JOINT)
_UNWRITTEN_JOINT = re.compile(r"['\u2019\u200c,]|(?<!\d)[-\u2010\u2011]|[-\u2010\u2011](?!\d)")
_NAME = re.compile(r"\d|[a-z][A-Z]|[_./:@]")  # a digit, camelCase, a joint that prose has not
_LONE_LETTER = re.compile(r"[a-z]")
_CODE_LETTERS = re.compile(r"[A-Z]{1,5}|[b-hj-z]")  # not "a 12", "in 2024"
_CODE_DIGITS = re.compile(r"\d[\d.-]*\d")

# Accents, vowel points and marks that are left out when people type a question: combining
# diacritics, Hebrew points, Arabic vowels and the stretching line; soft hyphens and marks of
# direction. Marks of kana and of Indic scripts make other letters and stay.
_DROPPED = re.compile(
    "(?:(?<![aouAOU])\u0308|[\u0300-\u0307\u0309-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640"
    "\u064b-\u065f\u0670\u06d6-\u06ed\u00ad\u061c\u200d-\u200f\u202a-\u202e\u2060-\u2069\ufeff])+"
)
# An umlaut is typed as its letter or with an e, ß as ss (which folding case does).
_UMLAUTS = str.maketrans("äöüÄÖÜ", "aouAOU")
_SPELT_OUT = str.maketrans(dict(zip("äöüÄÖÜ", ("ae", "oe", "ue", "Ae", "Oe", "Ue"), strict=True)))
# Nouns of German are written as one word, with a capital.
_LONG_NOUN = re.compile(r"[A-Z][a-z]{11,}")
_SHORTEST_PART = 4
# Letters that decomposition does not unite: dotless i, Persian and Arabic keyboard variants.
_SAME_LETTER = str.maketrans(
    {"ı": "i", "ø": "o", "Ø": "O", "ł": "l", "Ł": "L", "đ": "d", "Đ": "D"}
    | {"\u0649": "\u064a", "\u06cc": "\u064a", "\u06a9": "\u0643", "\u0671": "\u0627"}
    | dict.fromkeys("\u0629\u06be\u06c1\u06d5", "\u0647")
    | {chr(code): digit for code, digit in DIGITS.items()}
)

# English words that say nothing about a document; left out of questions only.
_STOP_TEXT = """
a an and any are as at be been by can could did do does for from had has have how i if in into is it
its me my of on or our should so than that the their them then there these they this those to us was
we were what when where which who whom whose why will with would you your
"""
_STOP_WORDS = frozenset(_STOP_TEXT.split())
_STOPPED = _STOP_WORDS | {stem(word) for word in _STOP_WORDS}


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a text.

    Attributes:
        text: Folded; its hash is `id`.
        weight: 1 for what is written, `DERIVED_WEIGHT` for a stem or a part.
        identifier: A code or name that people expect to find exactly as it is.
        length: What it adds to the length of a text, in words.
        sought: Whether a question that holds it looks for it; the many parts that a noun might
            have are found, not sought.
    """

    text: str
    weight: float = 1.0
    identifier: bool = False
    length: float = 1.0
    sought: bool = True

    @property
    def id(self) -> int:
        """32-bit term id, the same in every process."""
        return _term_id(self.text)


def analyse(text: str) -> list[Term]:
    """Cut a text into terms, with repetitions, in order."""
    found: list[Term] = []
    previous: re.Match[str] | None = None
    folded = _fold(text)
    for match in _TOKEN.finditer(folded):
        token = match.group()
        if match.lastgroup != "word":
            found.extend(_pair_terms(token))
        elif code := _spaced_code(previous, match, folded):
            if len(found[-1].text) == 1:
                found.pop()
            found.extend(code)
        else:
            found.extend(_word_terms(token))
        previous = match
    return found


def document_vector(text: str) -> dict[int, float]:
    """Saturated term frequencies of a chunk, by term id; empty for a text without words."""
    terms = analyse(text)
    norm = K1 * (1 - B + B * sum(term.length for term in terms) / AVERAGE_TERMS)
    counts = Counter(term.id for term in terms)
    return {term: count * (K1 + 1) / (count + norm) for term, count in counts.items()}


def query_weights(text: str) -> dict[int, float]:
    """Terms of a question with their weights before document frequencies; stop words left out.

    A question of stop words alone keeps them.
    """
    terms = [term for term in analyse(text) if term.sought]
    content = [term for term in terms if term.text not in _STOPPED] or terms
    weights: dict[int, float] = {}
    for term in content:
        weights[term.id] = max(term.weight, weights.get(term.id, 0.0))
    return weights


def query_identifiers(text: str) -> frozenset[str]:
    """Codes, numbers and compound names that a question asks for, folded."""
    return frozenset(term.text for term in analyse(text) if term.identifier and term.weight == 1.0)


def document_identifiers(text: str) -> frozenset[str]:
    """Codes, numbers and compound names that a text holds as written, folded."""
    return frozenset(term.text for term in analyse(text) if term.identifier)


def inverse_frequencies(frequencies: Mapping[int, int], total: int) -> dict[int, float]:
    """Inverse document frequency by term, always positive.

    `frequencies` says in how many of `total` chunks each term occurs.
    """
    return {
        term: math.log1p((max(total - count, 0) + 0.5) / (count + 0.5))
        for term, count in frequencies.items()
    }


def _fold(text: str) -> str:
    """Everything but case, which still tells where camelCase is cut, and umlauts."""
    if text.isascii():
        return text
    decomposed = unicodedata.normalize("NFKD", text)
    folded = _DROPPED.sub("", decomposed).translate(_SAME_LETTER)
    return unicodedata.normalize("NFC", folded)


@lru_cache(maxsize=1 << 16)
def _term_id(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=4).digest(), "little")


@lru_cache(maxsize=1 << 16)
def _word_terms(token: str) -> tuple[Term, ...]:
    """Terms of one word: as written, its parts when it has several, and the stem of each.

    A lone Latin letter is no part: the `E` of one error code is in all others.
    """
    plain = token.translate(_UMLAUTS)
    whole = _UNWRITTEN_JOINT.sub("", plain).casefold()
    pieces = _BETWEEN_JOINTS.split(plain.replace(",", ""))
    parts = [part for piece in pieces for part in _PART.findall(piece)]
    shorter = [word.casefold() for word in (*parts, *pieces)] if len(parts) > 1 else [whole]
    if plain != token:
        shorter.append(_UNWRITTEN_JOINT.sub("", token).translate(_SPELT_OUT).casefold())
    derived = dict.fromkeys([*shorter, *map(stem, shorter)])
    derived = {text: None for text in derived if text != whole and not _LONE_LETTER.fullmatch(text)}
    named = Term(whole, identifier=_NAME.search(token) is not None)
    found = [named, *(Term(text, DERIVED_WEIGHT) for text in derived)]
    return (*found, *(part for piece in pieces for part in _noun_parts(piece)))


def _noun_parts(word: str) -> list[Term]:
    """Beginnings and ends of a noun that may be made of several; no dictionary tells where."""
    if not _LONG_NOUN.fullmatch(word):
        return []
    noun = word.casefold()
    cuts = range(_SHORTEST_PART, len(noun) - _SHORTEST_PART + 1)
    texts = dict.fromkeys(part for at in cuts for part in (noun[:at], noun[at:]))
    return [Term(text, DERIVED_WEIGHT, length=0.0, sought=False) for text in texts]


@lru_cache(maxsize=1 << 16)
def _pair_terms(run: str) -> tuple[Term, ...]:
    """Neighbouring characters in pairs, and ideographs alone: words of one, roots of verbs.

    A pair of hiragana is mostly grammar and weighs half.
    """
    if len(run) == 1:
        return (Term(run, length=PAIR_LENGTH),)
    pairs = [run[at : at + 2] for at in range(len(run) - 1)]
    return (
        *(Term(pair, _pair_weight(pair), length=PAIR_LENGTH) for pair in pairs),
        *(Term(one, DERIVED_WEIGHT, length=PAIR_LENGTH) for one in run if IDEOGRAPH.fullmatch(one)),
    )


def _pair_weight(pair: str) -> float:
    return DERIVED_WEIGHT if _HIRAGANA_PAIR.fullmatch(pair) else 1.0


def _spaced_code(
    previous: re.Match[str] | None, match: re.Match[str], text: str
) -> tuple[Term, ...]:
    """Terms of the digits of a code written with a space, `E 4304`; empty when it is none.

    The letters before the digits have been given already.
    """
    if previous is None or previous.end() + 1 != match.start() or text[previous.end()] != " ":
        return ()
    letters, digits = previous.group(), match.group()
    if not _CODE_LETTERS.fullmatch(letters) or not _CODE_DIGITS.fullmatch(digits):
        return ()
    code = Term(f"{letters}{digits}".casefold(), identifier=True)
    return (code, Term(digits, DERIVED_WEIGHT, identifier=True))
