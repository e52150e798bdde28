"""GGUF files from a model hub: which files are meant, and fetching them whole.

What the hub says of a file (its size and SHA-256) is checked after the download, which goes on
where an earlier one stopped.
"""

import hashlib
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import httpx2
from huggingface_hub import HfApi, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from tqdm import tqdm  # type: ignore[import-untyped]  # the package has no types

from ragflash.errors import AccessDenied, NotFound, SettingInvalid, StorageError, UpstreamError

# When nobody says which: the first of these that a repository has.
PREFERRED = ("Q4_K_M", "Q4_K_S", "Q4_1", "Q4_0", "Q5_K_M", "Q8_0")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$", re.IGNORECASE)
_NO_MODEL = ("mmproj", "mtp-", "imatrix")

_T = TypeVar("_T")
Report = Callable[[str, int, int], None]  # file name, bytes so far, bytes in all


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository as the hub describes it; `sha256` is `None` where it does not say."""

    name: str
    num_bytes: int
    sha256: str | None


def parse_reference(reference: str) -> tuple[str, str | None]:
    """Split `OWNER/REPO[:QUANT]`; raises `SettingInvalid` for anything else."""
    repo, _, quant = reference.partition(":")
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise SettingInvalid(f"{reference!r} is no OWNER/REPO or OWNER/REPO:QUANT")
    return repo, quant or None


def pull(reference: str, folder: Path, *, report: Report, endpoint: str | None = None) -> Path:
    """Fetch a model; return its file, or the first of its parts.

    Args:
        reference: `OWNER/REPO[:QUANT]`, the quant in any case, such as `q4_k_m`.
        folder: Models are kept in `OWNER/REPO` below it.
        report: Told of every file's progress.
        endpoint: Address of the hub; `None` is the public one, or `HF_ENDPOINT`.

    Raises:
        SettingInvalid: The reference is not one.
        NotFound: No such repository, or nothing in it that is meant; the text lists what there is.
        AccessDenied: The repository wants a token or consent.
        UpstreamError: The hub cannot be reached, or what came is not what it promised.
        StorageError: The folder refused.
    """
    repo, quant = parse_reference(reference)
    files = choose(list_files(repo, endpoint=endpoint), quant, repo)
    target = folder / repo
    try:
        target.mkdir(parents=True, exist_ok=True)
        paths = [_fetch(repo, file, target, report, endpoint) for file in files]
    except OSError as error:
        raise StorageError(f"{target} cannot be written: {error.strerror or error}") from error
    return paths[0]


def list_files(repo: str, *, endpoint: str | None = None) -> list[HubFile]:
    """Ask the hub what a repository holds; see `pull` for errors."""
    info = _asking(repo, lambda: HfApi(endpoint=endpoint).model_info(repo, files_metadata=True))
    return [
        HubFile(entry.rfilename, entry.size or 0, entry.lfs.sha256 if entry.lfs else None)
        for entry in info.siblings or ()
    ]


def choose(files: Iterable[HubFile], quant: str | None, repo: str) -> list[HubFile]:
    """Pick the files of one model: a whole file, or all its parts in order.

    Raises:
        NotFound: None or several are meant, or parts are missing.
    """
    models: dict[str, list[HubFile]] = {}
    for file in files:
        name = file.name.rpartition("/")[2]
        if name.lower().endswith(".gguf") and not name.lower().startswith(_NO_MODEL):
            models.setdefault(_PART.sub(".gguf", file.name), []).append(file)
    if not models:
        raise NotFound(f"{repo} has no GGUF model files")
    wanted = [quant] if quant else PREFERRED
    for name in wanted:
        found = [parts for whole, parts in sorted(models.items()) if _is_of(whole, name)]
        if len(found) == 1:
            return _whole(found[0])
        if found:
            break
    if quant is None and len(models) == 1:
        return _whole(next(iter(models.values())))
    listed = ", ".join(sorted(models))
    raise NotFound(f"{repo}:{quant or ''} does not name one of its models: {listed}")


def _is_of(name: str, quant: str) -> bool:
    pattern = rf"(?<![a-z0-9]){re.escape(quant.lower())}(?![a-z0-9_])"
    return re.search(pattern, name.lower()) is not None


def _whole(parts: Sequence[HubFile]) -> list[HubFile]:
    ordered = sorted(parts, key=lambda file: file.name)
    match = _PART.search(ordered[0].name)
    if match and len(ordered) != int(match[2]):
        raise NotFound(f"the hub has {len(ordered)} of {match[2]} parts of {ordered[0].name}")
    return ordered


def _fetch(repo: str, file: HubFile, target: Path, report: Report, endpoint: str | None) -> Path:
    path = Path(
        _asking(
            repo,
            lambda: hf_hub_download(
                repo,
                file.name,
                local_dir=target,
                endpoint=endpoint,
                tqdm_class=_reporting(file, report),
            ),
        )
    )
    if file.sha256 is not None and _sha256(path, file, report) != file.sha256:
        path.unlink()
        raise UpstreamError(
            f"{file.name} arrived damaged (its SHA-256 is not {file.sha256}) and was removed: "
            "pull it again"
        )
    return path


def _sha256(path: Path, file: HubFile, report: Report) -> str:
    digest, done = hashlib.sha256(), 0
    with path.open("rb") as stream:
        while block := stream.read(1 << 24):
            digest.update(block)
            done += len(block)
            report(f"checking {file.name}", done, file.num_bytes)
    return digest.hexdigest()


def _reporting(file: HubFile, report: Report) -> type[tqdm]:
    """Make a progress bar that draws nothing and tells `report`."""

    class Reporting(tqdm):  # type: ignore[misc]  # as above
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args, **{**options, "disable": False, "file": _Nowhere()})

        def update(self, n: float | None = 1) -> None:
            super().update(n)
            report(file.name, int(self.n), file.num_bytes)

    return Reporting


class _Nowhere:
    def write(self, text: str) -> int:
        return len(text)

    def flush(self) -> None:
        pass


def _asking(repo: str, ask: Callable[[], _T]) -> _T:
    """Call the hub, and say in our words what went wrong."""
    try:
        return ask()
    except GatedRepoError as error:
        raise AccessDenied(
            f"{repo} wants consent: accept its terms on the hub, then set HF_TOKEN to a token of "
            "that account"
        ) from error
    except RepositoryNotFoundError as error:
        raise NotFound(
            f"the hub knows no {repo}, or it is private: check the name, or set HF_TOKEN"
        ) from error
    except HFValidationError as error:
        raise SettingInvalid(f"{repo!r} is no name of a repository") from error
    except ValueError as error:  # such as a file name that leads out of the folder
        raise UpstreamError(f"what the hub says of {repo} cannot be used: {error}") from error
    except OfflineModeIsEnabled as error:
        raise UpstreamError(
            "HF_HUB_OFFLINE is set, so nothing was asked of the hub: unset it, or copy the file "
            "here yourself and set RAGFLASH_MODEL"
        ) from error
    except (HfHubHTTPError, LocalEntryNotFoundError, httpx2.HTTPError) as error:
        raise UpstreamError(_unreachable(error)) from error


def _unreachable(error: Exception) -> str:
    reason = str(error).splitlines()[0] if str(error) else type(error).__name__
    return (
        f"the hub cannot be reached ({reason}): try again, which goes on where it stopped, or copy "
        "the file here yourself and set RAGFLASH_MODEL"
    )
