"""Limits of what captures may take: the ``limits`` group of the configuration."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.errors import ConfigError
from verl_profiling.settings.typed_values import Size, field_types, value_of
from verl_profiling.units import byte_size

__all__ = ["Limits"]

_GB = Size(1_000_000_000)
_MAY_BE_ZERO = ("min_free_bytes", "keep_slowest", "memory_share")


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What captures may take. A size is a number of bytes, or text like ``2GB`` or ``512MiB``.

    Attributes:
        min_free_bytes: Free space that captures leave on a file system. Where there is less, callback or
            worker records nothing.
        artifact_bytes: Size of one artifact. Of a larger trace the begin is kept, of anything else nothing.
        step_bytes: Size of all artifacts of a step. Each worker may write an equal part of it.
        total_bytes: Size of the run's step folders from which on no further step is captured.
        keep_last: Captures that stay, the latest; older ones are removed. ``null``: all.
        keep_slowest: Captures that stay although they are older: those of the longest steps. Needs
            ``keep_last``.
        memory_share: Share of the memory which is available on the host that recordings may take beyond what
            they hold, in order to be written. The workers of a host divide it.
        memory_bytes: Memory that one recording may take at most, its writing included; ``null`` for no fixed
            limit.
        max_events: Events of one recording; ``null`` for no limit. The number is estimated while it records.
    """

    min_free_bytes: Size = _GB
    artifact_bytes: Size | None = None
    step_bytes: Size | None = None
    total_bytes: Size | None = None
    keep_last: int | None = None
    keep_slowest: int = 0
    memory_share: float = 0.5
    memory_bytes: Size | None = None
    max_events: int | None = None

    def __post_init__(self) -> None:
        for name, kind in field_types(Limits).items():
            object.__setattr__(self, name, value_of(kind, getattr(self, name), name))
        for name in field_types(Limits):
            value, least = getattr(self, name), 0 if name in _MAY_BE_ZERO else 1
            if value is not None and value < least:
                raise ConfigError(name, f"must be at least {least}, is {value}")
        if not 0 < self.memory_share <= 1:
            raise ConfigError("memory_share", f"must be greater than 0 and at most 1, is {self.memory_share}")
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
            f"{folder} has {byte_size(free)} of free space, less than "
            f"limits.min_free_bytes={byte_size(self.min_free_bytes)}"
        )
