"""What a reply says of stored prompt segments."""

from enum import StrEnum


class CacheMiss(StrEnum):
    """Why something of a prompt that is kept for later requests had to be computed.

    Of several segments the first one decides. Nothing is said of text that is never kept, such as
    a question.

    Members:
        NONE_STORED: Nothing at all is stored behind what was used: it is new, or was dropped.
        PREFIX_DIFFERS: What is stored there is other text.
        CLIENT_PREFIX: The template puts what the client brings before the document, so that what
            is stored for others does not fit.
        DISABLED: The request is not to use or leave anything.
        EVICTED: It was stored, and made room for something else.
        IDENTITY_DIFFERS: It is stored as another model, format or arithmetic computed it.
        DAMAGED: Its file is not sound.
        IO_ERROR: Its file could not be read.
    """

    NONE_STORED = "none_stored"
    PREFIX_DIFFERS = "prefix_differs"
    CLIENT_PREFIX = "client_prefix"
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
