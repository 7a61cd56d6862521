"""Which captures of a run stay, and whether there is room for another one: ``limits`` on the loop's side.

What is removed is a step folder of this run in which nothing is but what the run wrote. It is renamed first,
so that a crash never leaves half a step under its own name.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.controller.run import Run
from verl_profiling.controller.step_folder import is_pending
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, Manifest
from verl_profiling.run_files import read_manifest
from verl_profiling.settings.limits import Limits
from verl_profiling.units import byte_size

__all__ = ["Retention"]

logger = logging.getLogger(__name__)

_REMOVED = ".removed"


@dataclass
class _Stored:
    """A capture on disk.

    Attributes:
        folder: Its step folder.
        begin_ns: When its first step began.
        duration_ns: How long its steps took.
        bytes: Size of the folder; ``None`` while it may still change.
        shared: Somebody else put files there, so that it is not removed.
    """

    folder: Path
    begin_ns: int
    duration_ns: int
    bytes: int | None = None
    shared: bool = False


class Retention:
    """Keeps account of a run's captures.

    Args:
        limits: The limits.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._stored: list[_Stored] = []
        self._removal: threading.Thread | None = None

    def refusal(self, run: Run) -> str:
        """Return why no further step can be captured; empty if one can."""
        if why := self._limits.no_room(run.path):
            return why
        total = self._limits.total_bytes
        if total is None or not (stored := self._stored):
            return ""
        sizes = {}
        for step in stored:
            sizes[step.folder] = size = _bytes_in(step.folder) if step.bytes is None else step.bytes
            step.bytes = None if is_pending(step.folder) else size
        newest = max(stored, key=lambda step: step.begin_ns)
        leaving = [step.folder for step in self._beyond(stored, room_for=1)]
        held = sum(size for folder, size in sizes.items() if folder not in leaving)
        if held + sizes[newest.folder] <= total:
            return ""
        last, limit = byte_size(sizes[newest.folder]), byte_size(total)
        return (
            f"the step folders hold {byte_size(held)}, the last one alone {last}; "
            f"another would exceed limits.total_bytes={limit}"
        )

    def take(self, run: Run, folder: Path, manifest: Manifest) -> tuple[list[Path], list[str]]:
        """Take up a capture that is about to be written; return the folders to remove, and notes on them.

        Args:
            run: The run's folder.
            folder: Its step folder.
            manifest: Its manifest.
        """
        if self._limits.keep_last is None and self._limits.total_bytes is None:
            return [], []
        stored = self._stored = [step for step in self._stored if step.folder != folder]
        stored.append(_Stored(folder, manifest.begin_ns, manifest.end_ns - manifest.begin_ns))
        leaving, notes = [], []
        for step in self._beyond(stored):
            if is_pending(step.folder):  # it stays for now
                continue
            if strangers := _strangers(step.folder, run.run_id):
                step.shared = True
                note = f"{step.folder.name} stays beyond limits.keep_last: the run did not write {strangers}"
                logger.info("%s", note)
            else:
                stored.remove(step)
                leaving.append(step.folder)
                note = f"{step.folder.name} was removed: limits.keep_last={self._limits.keep_last}"
            notes.append(note)
        return leaving, notes

    def remove(self, folders: Iterable[Path]) -> None:
        """Remove step folders: their names at once, their contents in the background."""
        renamed = []
        for folder in folders:
            hidden = folder.with_name(f".{folder.name}{_REMOVED}")
            try:
                folder.rename(hidden)
            except OSError as error:
                logger.warning("%s cannot be removed, and stays: %s", folder, error)
                continue
            logger.info("%s is removed: limits.keep_last=%s", folder, self._limits.keep_last)
            renamed.append(hidden)
        self._delete(renamed)

    def wait(self, timeout_s: float) -> None:
        """Wait for removals that are under way."""
        if self._removal is not None:
            self._removal.join(timeout_s)

    def _delete(self, folders: list[Path]) -> None:
        if folders:
            before = self._removal
            self._removal = threading.Thread(
                target=_delete_all, args=(folders, before), name="verl-profiling-removal", daemon=True
            )
            self._removal.start()

    def _beyond(self, stored: list[_Stored], room_for: int = 0) -> list[_Stored]:
        """Return the captures that do not stay, with room for so many more."""
        if self._limits.keep_last is None:
            return []
        latest_first = sorted(stored, key=lambda step: step.begin_ns, reverse=True)
        latest = max(0, self._limits.keep_last - room_for)
        older = [step for step in latest_first[latest:] if not step.shared]
        slowest_first = sorted(older, key=lambda step: step.duration_ns, reverse=True)
        return slowest_first[self._limits.keep_slowest :]


def _manifest_of(folder: Path, run_id: str) -> Manifest | None:
    """Return the manifest of a step folder if this run wrote it; what is behind a link is not its own."""
    try:
        manifest = read_manifest(folder)
    except TraceFormatError:
        return None
    return manifest if manifest.run_id == run_id else None


def _strangers(folder: Path, run_id: str) -> str:
    """Return what a step folder holds that the run did not write; empty if nothing."""
    manifest = _manifest_of(folder, run_id)
    if manifest is None:
        return "its manifest"
    own = {MANIFEST_NAME}
    own.update(artifact.path for worker in manifest.workers for artifact in worker.artifacts)
    lanes = {worker.name for worker in manifest.workers}
    lanes.update(artifact.lane for worker in manifest.workers for artifact in worker.artifacts)
    begins = tuple(f"{name}." for name in [*lanes, "manifest"])
    found = [path.name for path in folder.iterdir()]
    return ", ".join(
        sorted(name for name in found if name not in own and not name.lstrip(".").startswith(begins))[:3]
    )


def _bytes_in(folder: Path) -> int:
    total = 0
    for inside, _, names in os.walk(folder):  # workers remove files and folders there meanwhile
        for name in names:
            try:
                total += Path(inside, name).lstat().st_size
            except OSError:
                continue
    return total


def _delete_all(folders: list[Path], before: threading.Thread | None) -> None:
    if before is not None:
        before.join()
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            logger.warning("%s cannot be removed completely; remove it by hand", folder)
