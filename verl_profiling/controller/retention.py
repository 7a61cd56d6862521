"""Which captures of a run stay: ``limits.keep_last``.

What is removed is a step folder of this run in which nothing is but what the run wrote. It is renamed first,
so that a crash never leaves half a step under its own name.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from verl_profiling.controller.step_folder import is_pending
from verl_profiling.errors import TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME
from verl_profiling.run_files import read_manifest

__all__ = ["Retention"]

logger = logging.getLogger(__name__)


class Retention:
    """Keeps the latest captures of a run.

    Args:
        keep_last: How many.
    """

    def __init__(self, keep_last: int) -> None:
        self._keep_last = keep_last
        self._stored: list[Path] = []
        self._removal: ThreadPoolExecutor | None = None

    def take(self, run_id: str, folder: Path) -> tuple[list[Path], list[str]]:
        """Take up a capture that is about to be written; return the folders to remove, and notes on them.

        Args:
            run_id: The run.
            folder: The capture's step folder.
        """
        self._stored.append(folder)
        leaving, notes = [], []
        for older in self._stored[: -self._keep_last]:
            if is_pending(older):  # it stays for now
                continue
            self._stored.remove(older)
            if strangers := _strangers(older, run_id):
                note = f"{older.name} stays beyond limits.keep_last: the run did not write {strangers}"
                logger.info("%s", note)
            else:
                leaving.append(older)
                note = f"{older.name} was removed: limits.keep_last={self._keep_last}"
            notes.append(note)
        return leaving, notes

    def remove(self, folders: Iterable[Path]) -> None:
        """Remove step folders: their names at once, their contents in the background."""
        for folder in folders:
            hidden = folder.with_name(f".{folder.name}.removed")
            try:
                folder.rename(hidden)
            except OSError as error:
                logger.warning("%s cannot be removed, and stays: %s", folder, error)
                continue
            logger.info("%s is removed: limits.keep_last=%s", folder, self._keep_last)
            self._removal = self._removal or ThreadPoolExecutor(1, "verl-profiling-removal")
            self._removal.submit(_delete, hidden)

    def end(self) -> None:
        """Wait for removals that are under way."""
        if self._removal is not None:
            self._removal.shutdown()
            self._removal = None


def _strangers(folder: Path, run_id: str) -> str:
    """Return what a step folder holds that the run did not write; empty if nothing."""
    try:
        manifest = read_manifest(folder)
    except TraceFormatError:
        return "its manifest"
    if manifest.run_id != run_id:
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


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s cannot be removed completely; remove it by hand", folder)
