"""What reading Word files and presentations has in common."""

from collections.abc import Iterator
from contextlib import contextmanager

from ragflash_ingest.archive import Archive
from ragflash_ingest.document import FailureReason, ParseError

_CARELESS = (LookupError, AttributeError, TypeError, ValueError, SyntaxError)


@contextmanager
def opening(kind: str, *errors: type[Exception]) -> Iterator[None]:
    """Turn what office libraries raise about damaged packages into a reason.

    They look things up in the file without checking (KeyError, AttributeError and kin), and
    lxml's errors are SyntaxErrors.

    Args:
        kind: What the file is called.
        errors: The library's own errors.

    Raises:
        ParseError: `corrupt`.
    """
    caught: tuple[type[Exception], ...] = (*_CARELESS, *errors)
    try:
        yield
    except caught as error:
        detail = f"the {kind} is damaged: {type(error).__name__}: {error}"
        raise ParseError(FailureReason.CORRUPT, detail[:300]) from error


def embedded_warning(archive: Archive) -> tuple[str, ...]:
    """The sentence about files inside the file, if there are any."""
    count = len(archive.embedded())
    return (f"{count} embedded files were left out",) if count else ()
