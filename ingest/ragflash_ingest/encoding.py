"""Bytes of a text file to characters: marks, then UTF-8 and UTF-16, then a guess that can say no.

Legacy encodings are told apart by what their text would be: letters of one alphabet, the common
ones more often than the rare ones. A wrong guess would be worse than none, since it would be
searched and quoted; so where nothing reads like a language the file is refused.
"""

import codecs
import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from ragflash_ingest.document import FailureReason, ParseError

_SAMPLE_BYTES = 64 * 1024
_LEAST_SCORE = 0.57  # letters drawn at random from an alphabet score 0.5

# The longer mark first: UTF-32's begins with UTF-16's.
_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)

# Latin alphabets: the letters beyond ASCII. A text must keep to one of them.
_LATIN = (
    (
        "cp1252",
        "äöüß àâæçèéêëîïôœùûüÿ áéíñóúü ãáàâçéêíóôõúü àèéìíîòóùú æøåé åäöé ëïéèöüó áðéíóúýþæö",
    ),
    ("cp1250", "ąćęłńóśźż áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž áéíóöőúüű čćđšž ăâîşţ"),
    ("iso8859-2", "ąćęłńóśźż áčďéěíňóřšťúůýž áäčďéíĺľňóôŕšťúýž áéíóöőúüű čćđšž ăâîşţ"),
    ("cp1254", "çğıöşüâîİ"),
    ("cp1257", "ąčęėįšųūž āčēģīķļņšūž äõöüšž"),
    ("cp850", "äöüß àâæçèéêëîïôùûüÿ áéíñóúü"),
)
# Other alphabets, by frequency.
_ALPHABETS = (
    ("cp1251", "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"),
    ("cp1251", "оаинвеіртсклудмпязьбгйчхцжїюєшщфґ"),
    ("koi8-r", "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"),
    ("cp866", "оеаинтсрвлкмдпуяыьгзбчйхжшюцщэфъё"),
    ("cp1253", "αοιετσνηυρπκμλςίόωάγδέήχθύφώβξζψϊϋΐΰ"),
    ("iso8859-7", "αοιετσνηυρπκμλςίόωάγδέήχθύφώβξζψϊϋΐΰ"),
    ("cp1255", "יוהלאמרתבשנדחקעםפצטןגכסזךףץ"),
    ("cp1256", "اليمنوتربةعدسفهكقأحجشصطخىإذغضزءثئظؤآ"),
    ("cp874", "านรกเงอมยลวดตทสับี่้ปคหะิแจพชไขใ์ุูโึืผถซษณศธภฉฐญฎฏฒฬฮฆฌฑ็ำ๊๋ๆฯฝฟ"),
)
_SIGNS = frozenset("“”‘’„‚«»‹›–—…•·€£¥§¶°ºª©®™¹²³½¼¾µ†‡±×÷¿¡‰№\u00a0\u00ad¬")
_INSIDE_WORDS = frozenset("’‘·\u00ad")
_MANY_BYTES = re.compile(rb"[^\x00-\x7f]")


@dataclass(frozen=True, slots=True)
class Decoded:
    """Characters of a file, without its mark, and the encoding that gave them."""

    text: str
    encoding: str
    warnings: tuple[str, ...] = ()


