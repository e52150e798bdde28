"""Reads the instructions that our Dockerfile uses, and no others."""

import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

_IGNORED = frozenset({"EXPOSE", "VOLUME"})
_OPTION = re.compile(r"--[\w-]+=\S+")


@dataclass(frozen=True)
class Step:
    """A RUN (`command`) or a COPY (`sources` to `target`), with what was set before it."""

    environment: dict[str, str]
    folder: str
    command: str = ""
    sources: tuple[str, ...] = ()
    target: str = ""


@dataclass
class Dockerfile:
    base: str = ""
    environment: dict[str, str] = field(default_factory=dict)
    folder: str = "/"
    user: str = "root"
    entrypoint: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    healthcheck: tuple[str, ...] = ()
    steps: list[Step] = field(default_factory=list)

    def take(self, name: str, rest: str) -> None:
        match name:
            case "FROM":
                assert not self.base, "one stage is understood"
                self.base = rest
            case "ENV":
                self.environment |= dict(pair.split("=", 1) for pair in shlex.split(rest))
            case "WORKDIR":
                self.folder = rest
            case "USER":
                self.user = rest
            case "RUN":
                self.steps.append(Step(dict(self.environment), self.folder, command=rest))
            case "COPY":
                *sources, target = rest.split()
                step = Step(
                    dict(self.environment), self.folder, sources=tuple(sources), target=target
                )
                self.steps.append(step)
            case "HEALTHCHECK":
                self.healthcheck = _exec_form(_OPTION.sub("", rest).strip().removeprefix("CMD"))
            case "ENTRYPOINT":
                self.entrypoint = _exec_form(rest)
            case "CMD":
                self.arguments = _exec_form(rest)
            case _:
                assert name in _IGNORED, f"{name} is not understood"


def _exec_form(text: str) -> tuple[str, ...]:
    words = json.loads(text)
    assert all(isinstance(word, str) for word in words)
    return tuple(words)


def read(path: Path) -> Dockerfile:
    """Read a file; comment lines may stand between the lines of an instruction."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    found = Dockerfile()
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            found.take(name, rest.strip())
    return found
