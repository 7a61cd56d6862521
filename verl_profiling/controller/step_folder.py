"""Creates the step folders of a run, writes ``manifest.json``, and applies ``limits.keep_last``.

Only a folder in which this run wrote every file is removed. It is renamed first, so that a crash never
leaves half a step under the step's name.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections import Counter
from functools import partial
from pathlib import Path

import msgspec

from verl_profiling.controller.open_capture import OpenCapture
from verl_profiling.controller.run import Run, claim_run
from verl_profiling.controller.spmd import Ranks
from verl_profiling.controller.targets import Waits
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import ProcessId, step_folder_name
from verl_profiling.manifest import MANIFEST_NAME, CaptureResult, Manifest
from verl_profiling.remote import RemoteFolder, Upload
from verl_profiling.run_files import RESULT_SUFFIX, read_manifest, write_json_atomically
from verl_profiling.settings.config import ProfilingConfig

logger = logging.getLogger(__name__)


class StepFolders:
    """The step folders of a run, whose folder is claimed when first needed.

    All methods raise ``OSError`` when the folder cannot be written.

    Args:
        config: The settings; ``save_path`` is the run's folder unless another run has it.

    Attributes:
        claimed: The run, once this process has claimed its folder or received it from rank 0.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config
        self.claimed: Run | None = None
        self._recordings: Counter[int] = Counter()
        self._no_room = ""
        ProcessId.current()  # cached, so that no step reads /proc
        self._stored: list[Path] = []
        self._not_captured: dict[int, str] = {}

    @property
    def run(self) -> Run:
        """The run; the first access claims its folder."""
        if self.claimed is None:
            self.claimed = claim_run(self._config)
            if self._not_captured:
                self.claimed.amend(not_captured=self._not_captured)
        return self.claimed

    def not_captured(self, step: int, why: str) -> None:
        """Record in ``run.json`` that the capture of a step could not begin, and why."""
        self._not_captured[step] = why
        if self.claimed is not None:
            self.claimed.amend(not_captured=self._not_captured)

    def share_run(self, ranks: Ranks, step: int) -> Waits[bool]:
        """Publish the run's folder (rank 0), or wait for it (other ranks); return whether it is known."""
        wait_s = self._config.timeouts.start_s
        if ranks.leads:
            ranks.publish(self.run)
        elif self.claimed is None:
            yield partial(ranks.wait_for_run, wait_s)
            self.claimed = ranks.run()
            if self.claimed is None:
                logger.error(
                    "step %d: rank %d is not captured: rank 0 has not begun a captured step within %g s; has "
                    "it a callback with workers and the same settings? Where it has none, set spmd: false",
                    *(step, ranks.rank, wait_s),
                )
        return self.claimed is not None

    def no_room(self, step: int, notes: list[str]) -> str:
        """Return why the limits leave no room for a capture, empty if they do; logged for the first step.

        Args:
            step: The step.
            notes: Gets a note on the steps without captures, once there is room again.
        """
        why = self._config.limits.no_room(self.run.path)
        if why and not self._no_room:
            logger.warning("step %d is not captured, nor are others until there is room: %s", step, why)
            self.not_captured(step, f"{why}; nor were others until there was room")
            self._no_room = f"from step {step} on nothing was captured until now: {why}"
        elif self._no_room and not why:
            notes.append(self._no_room)
            self._no_room = ""
        return why

    def make(self, step: int, keep: bool, shared: bool) -> Path:
        """Make the folder of a captured step and return its path, which is the same on all ranks.

        Args:
            step: The step.
            keep: ``False`` for a warm-up, which has no folder.
            shared: Whether another rank may have made the folder already.
        """
        self._recordings[step] += keep
        folder = self.run.path / step_folder_name(step, self._recordings[step])
        if keep:
            folder.mkdir(parents=True, exist_ok=shared)
        return folder

    def write(self, live: OpenCapture) -> Manifest:
        """Write the manifest of a capture as far as it is known, and return it."""
        manifest = live.manifest()
        write_json_atomically(live.folder / MANIFEST_NAME, manifest)
        if live.end_ns:
            self.run.publish(live.folder)
        return manifest

    def conclude(self, live: OpenCapture) -> Manifest:
        """Write the final manifest of a capture, and remove step folders beyond ``limits.keep_last``.

        Paths of files on disks of other hosts are added.
        """
        keep_last = self._config.limits.keep_last
        leaving = [] if keep_last is None else self._leaving(live.folder, keep_last, live.notes)
        with live.outside.during("write"):
            if self.run.url is None:
                live.workers = _located(live.folder, live.workers, live.notes)
            manifest = self.write(live)
        for older in leaving:
            self._remove(older)
        return manifest

    def _leaving(self, folder: Path, keep_last: int, notes: list[str]) -> list[Path]:
        """Add a step folder to the stored ones; return older folders to remove, and note them."""
        leaving: list[Path] = []
        self._stored.append(folder)
        for older in self._stored[:-keep_last]:
            if is_pending(older):  # a worker still writes into it
                continue
            self._stored.remove(older)
            if strangers := _strangers(older, self.run.place.run_id):
                note = f"{older.name} stays beyond limits.keep_last: the run did not write {strangers}"
            else:
                leaving.append(older)
                note = f"{older.name} was removed: limits.keep_last={keep_last}"
            logger.info("%s", note)
            notes.append(note)
        return leaving

    def _remove(self, folder: Path) -> None:
        """Remove a step folder: rename it at once, delete its content in the background."""
        hidden = folder.with_name(f".{folder.name}.removed")
        try:
            folder.rename(hidden)
        except OSError as error:
            logger.warning("%s cannot be removed, and stays: %s", folder, error)
            return
        self.run.background.submit(partial(_delete, hidden))


