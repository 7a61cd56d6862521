"""Artifacts that are folders."""

from __future__ import annotations

import shutil
from pathlib import Path

__all__ = ["folder_bytes", "remove_folder"]


def folder_bytes(folder: Path) -> int:
    """Return the size of all files in a folder, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def remove_folder(folder: Path) -> None:
    """Remove an artifact, and the step folder if that leaves it empty."""
    shutil.rmtree(folder)
    try:
        folder.parent.rmdir()
    except OSError:
        pass  # something else is in the step folder
