"""A request for captures: a file in ``requests/`` of the run's folder, which goes when it is taken.

What becomes of it is in the manifests of its captures, or in a file with the reason why there are none.
Whoever may write the folder may ask, so a request is of bounded size and a fixed schema, without paths.
"""

from __future__ import annotations

import os
import stat
import uuid
from pathlib import Path
from typing import Annotated

import msgspec

from verl_profiling.aim import Aim
from verl_profiling.manifest import Ns
from verl_profiling.remote import RemoteFolder, is_url

__all__ = [
    "MOST_STEPS",
    "REFUSED",
    "REQUEST",
    "REQUESTS",
    "Demand",
    "LocalFolder",
    "folder_at",
    "new_request_id",
]

REQUESTS = "requests"
"""Name of the folder."""
REQUEST, REFUSED = ".json", ".refused"
"""Suffixes of a request, and of the reason why it is refused; the name before them is the request's id."""
MOST_STEPS = 100
"""How many steps one request may ask for."""
_MOST_BYTES = 1 << 24


class Demand(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A request for captures.

    Attributes:
        id: Made up by whoever asks; also the name of its file.
        by: Who asks, e.g. ``root@node1``.
        asked_ns: When, by their clock.
        steps: How many consecutive steps.
        at: The first of them; ``None`` for the next one that begins.
        aim: What the captures do differently from the settings.
    """

    id: Annotated[str, msgspec.Meta(pattern=r"\A[0-9a-f]{12}\Z")]
    by: Annotated[str, msgspec.Meta(max_length=200)] = ""
    asked_ns: Ns = 0
    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 1
    at: Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)] | None = None
    aim: Aim = Aim()


def new_request_id() -> str:
    """Return an id that no other request has."""
    return uuid.uuid4().hex[:12]


class LocalFolder:
    """A folder of this host, with the methods of :class:`~verl_profiling.remote.RemoteFolder`.

    All of them raise ``OSError``; none follows a link.
    """

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self.path = path

    def child(self, name: str) -> LocalFolder:
        """Return a folder inside."""
        return LocalFolder(self.path / name)

    def names(self) -> set[str]:
        """Return the names of what is inside; nothing, if the folder does not exist."""
        try:
            return set(os.listdir(self.path))  # noqa: PTH208 (each step does it)
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """Return the content of a regular file, up to a bound."""
        descriptor = os.open(self._own(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise OSError(f"{self.url}/{name} is not a regular file")
            return os.read(descriptor, _MOST_BYTES)
        finally:
            os.close(descriptor)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether. One of several writers wins."""
        path, part = self._own(name), self._own(f".{name}.{uuid.uuid4().hex[:8]}.part")
        if not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
        try:
            part.write_bytes(data)
            os.link(part, path)
        except FileExistsError:
            return False
        except OSError:
            if not part.exists():
                raise
            return self._create_without_links(path, data)
        finally:
            part.unlink(missing_ok=True)
        return True

    @staticmethod
    def _create_without_links(path: Path, data: bytes) -> bool:
        try:
            with path.open("xb") as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._own(name).unlink()

    def _own(self, name: str) -> Path:
        if self.path.is_symlink():
            raise NotADirectoryError(20, "is a link", self.url)
        return self.path / name


def folder_at(place: str) -> LocalFolder | RemoteFolder:
    """Return a folder of this host, or the one behind a URL."""
    return RemoteFolder(place) if is_url(place) else LocalFolder(Path(place))
