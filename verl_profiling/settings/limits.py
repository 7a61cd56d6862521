"""Limits of what captures may take: the ``limits`` group of the configuration."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.errors import ConfigError
from verl_profiling.settings.typed_values import Size, field_types, in_units, value_of

__all__ = ["Limits"]

_GB = Size(1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What captures may take. A size is a number of bytes, or text like ``2GB`` or ``512MiB``.

    Attributes:
        min_free_bytes: Free space that captures leave on a file system. Where there is less, callback or
            worker records nothing.
        total_bytes: Size of the run's step folders from which on no further step is captured.
        keep_last: Captures that stay, the latest; older ones are removed. ``null``: all.
        keep_slowest: Captures that stay although they are older: those of the longest steps. Needs
            ``keep_last``.
    """

    min_free_bytes: Size = _GB
    total_bytes: Size | None = None
    keep_last: int | None = None
    keep_slowest: int = 0

    def __post_init__(self) -> None:
        for name, kind in field_types(Limits).items():
            object.__setattr__(self, name, value_of(kind, getattr(self, name), name))
        for name, least in (("min_free_bytes", 0), ("total_bytes", 1), ("keep_last", 1), ("keep_slowest", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, f"must be at least {least}, is {value}")
        if self.keep_slowest and self.keep_last is None:
            raise ConfigError("keep_slowest", "needs limits.keep_last; without it all captures stay")

    def no_room(self, folder: Path) -> str:
        """Return why nothing can be written into a folder, which exists or will; empty if there is room."""
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        try:
            free = shutil.disk_usage(folder).free
        except OSError as error:
            return f"the free space of {folder} cannot be read: {error.strerror}"
        if free >= self.min_free_bytes:
            return ""
        return (
            f"{folder} has {in_units(free)} of free space, less than "
            f"limits.min_free_bytes={in_units(self.min_free_bytes)}"
        )
