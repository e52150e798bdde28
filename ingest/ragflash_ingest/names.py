"""File names as labels: shown to people, never used to open anything."""

import re
import unicodedata

MAX_CHARS = 255

# Slashes that NFKC leaves alone but that look like one.
_SEPARATORS = re.compile(r"[/\\\u2044\u2215\u29f5\u29f8\ufe68\uff0f\uff3c]")
_DRIVE = re.compile(r"^[A-Za-z]:")
# Marks that reorder what is shown, so that "exe.txt" can be read as "txt.exe".
_REORDERING = re.compile(r"[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def safe_display_name(name: str) -> str:
    """Last component of an uploaded file's name, fit to be shown.

    Folders, drive letters, leading dots and surrounding blanks are dropped. Equal names stay
    equal: a name does not identify a document.

    Raises:
        ValueError: Nothing is left, or the name holds control characters, reordering marks or
            more than `MAX_CHARS` characters.
    """
    if any(unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"} for char in name):
        raise ValueError("the file name holds control characters")
    if _REORDERING.search(name):
        raise ValueError("the file name holds marks that change the direction of writing")
    last = _SEPARATORS.split(name)[-1]
    shown = unicodedata.normalize("NFC", _DRIVE.sub("", last)).strip().lstrip(".").strip()
    if not shown:
        raise ValueError("the file name is empty")
    if len(shown) > MAX_CHARS:
        raise ValueError(f"the file name is longer than {MAX_CHARS} characters")
    return shown
