"""Real documents and questions about them, for the demo and the built-in evaluation.

`questions.jsonl` holds one question a line: `document`, `question`, `answerable`, `pages` (1-based
PDF pages that hold the answer; text and HTML have one page) and `quote` (the passage that answers).
The folder `languages` is a second set, with the `language` of each question and its document.
Where the documents come from and under which licences they are passed on is in `LICENSES.md`.
"""

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from ragflash.errors import NotFound

__all__ = ["LANGUAGES", "LANGUAGE_SAMPLES", "QUESTIONS_NAME", "SAMPLES", "Sample", "sample_path"]

QUESTIONS_NAME = "questions.jsonl"
LANGUAGES = "languages"


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

LANGUAGE_SAMPLES = (
    Sample(
        name=f"{LANGUAGES}/de-package-basics.html",
        sha256="2fa8e1d1dc6beded878098a50f0f9f514926a4949b56bd1155c35b36b8e2889c",
        media_type="text/html",
        licence="LicenseRef-Debian-FAQ",
    ),
    Sample(
        name=f"{LANGUAGES}/de-up-to-date.html",
        sha256="a6fd8c1db2bd46f1a4a56a4ee2f9aee67ab3be8e051b498dd5b2b5e2c1635add",
        media_type="text/html",
        licence="LicenseRef-Debian-FAQ",
    ),
    Sample(
        name=f"{LANGUAGES}/fa-kernel.html",
        sha256="ca71011ffcf6df718afba7002fee373ad2fa40475d931d99b438e11f47408177",
        media_type="text/html",
        licence="GPL-2.0-or-later",
    ),
    Sample(
        name=f"{LANGUAGES}/fa-user-space.html",
        sha256="19fb335f666d11442ef126817e756f8e94f2a61fa8f29b9290150d433d23a2a9",
        media_type="text/html",
        licence="GPL-2.0-or-later",
    ),
    Sample(
        name=f"{LANGUAGES}/ja-ptex-manual.pdf",
        sha256="efdd271f076bdc8c8f85703a9853bc4950c19033e1956dce1e3db8a065b303ae",
        media_type="application/pdf",
        licence="BSD-3-Clause",
    ),
    Sample(
        name=f"{LANGUAGES}/ja-user-space.html",
        sha256="9b87a521653a3cba41a4f35c0dc554dd41e76176e96f9b9b552bcbe2bb8f0272",
        media_type="text/html",
        licence="GPL-2.0-or-later",
    ),
    Sample(
        name=f"{LANGUAGES}/zh-choosing.html",
        sha256="0da759b045e11e061085b8e031cfc5e90f8b20b4e8d57a55b9b1b0fd0ccf9994",
        media_type="text/html",
        licence="LicenseRef-Debian-FAQ",
    ),
    Sample(
        name=f"{LANGUAGES}/zh-package-basics.html",
        sha256="4abe731f2c07dabeb6833d5643380bc9f64bbb6328ee7b38bd4b5a5bd203ff40",
        media_type="text/html",
        licence="LicenseRef-Debian-FAQ",
    ),
)


def sample_path(name: str) -> Path:
    """Return where a sample document, or a set's `questions.jsonl`, lies on disk.

    Raises:
        NotFound: No sample has this name.
    """
    known = [sample.name for sample in (*SAMPLES, *LANGUAGE_SAMPLES)]
    known += [QUESTIONS_NAME, f"{LANGUAGES}/{QUESTIONS_NAME}"]
    if name not in known:
        raise NotFound(f"there is no sample {name!r}; choose from {', '.join(known)}")
    return Path(str(resources.files(__name__).joinpath(name)))
