"""What a reply says of stored prompt segments."""

from enum import StrEnum


class CacheMiss(StrEnum):
    """Why no stored segment, or not a longer run of them, was used."""

    NONE_STORED = "none_stored"
    PREFIX_DIFFERS = "prefix_differs"
    DISABLED = "disabled"
    EVICTED = "evicted"
    IDENTITY_DIFFERS = "identity_differs"
    DAMAGED = "damaged"
    IO_ERROR = "io_error"


class CacheTier(StrEnum):
    """Where the cached tokens of a prompt were."""

    NONE = "none"
    DEVICE = "device"
    FILE = "file"