def _located(folder: Path, results: list[CaptureResult], notes: list[str]) -> list[CaptureResult]:
    """Return results with ``where`` set for artifacts that are on the disk of another host; note them."""
    seen = {*os.listdir(folder)}  # noqa: PTH208 (the loop waits for it)
    hosts: dict[str, None] = {}
    workers = []
    for worker in results:
        artifacts = []
        for artifact in worker.artifacts:
            is_here = artifact.path in seen or artifact.path.removesuffix(".gz") in seen
            written = artifact.status in ("ok", "pending", "truncated") and not artifact.reason
            if written and not is_here and not artifact.where:
                hosts[worker.identity.host] = None
                where = f"{worker.identity.host}:{worker.folder}/{artifact.path}"
                artifact = msgspec.structs.replace(artifact, where=where)
            artifacts.append(artifact)
        workers.append(msgspec.structs.replace(worker, artifacts=artifacts))
    if hosts:
        notes.append(f"files of {', '.join(hosts)} are not seen from here: copy them into this folder")
    return workers


def is_pending(folder: Path, upload: Upload | None = None) -> bool:
    """Return whether a process may still write into a step folder.

    Args:
        folder: The folder.
        upload: The upload target, if the folder only stages files; a process uploads its result last.
    """
    pending = {
        f"{worker.name}{RESULT_SUFFIX}"
        for worker in read_manifest(folder).workers
        if any(artifact.status == "pending" for artifact in worker.artifacts)
    }
    if upload is None:
        return bool(pending)
    return not {MANIFEST_NAME, *pending} <= RemoteFolder(upload.url).names()


def _strangers(folder: Path, run_id: str) -> str:
    """Return up to three names of files that the run did not write; empty if there are none."""
    try:
        manifest = read_manifest(folder)
    except TraceFormatError:
        return "its manifest"
    if manifest.run_id != run_id:
        return "its manifest"
    lanes = {worker.name for worker in manifest.workers}
    lanes.update(artifact.lane for worker in manifest.workers for artifact in worker.artifacts)
    begins = tuple(f"{name}." for name in [*lanes, "manifest"])
    begins += tuple(artifact.path for worker in manifest.workers for artifact in worker.artifacts)
    found = [path.name for path in folder.iterdir()]
    return ", ".join(sorted(name for name in found if not name.lstrip(".").startswith(begins))[:3])


def _delete(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        logger.warning("%s cannot be removed completely; remove it by hand", folder)
