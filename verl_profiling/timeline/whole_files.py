"""Files that are written whole or not at all, and what a process that was killed has left of them.

A temporary file or folder lies beside the one that it becomes; its name says which process writes it.
"""

from __future__ import annotations

import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from verl_profiling.run_files import naming

__all__ = ["clear_leftovers", "part_of", "scratch_folder", "whole_file"]

_PART = ".part"
_OLD_S = 24 * 3600


def part_of(path: Path) -> Path:
    """Return the temporary name of a file that this process writes."""
    return path.with_name(f".{path.name}.{socket.gethostname()}.{os.getpid()}{_PART}")


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file that takes its name once everything is written, and is gone if that fails.

    Raises:
        OSError: It cannot be written; the error names ``path``.
    """
    part = part_of(path)
    try:
        with naming(path, part):
            with part.open("wb") as file:
                yield file
            part.replace(path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def scratch_folder(path: Path) -> Iterator[Path]:
    """Yield a folder for the making of a file, which is gone afterwards.

    Raises:
        OSError: It cannot be written; the error names ``path``.
    """
    folder = part_of(path)
    with naming(path, folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def clear_leftovers(folder: Path) -> list[str]:
    """Remove what killed processes have left in a folder; return sentences on what had to stay."""
    stayed = []
    for path in sorted(folder.glob(f".*{_PART}")):
        if not _is_left(path):
            stayed.append(f"{path} is a temporary file of another process; remove it if none writes it")
            continue
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        except OSError as error:
            stayed.append(f"{path} is a temporary file of a process that was killed ({error.strerror})")
    return stayed


def _is_left(path: Path) -> bool:
    """Return whether nobody writes a temporary file any more: its process is dead.

    That of a process on another host is taken for dead after a day.
    """
    rest, _, number = path.name.removesuffix(_PART).rpartition(".")
    if not number.isdecimal():
        return False
    try:
        if not rest.endswith(f".{socket.gethostname()}"):
            return time.time() - path.lstat().st_mtime > _OLD_S
        os.kill(int(number), 0)
    except (ProcessLookupError, FileNotFoundError, OverflowError):
        return True
    except OSError:  # the process is another user's
        pass
    return False
