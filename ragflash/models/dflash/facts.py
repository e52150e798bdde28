"""Values that a drafter's file must give: a refusal names all that are missing at once."""

from typing import TypeVar

from ragflash.errors import DrafterIncomplete

_Value = TypeVar("_Value")


class Facts:
    """Notes which values are missing.

    Args:
        file_name: For the refusal.
    """

    def __init__(self, file_name: str) -> None:
        self._file_name = file_name
        self._missing: list[str] = []

    def need(self, value: _Value | None, name: str, stand_in: _Value) -> _Value:
        """Return the value; note that it is missing, and return what stands in until `close`."""
        if value is None:
            self._missing.append(name)
            return stand_in
        return value

    def close(self) -> None:
        """Raise `DrafterIncomplete` when a value was missing."""
        if self._missing:
            raise DrafterIncomplete(
                f"{self._file_name} does not say {', '.join(self._missing)}; a guess would draft "
                "badly and never fail, so use a file that says it",
                missing=tuple(self._missing),
            )
