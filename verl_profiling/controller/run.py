"""The folder of a run: its ``run.json``, and its step folders, bounded by the settings
``limits``.

If ``save_path`` is a URL, files are staged in a local folder, and deleted there after the upload.

A step folder is never removed if it has files that this run did not write. The folder is renamed
before it is removed, so a crash leaves no half-removed folder under the step's name.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from verl_profiling.capture.finishing import BackgroundWork
from verl_profiling.controller.loop_state import OpenCapture
from verl_profiling.controller.run_claim import RunPlace, claim_folder
from verl_profiling.controller.spmd import Ranks
from verl_profiling.controller.worker_calls import Waits, settle
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.machine import no_room
from verl_profiling.files.opener import make_folder, remove_file
from verl_profiling.files.process_marks import START_UP
from verl_profiling.files.remote import RemoteFolder, Upload, copy_line
from verl_profiling.files.run_files import (
    HANGS,
    RESULT_SUFFIX,
    pending_results,
    read_manifest,
    write_json_atomically,
)
from verl_profiling.files.watch_log import OLDER_WATCH_LOG, WATCH_LOG
from verl_profiling.identity import ProcessId, step_folder_name
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, CaptureResult, Manifest, RunInfo
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.units import visible

logger = logging.getLogger(__name__)

# A full disk or a lost connection often lasts only seconds.
_TRIES = 5
_AGAIN_S = 1.0
_WRITE_S = 1.0
"""Longest wait (s) of a callback's hook for the disk. On a healthy disk, files are written when the
hook returns.
"""

_Content = Callable[[], msgspec.Struct]
"""Function that returns the content of a file, called when the file is written."""


class Run:
    """A run: its folder, claimed at the first use, with ``run.json`` and the step folders.

    Files are written in the background, as a slow disk must not hold up the loop. A file that
    cannot be written is tried again; at the end, ``run.json`` names those that are not.

    Args:
        config: The settings; ``save_path`` is the run's folder unless another run owns that folder.

    Attributes:
        claimed: The run's folder, after this process has claimed it or received its path from rank
            0.
        info: Content of ``run.json``; ``None`` in processes that did not claim the folder.
        resumes: Whether an earlier run with the same ``run_id`` recorded there.
        background: Uploads files, and removes folders.
    """

    def __init__(self, config: ProfilingConfig) -> None:
        self._config = config
        self.claimed: RunPlace | None = None
        self.info: RunInfo | None = None
        self.resumes = False
        self.background = BackgroundWork("folders")
        self._sent: dict[Path, int] = {}
        self._recordings: Counter[int] = Counter()
        self._no_room = ""
        self._stored: list[Path] = []
        self._leaving: list[Path] = []
        self._captured: list[str] = []
        self._removed: list[str] = []
        self._not_captured: dict[int, str] = {}
        self._writer = BackgroundWork("files")
        self._maker = BackgroundWork("steps")  # no step waits for the files of the last one
        self._unwritten: dict[Path, _Content] = {}
        self._given_up: dict[Path, _Content] = {}  # until the end of training
        self._problems: dict[str, str] = {}
        self._lock = threading.Lock()  # guards info
        ProcessId.current()  # cached, so that no step reads /proc

    @property
    def place(self) -> RunPlace:
        """The run's folder, URL and name.

        The first access chooses the folder, and claims it by creating ``run.json``.
        """
        if self.claimed is None:
            self.claimed, self.info, self.resumes = claim_folder(self._config)
            if self._not_captured:
                self.amend(not_captured=self._not_captured)
        return self.claimed

    @property
    def path(self) -> Path:
        """The run's folder on this host."""
        return Path(self.place.path)

    # run.json, and uploads.

    def amend(self, **fields: object) -> None:
        """Replace fields of ``run.json``, and list the captures so far."""
        if self.info is None:
            return
        with self._lock:
            lists = {"captured": [*self._captured], "removed": [*self._removed]}
            self.info = info = replace(self.info, **lists, **fields)
        self._save(self.path / RUN_NAME, lambda: info)
        self.publish()

    def publish(self, folder: Path | None = None) -> None:
        """Upload the run's files and the manifest of a step folder, in the background."""
        if self.info is not None and self.place.url is not None:
            self._writer.submit(partial(self._publish, self.place.url, folder))

    def _publish(self, url: str, folder: Path | None) -> None:
        paths = [self.path / name for name in (RUN_NAME, START_UP, OLDER_WATCH_LOG, WATCH_LOG)]
        if folder is not None:
            paths.append(folder / MANIFEST_NAME)
        hangs = self.path / HANGS
        paths += sorted(hangs.rglob("*.json"))
        for path in filter(Path.exists, paths):
            self.background.submit(partial(self._put, path, url))
        for path in [one for one in list(self._sent) if one.parent == hangs and not one.exists()]:
            self.background.submit(partial(self._drop, path, url))

    def _drop(self, path: Path, url: str) -> None:
        """Remove the uploaded file of a process in a hang that is over."""
        del self._sent[path]
        with suppress(Exception):  # each file system raises errors of its own
            RemoteFolder(url).remove(path.relative_to(self.path).as_posix())

    def _save(self, path: Path, content: _Content) -> None:
        self._given_up.pop(path, None)
        self._unwritten[path] = content
        self._writer.submit(self._write_all)

    def _write_all(self) -> None:
        """Write the queued files; retry failed ones for some seconds, then leave them to
        :meth:`drain`.
        """
        for _ in range(_TRIES):
            written = [
                self._write(path, self._unwritten.pop(path)) for path in list(self._unwritten)
            ]
            if all(written):
                return
            time.sleep(_AGAIN_S)
        for path in list(self._unwritten):
            self._given_up[path] = self._unwritten.pop(path)

    def _write(self, path: Path, content: _Content) -> bool:
        """Write a file; return ``False`` if that should be tried again."""
        try:
            write_json_atomically(path, content())
        except FileNotFoundError as error:
            logger.warning("%s is not written, as its folder was removed: %s", path, error)
        except OSError as error:
            if path.parent.name not in self._problems:
                logger.error("%s cannot be written, and will be tried again: %s", path, error)
            self._problems[path.parent.name] = f"{path.name} cannot be written: {error}"
            self._unwritten.setdefault(path, content)  # unless there is newer content
            return False
        else:
            self._problems.pop(path.parent.name, None)
        return True

    def wait_for_files(self) -> None:
        """Wait until files are written, but no longer than a hook may wait for the disk."""
        self._writer.drain(_WRITE_S)

    def _put(self, path: Path, url: str) -> None:
        try:
            written_ns = path.stat().st_mtime_ns
            if self._sent.get(path) != written_ns:
                RemoteFolder(url).put(
                    path, path.relative_to(self.path).as_posix(), self.place.retry_s
                )
                self._sent[path] = written_ns
            self._problems.pop(path.parent.name, None)
        except Exception as error:  # each file system raises errors of its own
            logger.error(
                "%s was not uploaded to %s: %s: %s; the file stays in %s",
                path.name,
                visible(url),
                type(error).__name__,
                visible(str(error)),
                path.parent,
            )
            why = f"{path.name} was not uploaded: {type(error).__name__}: {error}"
            self._problems[path.parent.name] = visible(why)

    def drain(self, timeout_s: float) -> None:
        """Wait for writes, uploads and removals; ``run.json`` lists what failed."""
        until_s = time.monotonic() + timeout_s
        for path, content in list(self._given_up.items()):
            self._save(path, content)
        written = self._writer.drain(timeout_s)
        if not self.background.drain(until_s - time.monotonic()) or not written:
            where = visible(self.place.url or str(self.path))
            logger.error(
                "%s: writes, uploads or removals were not done after %g s", where, timeout_s
            )
        if self._problems:
            self.amend(failed=dict(self._problems))
            self._writer.drain(_WRITE_S)
            self.background.drain(_WRITE_S)

    def leave(self) -> None:
        """Delete the local copies of uploaded files; log how to upload the remaining ones."""
        if self.info is None or self.place.url is None:
            return
        for path, written_ns in list(self._sent.items()):  # a late upload may be added
            if path.exists() and path.stat().st_mtime_ns == written_ns:
                remove_file(path)
        # os.walk() skips folders that others remove.
        if any(names for _, _, names in os.walk(self.path)):
            logger.error(
                "files of run %s wait in %s. To upload them: %s",
                visible(self.place.url),
                self.path,
                copy_line(self.path, self.place.url),
            )
        else:
            shutil.rmtree(self.path, ignore_errors=True)

    def not_captured(self, step: int, why: str) -> None:
        """Record in ``run.json`` why the capture of a step could not begin."""
        self._not_captured[step] = why
        self.amend(not_captured=self._not_captured)

    # Step folders.

    def share_run(self, ranks: Ranks, step: int) -> Waits[bool]:
        """Publish the path of the run's folder on rank 0, else wait for it;
        return whether it is known.
        """
        wait_s = self._config.timeouts.start_s
        if ranks.leads:
            ranks.publish(self.place)
        elif self.claimed is None:
            yield partial(ranks.wait_for_run, wait_s)
            self.claimed = ranks.place
            if self.claimed is None:
                logger.error(
                    "step %d: rank %d is not captured: rank 0 began no captured step within %g s; "
                    "give it a callback with workers and the same settings, or let ranks record "
                    "alone (spmd: false)",
                    step,
                    ranks.rank,
                    wait_s,
                )
        return self.claimed is not None

    def _no_room_for(self, step: int, notes: list[str]) -> str:
        """Return why the limits leave no room, else ``""``; the first refused step is logged."""
        why = no_room(self.path, self._config.limits.min_free_bytes)
        if why and not self._no_room:
            logger.warning("captures stop at step %d, until there is room: %s", step, why)
            self.not_captured(step, f"{why}; captures stopped until there was room")
            self._no_room = f"captures stopped at step {step} ({why}), and go on now"
        elif self._no_room and not why:
            notes.append(self._no_room)
            self._no_room = ""
        return why

    def prepare(
        self, step: int, keep: bool, shared: bool, notes: list[str]
    ) -> Waits[tuple[Path, str]]:
        """Make the folder of a step in the background, and wait for it.

        Args:
            step: Number of the step.
            keep: ``False`` for a warm-up, for which no folder is made.
            shared: Whether another rank may have made the folder already.
            notes: Gets a note on refused steps when the limits leave room again.

        Returns:
            The folder, which is the same on all ranks, and why the limits leave no room; empty if
            they do.

        Raises:
            TimeoutError: It was not made in time, or the late folder of an earlier step is still
                being made.
        """
        if not self._maker.drain(0):
            raise TimeoutError(
                "the folder of an earlier step is still being made; is its disk slow?"
            )
        prepared: Future[tuple[Path, str]] = Future()
        self._maker.submit(partial(self._prepare, prepared, step, keep, shared, notes))
        start_s = self._config.timeouts.start_s
        yield partial(self._maker.drain, start_s)  # makes it here if no thread can start
        if prepared.cancel():
            raise TimeoutError(
                f"the step's folder was not made within timeouts.start_s={start_s:g}"
            )
        folder, why = prepared.result()
        if keep and not why:
            self._captured.append(folder.name)
            self.amend()
        return folder, why

    def _prepare(
        self,
        prepared: Future[tuple[Path, str]],
        step: int,
        keep: bool,
        shared: bool,
        notes: list[str],
    ) -> None:
        """Make the folder of a step, and remove it if nobody waits for it any more."""

        def make() -> tuple[Path, str]:
            why = self._no_room_for(step, notes) if keep else ""
            return (self.path if why else self._make(step, keep, shared)), why

        made = settle(Future(), make)
        if prepared.set_running_or_notify_cancel():
            settle(prepared, made.result)
        elif keep and not shared and made.exception() is None:
            # Other ranks may record into a shared folder.
            folder, why = made.result()
            if not why:
                folder.rmdir()

    def _make(self, step: int, keep: bool, shared: bool) -> Path:
        self._recordings[step] += keep
        folder = self.path / step_folder_name(step, self._recordings[step])
        if keep:
            make_folder(folder, exist_ok=shared)
        return folder

    def write(self, live: OpenCapture) -> Manifest:
        """Write the manifest of an open capture, and return the manifest."""
        manifest = live.manifest()
        self._save(live.folder / MANIFEST_NAME, partial(self._content, live, manifest))
        if live.end_ns:
            self.publish(live.folder)
        return manifest

    def _content(self, live: OpenCapture, manifest: Manifest) -> Manifest:
        """Return a manifest with later notes, and with the paths of files on other hosts' disks."""
        notes = [*manifest.notes, *live.notes]
        workers = manifest.workers
        if live.end_ns and self.place.url is None:
            workers = _located(live.folder, workers, notes)
        return replace(manifest, workers=workers, notes=list(dict.fromkeys(notes)))

    def conclude(self, live: OpenCapture) -> Manifest:
        """Write the final manifest of a capture,
        and remove step folders beyond ``limits.keep_last``.
        """
        keep_last = self._config.limits.keep_last
        if keep_last is not None:
            self._writer.submit(partial(self._find_leaving, live, keep_last))
        manifest = self.write(live)
        if keep_last is not None:
            self._writer.submit(self._remove_leaving)
        return manifest

    def _remove_leaving(self) -> None:
        """Rename older step folders at once, and delete them in the background."""
        for older in self._leaving:
            try:
                hidden = older.rename(older.with_name(f".{older.name}.removed"))
            except OSError as error:
                logger.warning("%s cannot be removed: %s", older, error)
            else:
                self._captured.remove(older.name)
                self._removed.append(older.name)
                self.background.submit(partial(shutil.rmtree, hidden))
        if self._leaving:
            self.amend()
        self._leaving = []

    def _find_leaving(self, live: OpenCapture, keep_last: int) -> None:
        """Find older step folders to remove, with a note each;
        a folder with pending artifacts is kept.
        """
        self._stored.append(live.folder)
        for older in self._stored[:-keep_last]:
            note = f"{older.name} was removed: limits.keep_last={keep_last}"
            try:
                manifest = read_manifest(older)
                if pending_results(manifest):
                    continue
                if strangers := _strangers(older, manifest, self.place.run_id):
                    note = (
                        f"{older.name} is kept beyond limits.keep_last: files of others "
                        f"({strangers})"
                    )
                else:
                    self._leaving.append(older)
            except (OSError, TraceFormatError) as error:
                note = f"{older.name} is kept beyond limits.keep_last: {error}"
            self._stored.remove(older)
            logger.info("%s", note)
            live.notes.append(note)


