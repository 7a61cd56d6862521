"""Reads and writes folders behind a URL with fsspec, which is imported only for URLs.

Each upload is verified by the size of the uploaded file.
"""

from __future__ import annotations

import re
import shutil
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.opener import SMALL_BYTES, remove_file
from verl_profiling.units import visible

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/run``."""
    return re.match(r"[A-Za-z][\w+.:-]*://", path) is not None


def check_url(url: str) -> None:
    """Check that there is a file system for a URL, without connecting.

    Raises:
        ToolUnavailableError: There is no file system for the URL; the message has the packages to
            install.
    """
    try:
        import fsspec
        import tenacity  # noqa: F401
    except ImportError:
        raise ToolUnavailableError(
            f"{visible(url)} is a URL, which needs fsspec and tenacity: pip install "
            "'verl-profiling[remote]'"
        ) from None
    protocol = url.partition("://")[0]
    if "::" in protocol:
        raise ToolUnavailableError(
            f"{visible(url)} is a chain of URLs; give the URL of the store itself"
        )
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ToolUnavailableError(f"{visible(url)}: {error}") from error


def copy_line(folder: Path, url: str) -> str:
    """Return the command that uploads the remaining files of a folder;
    a password in the URL is masked.
    """
    put = (
        f"fs, path = fsspec.url_to_fs('{visible(url)}'); fs.put('{folder}/', path, recursive=True)"
    )
    return f'python -c "import fsspec; {put}"'


_of_thread = threading.local()


def _file_system(url: str) -> AbstractFileSystem:
    """Return the file system of a URL for this thread, which is freed with the thread.

    fsspec's own cache is by thread as well, but keeps file systems and connections forever.
    """
    check_url(url)
    from fsspec.core import url_to_fs

    scheme, _, rest = url.partition("://")
    key = (scheme, rest.partition("/")[0])
    systems: dict[tuple[str, str], AbstractFileSystem] = _of_thread.__dict__.setdefault(
        "file_systems", {}
    )
    if key not in systems:
        systems[key], _ = url_to_fs(url, skip_instance_cache=True)
    return systems[key]


class RemoteFolder:
    """One folder behind a URL.

    The methods raise the exceptions of the file system, which may have any type.

    Args:
        url: URL of the folder.

    Raises:
        ToolUnavailableError: There is no file system for the URL.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs = _file_system(self.url)
        path: str = self._fs._strip_protocol(self.url)
        self._path = path.rstrip("/")

    def child(self, name: str) -> RemoteFolder:
        """Return the folder of this name inside the folder."""
        return RemoteFolder(f"{self.url}/{name}")

    def names(self) -> set[str]:
        """Return the names of what is inside; nothing, if the folder does not exist."""
        self._fs.invalidate_cache()
        try:
            paths = self._fs.ls(self._path, detail=False)
        except FileNotFoundError:
            return set()
        return {path.rstrip("/").rpartition("/")[2] for path in paths}

    def read(self, name: str) -> bytes:
        """Return the content of a small file; a larger one is cut off."""
        data: bytes = self._fs.cat_file(f"{self._path}/{name}", end=SMALL_BYTES)
        return data

    def files(self) -> dict[str, dict[str, object]]:
        """Return what the file system knows of each file below the folder, e.g. its size."""
        self._fs.invalidate_cache()
        found = self._fs.find(self._path, detail=True)
        return {path.removeprefix(f"{self._path}/"): facts for path, facts in found.items()}

    def get(self, name: str, local: Path) -> None:
        """Download a file."""
        local.parent.mkdir(parents=True, exist_ok=True)
        self._fs.get_file(f"{self._path}/{name}", str(local))

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether the file then has the content ``data``.

        In a store without exclusive creation, the file is read before and after; of two concurrent
        writers, at most one succeeds.
        """
        path = f"{self._path}/{name}"
        self._make_parents(path)
        try:
            self._fs.pipe_file(path, data, mode="create")
        except FileExistsError:
            return False
        except Exception:  # not supported: each file system says so in its own way
            self._fs.invalidate_cache()
            if self._fs.exists(path):
                return self.read(name) == data
            self._fs.pipe_file(path, data)
        self._fs.invalidate_cache()
        try:
            return self.read(name) == data
        except FileNotFoundError:  # a request whose job has taken it
            return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._fs.rm_file(f"{self._path}/{name}")

    def put(self, local: Path, name: str, retry_s: float) -> None:
        """Upload a file, or a folder with its content, with retries until the timeout.

        Raises:
            OSError: The uploaded file is smaller than the local one.
        """
        from tenacity import Retrying, stop_after_delay, wait_exponential

        retrying = Retrying(
            stop=stop_after_delay(retry_s), wait=wait_exponential(0.5, max=30), reraise=True
        )
        files = [local]
        if local.is_dir():
            files = list(filter(Path.is_file, sorted(local.rglob("*"))))
        for file in files:
            inside = "" if file is local else f"/{file.relative_to(local).as_posix()}"
            retrying(self._put_file, file, f"{self._path}/{name}{inside}")

    def _put_file(self, local: Path, path: str) -> None:
        size = local.stat().st_size
        try:
            self._fs.put_file(str(local), path)
        except FileNotFoundError:
            self._make_parents(path)
            self._fs.put_file(str(local), path)
        self._fs.invalidate_cache()
        arrived = self._fs.info(path).get("size")
        if arrived is not None and arrived < size:  # a log may have grown meanwhile
            raise OSError(f"{path} has {arrived} bytes after the upload, not {size}")

    def _make_parents(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """Uploads files into the remote step folder of a capture.

    Attributes:
        url: URL of the step folder.
        retry_s: Seconds for which a failed upload is retried.
    """

    url: str
    retry_s: float

    def move(self, path: Path, name: str, *, keep: bool = False) -> None:
        """Upload a file or folder, and remove the local one; the parent folder stays for other
        writers.

        Args:
            path: The file or folder.
            name: Its name in the remote folder.
            keep: Whether the local file or folder stays.

        Raises:
            Exception: The last exception of the file system.
        """
        RemoteFolder(self.url).put(path, name, self.retry_s)
        if keep:
            return
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(FileNotFoundError):
                remove_file(path)
