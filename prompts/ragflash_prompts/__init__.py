"""The texts that ragflash puts to a model, as Markdown files with `{{variables}}`.

A template is read from this package by name and filled in one pass: exactly its variables must be
given, and a value is never searched for variables itself, so document text cannot add any.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources

__all__ = ["Prompt", "PromptMissingError", "PromptVariableError", "load"]

_NAME = re.compile(r"[a-z][a-z0-9_]*")
_VARIABLE = re.compile(r"\{\{(" + _NAME.pattern + r")\}\}")


class PromptMissingError(LookupError):
    """No template has this name."""


class PromptVariableError(ValueError):
    """A variable is missing, unknown, or spelled in a way that a template does not allow."""


@dataclass(frozen=True)
class Prompt:
    """A template; `text` is as stored, without the newline at its end."""

    name: str
    text: str

    def __post_init__(self) -> None:
        rest = _VARIABLE.sub("", self.text)
        if "{{" in rest or "}}" in rest:
            raise PromptVariableError(f"prompt {self.name!r}: braces that hold no variable name")

    @property
    def variables(self) -> frozenset[str]:
        """Names that `render` needs."""
        return frozenset(_VARIABLE.findall(self.text))

    def render(self, **variables: str) -> str:
        """Return the text with every `{{name}}` replaced by the value given for it.

        Raises:
            PromptVariableError: The names given are not exactly `variables`.
        """
        missing = sorted(self.variables - variables.keys())
        unknown = sorted(variables.keys() - self.variables)
        if missing or unknown:
            raise PromptVariableError(
                f"prompt {self.name!r}: missing variables {missing}, unknown variables {unknown}"
            )
        return _VARIABLE.sub(lambda match: variables[match[1]], self.text)


@cache
def load(name: str) -> Prompt:
    """Return the template stored in `name`.md.

    Raises:
        PromptMissingError: There is no such file.
        PromptVariableError: The file has braces that hold no variable name.
    """
    source = resources.files(__name__).joinpath(f"{name}.md")
    if not _NAME.fullmatch(name) or not source.is_file():
        raise PromptMissingError(f"there is no prompt {name!r}")
    return Prompt(name=name, text=source.read_text(encoding="utf-8").removesuffix("\n"))
