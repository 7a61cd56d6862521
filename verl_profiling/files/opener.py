"""Opens, writes and removes the files of a run; other modules open files only by this module.

Other users may write into the folder of a run, or may have made it. So no symbolic link is followed
in the place of a file or of its folder, and a new file has a random name until it is whole. Folders
further up are trusted.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

import msgspec

from verl_profiling.errors import TraceFormatError
from verl_profiling.units import byte_size

UNDECODABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Exceptions that msgspec's decoders raise for invalid bytes."""

SMALL_BYTES = 64 << 20
"""Size limit of files that are read whole. A manifest of 100,000 requests has about 45 MB."""

_PART = ".part"
_OLD_S = 24 * 3600
# O_NONBLOCK, as opening a pipe would wait for a writer.
_NO_LINK = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | _NO_LINK
_PLAIN_WORDS = {errno.ELOOP: "is a link", errno.ENOTDIR: "it or its folder is a link, or no folder"}


def named_file(folder: Path, name: str) -> Path:
    """Return the path of a file or folder inside another folder, whether it exists or not.

    Args:
        folder: The folder that has to contain the path, with links resolved.
        name: Path relative to ``folder``.

    Raises:
        TraceFormatError: The path leads out of the folder, or is neither a regular file nor a
            folder.
    """
    path = folder / name
    try:
        is_inside = path.resolve().is_relative_to(folder.resolve())
        is_special = path.exists() and not (path.is_file() or path.is_dir())
    except (OSError, ValueError, RuntimeError) as error:
        # It is too long, has a NUL, or links in a circle.
        raise TraceFormatError(
            folder, f"lists {name!r:.99}, no path inside of it: {error}"
        ) from error
    if not (name and is_inside):
        raise TraceFormatError(folder, f"lists {name!r:.99}, which is not a path inside the folder")
    if is_special:
        raise TraceFormatError(path, "is neither a regular file nor a folder")
    return path


def real_folder(path: Path) -> Path:
    """Return a folder that a person named; for a link, the folder to which it leads."""
    return path.resolve() if path.is_symlink() else path


def opened(path: Path) -> BinaryIO:
    """Open a regular file for reading.

    Raises:
        OSError: The file cannot be opened, is a link, lies in a link, or is a pipe, a device or a
            folder.
    """
    return os.fdopen(_descriptor(path, os.O_RDONLY), "rb")


def appended(path: Path) -> BinaryIO:
    """Open a file for appending without a buffer; a missing file is created.

    Raises:
        OSError: The file cannot be written, is a link, or lies in a link.
    """
    return os.fdopen(_descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT), "ab", buffering=0)


def read_small(path: Path) -> bytes:
    """Return the content of a file of at most ``SMALL_BYTES``.

    Raises:
        OSError: The file is larger, or cannot be opened (see :func:`opened`).
    """
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > SMALL_BYTES:
            why = f"has {byte_size(size)}, and at most {byte_size(SMALL_BYTES)} are read"
            raise OSError(errno.EFBIG, why, str(path))
        return file.read(size)


