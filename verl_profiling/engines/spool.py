"""The folder that an engine writes its traces into, whatever the step."""

from __future__ import annotations

import shutil
from pathlib import Path

from verl_profiling.engines.base import SPOOL_PARENT, EngineAdapter, EngineTrace

__all__ = ["Spool", "move"]


class Spool:
    """The folder that an engine writes into; it shows what appeared since one capture started.

    Args:
        engine: The engine.
        label: The capture's label.

    Raises:
        OSError: The folder cannot be made.
    """

    def __init__(self, engine: EngineAdapter, label: str) -> None:
        self._engine = engine
        self._label = label
        engine.spool.mkdir(parents=True, exist_ok=True)
        self._before = set(engine.spool.iterdir())

    def take(self) -> dict[EngineTrace, Path]:
        """Return what the engine wrote since then; of several files of a kind, the newest."""
        new = [path for path in _content_of(self._engine.spool) if path not in self._before]
        found: dict[EngineTrace, Path] = {}
        for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
            trace = self._engine.identify(path, self._label)
            if trace is not None:
                found[trace] = path
        return found

    def keep_extras(self, folder: Path, name: str) -> list[str]:
        """Move requested files other than ranks' traces to the step folder; return notes on them."""
        notes = []
        for path in _content_of(self._engine.spool):
            if suffix := self._engine.extra_suffix(path):
                kept = folder / f"{name}{suffix}"
                move(path, kept)
                notes.append(f"{name}: {kept.name} was written by {self._engine.name} on request")
        return notes

    def clear(self) -> None:
        """Remove the other files: tables, traces of ranks that are not selected."""
        if self._engine.spool.parent.name == SPOOL_PARENT:
            shutil.rmtree(self._engine.spool, ignore_errors=True)
            try:
                self._engine.spool.parent.rmdir()
            except OSError:
                pass  # it contains the spool of another engine


def _content_of(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def move(source: Path, target: Path) -> None:
    """Move a file or a folder, to another file system too."""
    try:
        source.replace(target)
    except OSError:  # on another file system
        shutil.move(source, target)
