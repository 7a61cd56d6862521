"""Checks the files that a manifest or a note names: they have to be inside its folder.

A folder of traces may come from anybody, so it must not make a reader open other files.
"""

from __future__ import annotations

import stat
from pathlib import Path, PurePosixPath

from verl_profiling.errors import TraceFormatError

__all__ = ["check_lane", "named_file"]


def named_file(folder: Path, name: str) -> Path:
    """Return the path of a file, or of a folder, that may not exist.

    Args:
        folder: The folder that has to contain it, with links resolved.
        name: Its path, relative to ``folder``.

    Raises:
        TraceFormatError: It leads out of the folder, or is neither a regular file nor a folder.
    """
    relative = PurePosixPath(name)
    if not name or "\0" in name or relative.is_absolute() or ".." in relative.parts:
        raise TraceFormatError(folder, f"names {name!r}, which is not a path inside of it")
    path = folder / relative
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            raise TraceFormatError(path, f"is a link that leads out of {folder}")
        mode = path.stat().st_mode
    except FileNotFoundError:
        return path
    except (OSError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        raise TraceFormatError(path, f"cannot be looked at: {error}") from error
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise TraceFormatError(path, "is neither a regular file nor a folder")
    return path


def check_lane(manifest: Path, lane: str) -> None:
    """Check that a lane can be part of a file name.

    Raises:
        TraceFormatError: It cannot be.
    """
    if not lane or "/" in lane or "\0" in lane or lane.startswith("."):
        raise TraceFormatError(manifest, f"names a lane {lane!r}, which is not a name")