@contextmanager
def whole_file(path: Path, *, new: bool = False) -> Iterator[BinaryIO]:
    """Yield a file that gets its name at the end; after a failure, nothing is left.

    Args:
        path: The file.
        new: Whether the file must not exist yet.

    Raises:
        OSError: The file cannot be written; ``path`` is its file name in the error.
    """
    with naming(path), _opened_folder(path.parent) as folder:
        part = _part_of(path.name)
        descriptor = os.open(part, _NEW, _mode_in(folder), dir_fd=folder)
        try:
            with os.fdopen(descriptor, "w+b") as file:
                yield file
            if new:
                _rename_to_new(part, path.name, folder)
            else:
                os.replace(part, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            raise


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder for creating a file, next to the file.

    Raises:
        OSError: The file cannot be written; ``path`` is its file name in the error.
    """
    scratch = path.with_name(_part_of(path.name))
    with naming(path):
        with _opened_folder(path.parent) as folder:
            os.mkdir(scratch.name, 0o700 | (os.fstat(folder).st_mode & 0o777), dir_fd=folder)
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder.

    A loop lists the folder of requests in every step, so the usual, empty folder costs one call.
    Only a folder with files is checked for being a link.

    Raises:
        OSError: The folder cannot be read, or is a link to a folder with files.
    """
    names = os.listdir(folder)  # noqa: PTH208 (pathlib takes twice as long)
    if names and folder.is_symlink():
        raise OSError(errno.ELOOP, _PLAIN_WORDS[errno.ELOOP], str(folder))
    return names


def move_file(source: Path, target: Path) -> None:
    """Move a file to its final name; a link with that name is replaced.

    Raises:
        OSError: The file cannot be moved; ``target`` is its file name in the error.
    """
    with naming(target), _opened_folder(target.parent) as folder:
        try:
            os.replace(source, target.name, dst_dir_fd=folder)
            return
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
    with opened(source) as file, whole_file(target) as copy:
        shutil.copyfileobj(file, copy)
    remove_file(source)


def remove_file(path: Path) -> None:
    """Remove a file, or the link in its place.

    Raises:
        OSError: The file cannot be removed.
    """
    with naming(path), _opened_folder(path.parent) as folder:
        os.unlink(path.name, dir_fd=folder)


def make_folder(path: Path, *, exist_ok: bool = True) -> None:
    """Make a folder that only users of its parent folder may use; missing parents are made, too.

    Raises:
        OSError: The folder cannot be made, exists although ``exist_ok`` is ``False``, or is a link.
    """
    if not path.parent.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
    try:
        path.mkdir(0o700 | (path.parent.stat().st_mode & 0o777))
    except FileExistsError:
        if not exist_ok:
            raise
    with naming(path), _opened_folder(path):
        pass  # neither a link nor a file


def make_private_folder(path: Path) -> None:
    """Make a folder into which nobody else writes, or check the existing one.

    Raises:
        OSError: The folder cannot be made, is a link, or others may write or replace its content.
    """
    path.mkdir(0o700, parents=True, exist_ok=True)
    with naming(path), _opened_folder(path) as folder:
        state = os.fstat(folder)
    others_write = state.st_mode & 0o022 and not state.st_mode & stat.S_ISVTX
    if state.st_uid not in (os.getuid(), 0) or others_write:
        mode = stat.filemode(state.st_mode)
        remedy = "chmod go-w it, or choose another folder (remote.staging)"
        why = f"belongs to user {state.st_uid} with mode {mode}; {remedy}"
        raise PermissionError(errno.EPERM, why, str(path))


def clear_leftovers(folder: Path) -> None:
    """Remove temporary files of killed processes, if they are older than a day."""
    for path in folder.glob(f".*{_PART}"):
        with suppress(OSError):
            if time.time() - path.lstat().st_mtime > _OLD_S:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


class LocalFolder:
    """A folder of this host, with the methods of ``RemoteFolder``.

    All methods raise ``OSError``. No method follows links.
    """

    def __init__(self, path: Path) -> None:
        self.url = str(path)
        self.path = path

    def child(self, name: str) -> LocalFolder:
        """Return the folder of this name inside the folder."""
        return LocalFolder(self.path / name)

    def names(self) -> set[str]:
        """Return the names of what is inside; nothing, if the folder does not exist."""
        try:
            return set(names_in(self.path))
        except FileNotFoundError:
            return set()

    def read(self, name: str) -> bytes:
        """Return the content of a small file."""
        return read_small(self.path / name)

    def create(self, name: str, data: bytes) -> bool:
        """Write a file unless it exists; return whether it was written. Of several writers,
        one succeeds.
        """
        if not self.path.is_dir():
            make_folder(self.path)
        try:
            with whole_file(self.path / name, new=True) as file:
                file.write(data)
        except FileExistsError:
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file."""
        remove_file(self.path / name)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Put ``path`` into errors of the block, which name a temporary path, a part of it, or none.

    Raises:
        OSError: The exception inside the block, with ``path`` as the file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        why = _PLAIN_WORDS.get(error.errno, error.strerror or str(error))
        raise OSError(error.errno, why, str(path)) from error


@contextmanager
def reading(path: Path, hint: str = "") -> Iterator[None]:
    """Turn errors of the block, which reads a file, into errors of the analysis.

    Args:
        path: The file.
        hint: Text after the reason, e.g. ``; is this a step folder?``.

    Raises:
        TraceFormatError: The file cannot be opened or read.
    """
    try:
        yield
    except OSError as error:
        raise TraceFormatError(path, f"cannot be read ({error.strerror or error}){hint}") from error


@contextmanager
def _opened_folder(path: Path) -> Iterator[int]:
    """Yield the descriptor of a folder that is no link."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | _NO_LINK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _descriptor(path: Path, flags: int) -> int:
    """Return the descriptor of a regular file."""
    with naming(path), _opened_folder(path.parent) as folder:
        descriptor = os.open(path.name, flags | _NO_LINK, _mode_in(folder), dir_fd=folder)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "is not a regular file", str(path))


def _mode_in(folder: int) -> int:
    """Return the mode of a new file before the umask: only users who may read or write the folder
    may read or write the file.
    """
    return 0o600 | (os.fstat(folder).st_mode & 0o666)


def _part_of(name: str) -> str:
    return f".{name}.{uuid.uuid4().hex[:12]}{_PART}"


def _rename_to_new(part: str, name: str, folder: int) -> None:
    """Rename a file unless the new name exists."""
    try:
        os.link(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        os.unlink(part, dir_fd=folder)
    except FileExistsError:
        raise
    except OSError:  # a file system without hard links
        os.close(os.open(name, _NEW, dir_fd=folder))
        os.replace(part, name, src_dir_fd=folder, dst_dir_fd=folder)
