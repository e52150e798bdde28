"""Real documents and questions about them, for the demo and the built-in evaluation.

`questions.jsonl` holds one question a line: `document`, `question`, `answerable`, `pages` (1-based
PDF pages that hold the answer; text and HTML have one page) and `quote` (the passage that answers).
Where the documents come from and under which licences they are passed on is in `LICENSES.md`.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ragflash.errors import NotFound

__all__ = ["SAMPLES", "Sample", "sample_path"]

QUESTIONS_NAME = "questions.jsonl"


@dataclass(frozen=True)
class Sample:
    """A document in this package; `licence` is an SPDX expression or `public-domain`."""

    name: str
    sha256: str
    media_type: str
    licence: str


SAMPLES = (
    Sample(
        name="bug-reporting.txt",
        sha256="704c8115aee0242e8c4f2f417508bb35f210a655db5d2e89ce31e31cf90be956",
        media_type="text/plain",
        licence="GPL-3.0-or-later",
    ),
    Sample(
        name="debian-policy.pdf",
        sha256="220f9366d6deb3984e84236f02f04bdd6275d6fe7b5587acd6c689dfeb99020f",
        media_type="application/pdf",
        licence="GPL-2.0-or-later",
    ),
    Sample(
        name="sqlite-wal.html",
        sha256="6de416a73b7754fd7a752ec04913eb6423d15b387fe6995f6a78bd148657f36f",
        media_type="text/html",
        licence="public-domain",
    ),
)


def sample_path(name: str) -> Path:
    """Return where a sample document, or `questions.jsonl`, lies on disk.

    Raises:
        NotFound: No sample has this name.
    """
    known = [*(sample.name for sample in SAMPLES), QUESTIONS_NAME]
    if name not in known:
        raise NotFound(f"there is no sample {name!r}; choose from {', '.join(known)}")
    return Path(str(resources.files(__name__).joinpath(name)))
