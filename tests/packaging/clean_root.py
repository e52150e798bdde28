"""A clean Debian in a folder, where the steps of a Dockerfile run without a container engine.

Every command runs by `chroot` in mount and process namespaces of its own, so that nothing stays
mounted and nothing keeps running. How packages are reached (pip's configuration, certificates) is
lent by the host for the time of a build step and is no part of the root.
"""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.packaging.dockerfile import Dockerfile, Step

MIRROR = "http://deb.debian.org/debian"
BUILD_S = 3600.0  # one step; the packages are some gigabytes
_BARE = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
_NETWORK = ("/etc/resolv.conf", "/etc/hosts")
_HOST = "/host"  # where the host's files and folders are seen
_DROP_RIGHTS = (
    *("setpriv", "--reuid=10001", "--regid=10001", "--clear-groups"),
    *("--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"),
)


def missing() -> str | None:
    """Say why there can be no root on this machine."""
    if os.geteuid() != 0:
        return "needs root"
    for tool in ("debootstrap", "unshare"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], check=False).returncode:
        return "namespaces are not permitted"
    return None


class CleanRoot:
    """The folder; `base` is an image name such as `debian:bookworm-slim`."""

    def __init__(self, path: Path, base: str) -> None:
        self.path = path
        name, _, tag = base.partition(":")
        assert name == "debian", f"no clean root can be made for {base}"
        suite = tag.removesuffix("-slim")
        _checked(["debootstrap", "--variant=minbase", suite, str(path), MIRROR])

    def run(self, step: Step, context: Path) -> None:
        """Do one step of a build, as root."""
        folder = self.path / step.folder.lstrip("/")
        folder.mkdir(parents=True, exist_ok=True)
        for source in step.sources:
            _copy(context / source, folder / step.target)
        if step.command:
            pip, paths = _pip_of_host()
            script = f"cd {shlex.quote(step.folder)} && {step.command}"
            argv = ["chroot", str(self.path), "/bin/sh", "-c", script]
            mounts = self._basic_mounts()
            mounts += [line for path in _NETWORK for line in self._loan(path, path)]
            mounts += [line for path in paths for line in self._loan(path, _HOST + path)]
            _checked(_in_namespaces(mounts, argv), environment=_BARE | pip | step.environment)

    def start(
        self,
        argv: tuple[str, ...],
        image: Dockerfile,
        *,
        volume: Path,
        environment: dict[str, str],
        log: IO[bytes],
    ) -> subprocess.Popen[bytes]:
        """Start a program as the user without rights, on a root that cannot be written to."""
        root = shlex.quote(str(self.path))
        mounts = [
            f"mount --bind {root} {root}",
            f"mount -o remount,bind,ro {root}",
            *self._basic_mounts(),
            f"mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmpfs {root}/tmp",
            f"mount --bind {shlex.quote(str(volume))} {root}/data",
        ]
        script = f"cd {shlex.quote(image.folder)} && exec {shlex.join((*_DROP_RIGHTS, *argv))}"
        return subprocess.Popen(
            _in_namespaces(mounts, ["chroot", str(self.path), "/bin/sh", "-c", script]),
            env=_BARE | image.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )

    def _basic_mounts(self) -> list[str]:
        root = shlex.quote(str(self.path))
        return [f"mount -t proc proc {root}/proc", f"mount --rbind /dev {root}/dev"]

    def _loan(self, path: str, target: str) -> list[str]:
        """Show a file or folder of the host, for reading."""
        inside = self.path / target.lstrip("/")
        if Path(path).is_dir():
            inside.mkdir(parents=True, exist_ok=True)
        else:
            inside.parent.mkdir(parents=True, exist_ok=True)
            inside.touch()
        here, there = shlex.quote(path), shlex.quote(str(inside))
        return [f"mount --bind {here} {there}", f"mount -o remount,bind,ro {there}"]


def stop(started: subprocess.Popen[bytes], timeout_s: float) -> int:
    """End a program as an engine does, by SIGTERM to the first process in its namespace."""
    children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    os.kill(int(children), signal.SIGTERM)
    return started.wait(timeout_s)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
        shutil.copytree(source, target, ignore=ignored)
    else:
        shutil.copy(source, target)


def _in_namespaces(mounts: list[str], argv: list[str]) -> list[str]:
    script = " && ".join([*mounts, f"exec {shlex.join(argv)}"])
    return ["unshare", "--mount", "--pid", "--fork", "--kill-child", "/bin/sh", "-c", script]


def _pip_of_host() -> tuple[dict[str, str], list[str]]:
    """How pip is set here, as variables for the root, and which files and folders that names."""
    told = _checked([sys.executable, "-m", "pip", "config", "list"])
    variables: dict[str, str] = {}
    paths: list[str] = []
    for line in told.splitlines():
        name, _, value = line.partition("=")
        words = shlex.split(value)[0].split()
        for at, word in enumerate(words):
            path = word.removeprefix("file://")
            if Path(path).is_absolute() and Path(path).exists():
                words[at] = word.replace(path, _HOST + path)
                paths.append(path.rstrip("/").removesuffix("/simple"))  # an index has files beside
        key = name.rpartition(".")[2].strip("'").replace("-", "_").upper()
        variables.setdefault(f"PIP_{key}", " ".join(words))  # the environment comes first
    return variables, list(dict.fromkeys(paths))


def _checked(argv: list[str], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=BUILD_S, check=False
    )
    assert done.returncode == 0, f"{shlex.join(argv)}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
