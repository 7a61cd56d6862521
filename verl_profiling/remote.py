"""Folders behind a URL, through fsspec, which is imported only for one; what is put there is verified."""

from __future__ import annotations

import base64
import hashlib
import re
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiling.errors import ToolUnavailableError

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

__all__ = ["RemoteFolder", "check_url", "is_url", "put_again"]


def is_url(path: str) -> bool:
    """Return whether a path is a URL, such as ``s3://bucket/run``."""
    return re.match(r"[A-Za-z][\w+.:-]*://", path) is not None


def check_url(url: str) -> None:
    """Check that there is a file system for a URL; nothing is connected.

    Raises:
        ToolUnavailableError: There is none; the message says what to install.
    """
    try:
        import fsspec
    except ImportError:
        raise ToolUnavailableError(
            f"{url} is a URL, which needs fsspec: pip install 'verl-profiling[remote]'"
        ) from None
    protocol = url.partition("://")[0]
    if "::" in protocol:
        raise ToolUnavailableError(f"{url} is a chain of URLs; name the store itself")
    try:
        fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ToolUnavailableError(f"{url}: {error}") from error


def put_again(folder: Path, url: str) -> str:
    """Return the command that uploads what waits in a folder."""
    put = f"fs, path = fsspec.url_to_fs('{url}'); fs.put('{folder}/', path, recursive=True)"
    return f'python -c "import fsspec; {put}"'


_of_thread = threading.local()


def _file_system(url: str) -> AbstractFileSystem:
    """Return the file system of a URL for this thread, which goes when the thread does.

    fsspec's own cache is by thread as well, and keeps what it holds, with its connections, for good.
    """
    check_url(url)
    from fsspec.core import url_to_fs

    scheme, _, rest = url.partition("://")
    key = (scheme, rest.partition("/")[0])
    known: dict[tuple[str, str], AbstractFileSystem] = _of_thread.__dict__.setdefault("file_systems", {})
    if key not in known:
        known[key], _ = url_to_fs(url, skip_instance_cache=True)
    return known[key]


class RemoteFolder:
    """One folder behind a URL.

    Its methods raise what the file system raises, which may be anything.

    Args:
        url: Its URL.

    Raises:
        ToolUnavailableError: There is no file system for it.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs = _file_system(self.url)
        path: str = self._fs._strip_protocol(self.url)
        self._path = path.rstrip("/")

    def child(self, name: str) -> RemoteFolder:
        """Return a folder inside."""
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
        """Return the content of a file."""
        data: bytes = self._fs.cat_file(f"{self._path}/{name}")
        return data

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it is this one.

        A store that cannot create exclusively is asked before and after: of two that write at the same
        moment, at most one finds its own.
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
        return self.read(name) == data

    def remove(self, name: str) -> None:
        """Remove a file."""
        self._fs.rm_file(f"{self._path}/{name}")

    def put(self, local: Path, name: str) -> None:
        """Upload a file, or a folder with all in it, and verify it.

        A file that is there already with the same checksum is left as it is.

        Raises:
            OSError: What arrived is not what was sent.
        """
        if local.is_dir():
            for file in sorted(local.rglob("*")):
                if file.is_file():
                    self._put_file(file, f"{name}/{file.relative_to(local).as_posix()}")
        else:
            self._put_file(local, name)

    def _put_file(self, local: Path, name: str) -> None:
        path, size, md5 = f"{self._path}/{name}", local.stat().st_size, _Md5(local)
        if (there := self._info(path)) and there.get("size") == size and md5.is_of(there):
            return
        try:
            self._fs.put_file(str(local), path)
        except FileNotFoundError:
            self._make_parents(path)
            self._fs.put_file(str(local), path)
        arrived = self._info(path)
        if arrived is None:
            raise OSError(f"{self.url}/{name} is not there after the upload")
        if arrived.get("size") not in (size, None):
            raise OSError(f"{self.url}/{name} has {arrived['size']} bytes after the upload, not {size}")
        if md5.differs_from(arrived):
            raise OSError(f"{self.url}/{name} has another checksum after the upload")

    def _info(self, path: str) -> dict[str, Any] | None:
        self._fs.invalidate_cache()
        try:
            info: dict[str, Any] = self._fs.info(path)
        except FileNotFoundError:
            return None
        return info

    def _make_parents(self, path: str) -> None:
        self._fs.makedirs(path.rpartition("/")[0], exist_ok=True)


class _Md5:
    """The checksum of a local file, computed when a store has one to compare with."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._digest = b""

    def is_of(self, info: dict[str, Any]) -> bool:
        """Return whether a store's checksum is this one."""
        known = _stored_md5(info) or _etag(info)
        return known is not None and known == self._value()

    def differs_from(self, info: dict[str, Any]) -> bool:
        """Return whether a store has another checksum. An ETag may be something else than a checksum."""
        known = _stored_md5(info)
        return known is not None and known != self._value()

    def _value(self) -> bytes:
        if not self._digest:
            with self._path.open("rb") as file:
                md5 = hashlib.md5(usedforsecurity=False)
                while block := file.read(1 << 20):
                    md5.update(block)
            self._digest = md5.digest()
        return self._digest


def _stored_md5(info: dict[str, Any]) -> bytes | None:
    text = info.get("md5Hash")  # Google Cloud Storage
    return base64.b64decode(text) if isinstance(text, str) else None


def _etag(info: dict[str, Any]) -> bytes | None:
    text = str(info.get("ETag", "")).strip('"')
    return bytes.fromhex(text) if re.fullmatch("[0-9a-f]{32}", text) else None
