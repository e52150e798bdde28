"""Scripts, and whether a text is English, in which alone answers are judged by their kind."""

import re

# Decimal digits of Arabic, Persian and Devanagari, to those that codes and numbers are compared in.
DIGITS = {zero + digit: str(digit) for zero in (0x660, 0x6F0, 0x966) for digit in range(10)}
IDEOGRAPH = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]")

# No other language has these words; `will`, `can`, `are` and `must` are words elsewhere too.
_ASKING = re.compile(
    r"(?<![\w-])(?:what|which|who|whom|whose|when|where|why|how|does|did|the)(?![\w-])"
    r"|^\s*(?:is|are|can|could|may|must|should|do|has|have)(?=\s)",
    re.IGNORECASE,
)
_FREQUENT = re.compile(
    r"\b(?:the|of|and|to|a|an|in|is|are|be|for|it|that|this|or|with|by|not|on|as|if|you)\b",
    re.IGNORECASE,
)
_ENOUGH_WORDS = 8
_LETTER = re.compile(r"[^\W\d_]")
_LATIN_LETTER = re.compile(r"[a-zA-Z\u00aa-\u024f\u1e00-\u1eff\uff21-\uff3a\uff41-\uff5a]")
_AMID_OTHERS = 0.8  # at most that share of Latin letters in a text of another script


def asks_in_english(question: str) -> bool:
    """Whether a question has a word that only English asks with."""
    return _ASKING.search(question) is not None and not is_in_other_script(question)


def reads_as_english(text: str) -> bool:
    """Whether a text may be English: of Latin letters, and not long without a frequent word."""
    if is_in_other_script(text):
        return False
    return len(text.split()) < _ENOUGH_WORDS or _FREQUENT.search(text) is not None


def is_in_other_script(text: str) -> bool:
    """Whether a text is of another script than Latin, names and commands amid it aside."""
    letters = _LETTER.findall(text)
    latin = sum(_LATIN_LETTER.match(letter) is not None for letter in letters)
    return latin <= _AMID_OTHERS * len(letters) if letters else False