def _located(folder: Path, results: list[CaptureResult], notes: list[str]) -> list[CaptureResult]:
    """Return results with ``where`` set for artifacts on the disk of another host,
    and add a note.
    """
    seen = {*os.listdir(folder)}  # noqa: PTH208 (the loop waits for it)
    hosts: dict[str, None] = {}
    workers = []
    for worker in results:
        artifacts = []
        # The result file tells whether the disk is shared: artifacts may still be being written.
        shares_disk = f"{worker.name}{RESULT_SUFFIX}" in seen
        for artifact in worker.artifacts:
            names = {artifact.path, artifact.path.removesuffix(".gz")}
            is_elsewhere = not shares_disk and names.isdisjoint(seen) and not artifact.where
            written = artifact.status in ("ok", "pending", "truncated") and not artifact.reason
            if written and is_elsewhere:
                hosts[worker.identity.host] = None
                where = f"{worker.identity.host}:{worker.folder}/{artifact.path}"
                artifact = replace(artifact, where=where)
            artifacts.append(artifact)
        workers.append(replace(worker, artifacts=artifacts))
    if hosts:
        notes.append(
            f"files of {', '.join(hosts)} are not visible on this host; read them with --ray"
        )
    return workers


def is_pending(folder: Path, upload: Upload | None) -> bool:
    """Return whether a process may still write into a step folder.

    Args:
        folder: The step folder.
        upload: The upload target, if the step folder only stages files; a process uploads its
            result file last.
    """
    try:
        manifest = read_manifest(folder)
    except (OSError, TraceFormatError):
        return True  # it is not written yet
    if manifest.state == "begun":
        return True
    pending = pending_results(manifest)
    if upload is not None:
        pending.add(MANIFEST_NAME)
        with suppress(Exception):  # each file system raises errors of its own
            pending -= RemoteFolder(upload.url).names()
    return bool(pending)


def _strangers(folder: Path, manifest: Manifest, run_id: str) -> str:
    """Return up to three names of files that are not of this run."""
    if manifest.run_id != run_id:
        return "its manifest"
    begins = ["manifest."]
    for worker in manifest.workers:
        begins.append(f"{worker.name}.")
        for artifact in worker.artifacts:
            begins += [f"{artifact.lane}.", artifact.path]
    strangers = []
    for path in folder.iterdir():
        if not path.name.lstrip(".").startswith(tuple(begins)):
            strangers.append(path.name)
    return ", ".join(sorted(strangers)[:3])
