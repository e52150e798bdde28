"""Light stemming: an ending is cut when enough of the word is left.

No dictionary and no guess of the language: the same endings go in a document and in a question,
and the word as written is kept beside its stem, so a cut too many only adds a weaker match.
Words arrive folded: lower case, no accents.
"""

# English, German and Turkish endings, and the Romance plural.
_LATIN = ("ings", "ing", "ler", "lar", "ers", "ern", "er", "ed", "en", "es", "em", "e", "s")
_LONG_ROOT = frozenset({"ler", "lar"})  # Turkish plurals: too many other words end so
# Russian noun and adjective endings, after accents are folded (й is и).
_CYRILLIC = (
    *("иями", "ыми", "ими", "ями", "ами", "иях", "его", "ого", "ему", "ому"),
    *("ах", "ях", "ая", "яя", "ое", "ее", "ые", "ие", "ыи", "ии", "ои", "еи", "ою", "ую", "юю"),
    *("ов", "ев", "ом", "ем", "ам", "ям", "ым", "им", "ых", "их", "ия", "ью"),
    *("а", "я", "о", "е", "ы", "и", "у", "ю", "ь"),
)
# Arabic article, also after the particles that are written together with it, and Persian mi-.
_ARABIC_BEFORE = ("وال", "بال", "كال", "فال", "نمي", "لل", "ال", "مي")
# Light stemming after Larkey, Ballesteros and Connell, "Improving stemming for Arabic information
# retrieval" (SIGIR 2002), and the Persian plural and comparative; letters are folded (ی is ي).
_ARABIC_AFTER = ("هايي", "هاي", "ترين", "ها", "تر", "ان", "ات", "ون", "ين", "يه", "ه", "ي")

_MIN_ROOT = 3
_MIN_LONG_ROOT = 4


def stem(word: str) -> str:
    """Return the word without its ending, or the word itself."""
    if word.isascii():
        return _latin(word)
    first = word[0]
    if "а" <= first <= "я":
        return _without_ending(word, _CYRILLIC)
    if "\u0621" <= first <= "\u06d3":
        return _arabic(word)
    return _latin(word) if first.isascii() else word


def _latin(word: str) -> str:
    if not word.isalpha():
        return word
    if word.endswith("ies") and len(word) > _MIN_ROOT + 2:
        return word[:-3] + "i"
    if word.endswith("y") and len(word) > _MIN_ROOT:
        return word[:-1] + "i"
    if word.endswith("ss"):
        return word
    root = _without_ending(word, _LATIN)
    doubled = len(root) > _MIN_ROOT and root[-1] == root[-2] and root[-1] not in "aeiouslz"
    return root[:-1] if doubled and root != word else root


def _arabic(word: str) -> str:
    for before in _ARABIC_BEFORE:
        if word.startswith(before) and len(word) - len(before) >= _MIN_ROOT:
            word = word[len(before) :]
            break
    return _without_ending(word, _ARABIC_AFTER)


def _without_ending(word: str, endings: tuple[str, ...]) -> str:
    for ending in endings:
        shortest = _MIN_LONG_ROOT if ending in _LONG_ROOT else _MIN_ROOT
        if word.endswith(ending) and len(word) - len(ending) >= shortest:
            return word[: -len(ending)]
    return word
