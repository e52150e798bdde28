"""OLE compound files: the container of old office files and of encrypted new ones.

Only the names in the directory are looked at, which say what a file is
([MS-CFB] 2.6: entries of 128 bytes, the name first, in UTF-16).
"""

SIGNATURE = b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"

_ENTRY_BYTES = 128
_NAME_LENGTH_AT = 64


def holds(data: bytes, name: str) -> bool:
    """Whether the directory of a compound file has an entry of this name."""
    wanted = (name + "\0").encode("utf-16-le")
    at = data.find(wanted)
    while at >= 0:
        length = data[at + _NAME_LENGTH_AT : at + _NAME_LENGTH_AT + 2]
        if at % _ENTRY_BYTES == 0 and int.from_bytes(length, "little") == len(wanted):
            return True
        at = data.find(wanted, at + 1)
    return False