def decode(data: bytes, *, declared: str | None = None) -> Decoded:
    """Decode a whole text file.

    Args:
        data: The file.
        declared: An encoding that the file names itself; believed where it fits and the bytes
            are not UTF-8.

    Raises:
        ParseError: `encoding_unknown`.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            text = _strict(data[len(mark) :], encoding)
            if text is None:
                detail = f"the file's mark says {encoding} but its bytes are not"
                raise ParseError(FailureReason.ENCODING_UNKNOWN, detail)
            return Decoded(text, encoding)
    wide = utf16_without_mark(data)
    if wide is not None:
        return Decoded(data.decode(wide), wide, (f"no mark: read as {wide} by its pattern",))
    if b"\x1b$" in data and (text := _strict(data, "iso2022_jp")) is not None:
        return Decoded(text, "iso2022_jp")
    if (text := _strict(data, "utf-8")) is not None:
        return Decoded(text, "utf-8")
    if declared and (text := _strict(data, declared)) is not None:
        return Decoded(text, codecs.lookup(declared).name)
    return _damaged_utf8(data) or _guess(data)


def has_mark(data: bytes) -> bool:
    """Whether the data begins with a byte-order mark."""
    return data.startswith(tuple(mark for mark, _ in _MARKS))


def utf16_without_mark(data: bytes) -> str | None:
    """UTF-16 variant whose high bytes show as NULs on one side, if the data has that pattern."""
    sample = data[: _SAMPLE_BYTES & ~1]
    if len(data) % 2 or b"\0" not in sample:
        return None
    half = len(sample) // 2
    even, odd = sample[::2].count(0) / half, sample[1::2].count(0) / half
    encoding = "utf-16-le" if odd > even else "utf-16-be"
    if max(even, odd) < 0.3 or min(even, odd) > 0.02 or _strict(data, encoding) is None:
        return None
    return encoding


def _strict(data: bytes, encoding: str) -> str | None:
    try:
        return data.decode(encoding)
    except (ValueError, LookupError):  # of the bytes, or of the encoding's name
        return None


def _damaged_utf8(data: bytes) -> Decoded | None:
    """UTF-8 with a few foreign bytes, which are then read as Windows-1252."""
    text = data.decode("utf-8", "surrogateescape")
    bad = sum("\udc80" <= char <= "\udcff" for char in text)
    good = sum(char > "\x7f" for char in text) - bad
    if good < 10 * bad:
        return None
    mended = re.sub(
        "[\udc80-\udcff]",
        lambda match: bytes([ord(match.group()) - 0xDC00]).decode("cp1252", "replace"),
        text,
    )
    return Decoded(mended, "utf-8", (f"{bad} bytes are not UTF-8 and were read as Windows-1252",))


def _guess(data: bytes) -> Decoded:
    sample = _sample(data)
    best: tuple[float, str] = (0.0, "")
    for encoding, score in _CANDIDATES:
        text = _strict(sample, encoding)
        if text is not None and (found := score(text)) > best[0]:
            best = (found, encoding)
    text = _strict(data, best[1]) if best[0] >= _LEAST_SCORE else None
    if text is None:
        detail = "the text is in no encoding that could be recognised; save it as UTF-8"
        raise ParseError(FailureReason.ENCODING_UNKNOWN, detail)
    return Decoded(text, best[1], (f"the encoding was guessed: {best[1]}",))


def _sample(data: bytes) -> bytes:
    """Whole lines that hold more than ASCII, up to a bound."""
    lines: list[bytes] = []
    length = 0
    for line in data.split(b"\n"):
        if _MANY_BYTES.search(line):
            lines.append(line)
            length += len(line)
            if length >= _SAMPLE_BYTES:
                break
    return b"\n".join(lines)


def _latin(alphabets: str) -> Callable[[str], float]:
    sets = [frozenset(letters + letters.upper()) for letters in alphabets.split()]

    def score(text: str) -> float:
        letters = {char for char in text if char > "\x7f" and char.isalpha()}
        accented = sum(char in letters for char in text)
        plain = sum(char.isalpha() for char in text) - accented
        fits = any(letters <= alphabet for alphabet in sets)
        return 0.7 if fits and accented <= plain and _signs_fit(text) else 0.0

    return score


def _alphabet(letters: str) -> Callable[[str], float]:
    ranks = {char: 1 - rank / len(letters) for rank, char in enumerate(letters)}

    def score(text: str) -> float:
        foreign = [char.lower() for char in text if char > "\x7f" and _is_letter(char)]
        marks = [ranks[char] for char in foreign if char in ranks]
        if len(marks) < max(0.97 * len(foreign), 1) or not _signs_fit(text):
            return 0.0
        odd = sum(_clash(left, right) for left, right in pairwise(text))
        return (sum(marks) - odd) / len(foreign)

    return score


def _clash(left: str, right: str) -> bool:
    """Whether two neighbours hardly stand in one word: two scripts, or "aB"."""
    if not (_is_letter(left) and _is_letter(right)):
        return False
    return (left <= "\x7f") != (right <= "\x7f") or (left.islower() and right.isupper())


def _signs_fit(text: str) -> bool:
    """Whether what is not a letter is a known sign, and no sign stands inside a word."""
    for at, char in enumerate(text):
        if char <= "\x7f" or _is_letter(char):
            continue
        if char not in _SIGNS:
            return False
        inside = text[at - 1 : at].isalpha() and text[at + 1 : at + 2].isalpha()
        if inside and char not in _INSIDE_WORDS:
            return False
    return True


def _is_letter(char: str) -> bool:
    return unicodedata.category(char)[0] in "LM"


def _ideographs(
    legacy: str, first: int, last: int, script: str = "", least: float = 0.2
) -> Callable[[str], float]:
    """Score by the share of characters in the rows of a standard that hold the common ones.

    Args:
        legacy: Codec of the standard.
        first: Lead byte of the first of those rows.
        last: Lead byte of the last one.
        script: A character class that belongs to the language.
        least: The share of the text that must be of it. Without a script, the text must hold
            neither kana nor hangul.
    """
    own = re.compile(f"[{script}]") if script else None

    def score(text: str) -> float:
        foreign = [char for char in text if char > "\x7f"]
        common = sum(first <= char.encode(legacy, "replace")[0] <= last for char in foreign)
        signs = len(_WIDE_SIGNS.findall(text))
        kana, hangul = len(_KANA.findall(text)), len(_HANGUL.findall(text))
        if own is None:
            return 0.0 if kana or hangul else (common + signs) / max(len(foreign), 1)
        if len(own.findall(text)) < least * len(foreign):
            return 0.0
        return (common + signs + kana) / max(len(foreign), 1)

    return score


_WIDE_SIGNS = re.compile("[\u3000-\u3020\uff01-\uff5e“”‘’…—·]")
_KANA = re.compile("[\u3041-\u30ff]")
_HANGUL = re.compile("[\uac00-\ud7a3]")
# Of equal scores the first wins.
_CANDIDATES: tuple[tuple[str, Callable[[str], float]], ...] = (
    ("cp932", _ideographs("euc_jp", 0xB0, 0xCF, "\u3041-\u30ff", 0.05)),
    ("euc_jp", _ideographs("euc_jp", 0xB0, 0xCF, "\u3041-\u30ff")),
    ("cp949", _ideographs("euc_kr", 0xB0, 0xC8, "\uac00-\ud7a3")),
    ("gb18030", _ideographs("gb2312", 0xB0, 0xD7)),
    ("big5", _ideographs("big5", 0xA4, 0xC6)),
    *((encoding, _latin(alphabets)) for encoding, alphabets in _LATIN),
    *((encoding, _alphabet(letters)) for encoding, letters in _ALPHABETS),
)
