"""Limits of what captures may take: the ``limits`` group of the configuration."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.errors import ConfigError
from verl_profiling.settings.typed_values import Size, value_of
from verl_profiling.units import byte_size

__all__ = ["Limits"]

_GB = Size(1_000_000_000)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What captures may take. A size is a number of bytes, or text like ``2GB`` or ``512MiB``.

    Attributes:
        min_free_bytes: Free space that captures leave on a file system. Where there is less, callback or
            worker records nothing.
        keep_last: Captures that stay, the latest; older ones are removed. ``null``: all.
        memory_share: Share of the host's available memory that a recording may need to be written; the
            workers of a host divide it. One that needs more ends with the stage or mini-batch.
    """

    min_free_bytes: Size = _GB
    keep_last: int | None = None
    memory_share: float = 0.5

    def __post_init__(self) -> None:
        object.__setattr__(self, "min_free_bytes", value_of(Size, self.min_free_bytes, "min_free_bytes"))
        for name, least in (("min_free_bytes", 0), ("keep_last", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(name, f"must be at least {least}, is {value}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError("memory_share", f"must be greater than 0 and at most 1, is {self.memory_share}")

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
            f"{folder} has {byte_size(free)} of free space, less than "
            f"limits.min_free_bytes={byte_size(self.min_free_bytes)}"
        )
