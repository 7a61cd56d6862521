"""A run behind a URL: claims its folder there, and uploads what the controller writes.

The files of a step wait in a folder of this host. The manifest goes last; what has arrived is removed here.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.afterwards.uploads import Retries, Upload, remove_empty, remove_uploaded
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import safe_name
from verl_profiling.manifest import CONTROLLER_TRACE_NAME, MANIFEST_NAME, Manifest, RunInfo
from verl_profiling.remote import RemoteFolder, put_again
from verl_profiling.run_files import run_file_name
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG, has_watch_log

__all__ = ["RemotePlace", "RemoteRun", "in_time"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


class RemotePlace:
    """A folder behind a URL that a run may claim.

    Args:
        folder: The folder.
    """

    def __init__(self, folder: RemoteFolder) -> None:
        self.folder = folder
        self.label = folder.url
        self._names = folder.names()

    def inside(self, name: str) -> RemotePlace:
        """Return a folder inside."""
        return RemotePlace(self.folder.child(name))

    def starts(self) -> list[RunInfo]:
        """Read what the starts of a run left.

        Raises:
            TraceFormatError: One cannot be read.
        """
        starts: list[RunInfo] = []
        while (name := run_file_name(len(starts) + 1)) in self._names:
            try:
                starts.append(msgspec.json.decode(self.folder.read(name), type=RunInfo))
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise TraceFormatError(f"{self.label}/{name}", f"not the file of a run: {error}") from error
        return starts

    def steps(self) -> set[str]:
        """Return the names of the step folders."""
        return {name for name in self._names if name.startswith("step_")}

    def create(self, name: str, info: RunInfo) -> bool:
        """Write a run's file unless it exists; return whether."""
        created = self.folder.create(name, msgspec.json.format(msgspec.json.encode(info), indent=2))
        self._names = self.folder.names()
        return created


def in_time(function: Callable[[], T], timeout_s: float) -> T:
    """Return what a function returns that talks to a store, or raise what it raised.

    Raises:
        TimeoutError: It takes longer.
    """
    done: list[T] = []
    failed: list[BaseException] = []

    def call() -> None:
        try:
            done.append(function())
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=call, name="remote-run", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if failed:
        raise failed[0]
    if not done:
        raise TimeoutError(f"no answer within {timeout_s:g} s")
    return done[0]


class RemoteRun:
    """Uploads the controller's files of a run.

    Args:
        config: The settings.
        run_id: The run.
        url: The run's folder.
        steps: Names of the step folders that are there already.
    """

    def __init__(self, config: ProfilingConfig, run_id: str, url: str, steps: set[str]) -> None:
        self.url = url
        self.steps = steps
        self.folder = config.local_folder / f"{safe_name(run_id)}-{uuid.uuid4().hex[:8]}"
        self._retry_s = config.remote.retry_s
        self._background = BackgroundWork("upload")
        self._waiting: dict[Path, Manifest] = {}
        self._failed: set[Path] = set()
        self._sent: dict[Path, int] = {}
        self.folder.mkdir(parents=True, mode=0o700)

    def upload_of(self, folder: Path) -> Upload:
        """Return where the files of a step folder go."""
        return Upload(url=f"{self.url}/{folder.name}", retry_s=self._retry_s)

    def publish(self, folder: Path, manifest: Manifest) -> None:
        """Upload the controller's files of a step in the background, the manifest last.

        Artifacts that lie there, such as those of a worker that died, go before it.
        """
        is_queued = folder in self._waiting
        self._waiting[folder] = manifest
        if is_queued:
            return
        retries = Retries(self._retry_s)

        def work() -> float | None:
            sent = self._waiting[folder]
            try:
                self._put_run_files()
                remote = RemoteFolder(f"{self.url}/{folder.name}")
                for path in _files_of(folder, sent):
                    remote.put(path, path.name)
                    if path.name not in (MANIFEST_NAME, CONTROLLER_TRACE_NAME):
                        remove_uploaded(path)
            except Exception as error:  # each file system raises errors of its own
                wait_s = retries.next_s()
                if wait_s is not None:
                    return wait_s
                self._failed.add(folder)
                logger.error(
                    "%s was not uploaded to %s: %s: %s; it stays in %s",
                    *(folder.name, self.url, type(error).__name__, error, folder),
                )
            else:
                self._failed.discard(folder)
            if self._waiting[folder] is not sent:
                return 0.0  # it was written again meanwhile
            del self._waiting[folder]
            return None

        self._background.submit(work)

    def publish_run_files(self) -> None:
        """Upload, in the background, what is on record of the run's starts, and the watch's log."""
        retries = Retries(self._retry_s)

        def work() -> float | None:
            try:
                self._put_run_files()
            except Exception as error:  # each file system raises errors of its own
                wait_s = retries.next_s()
                if wait_s is None:
                    logger.error(
                        "run files not uploaded to %s: %s: %s", self.url, type(error).__name__, error
                    )
                return wait_s
            return None

        self._background.submit(work)

    def _put_run_files(self) -> None:
        remote = RemoteFolder(self.url)
        for path in self.folder.glob("run*.json"):
            remote.put(path, path.name)
            remove_uploaded(path)
        if has_watch_log(self.folder):
            self._put_watch_log(remote)

    def _put_watch_log(self, remote: RemoteFolder) -> None:
        """Upload the watch's log as it is now; what an earlier start left there becomes its older part."""
        older = self.folder / OLDER_WATCH_LOG
        if not self._sent and not older.exists() and WATCH_LOG in remote.names():
            older.write_bytes(remote.read(WATCH_LOG))
        for name in (OLDER_WATCH_LOG, WATCH_LOG):
            path = self.folder / name
            if path.exists():
                copy = path.with_suffix(".part")  # the log grows meanwhile
                shutil.copyfile(path, copy)
                remote.put(copy, name)
                self._sent[path] = copy.stat().st_size
                copy.unlink()

    def is_published(self, folder: Path) -> bool:
        """Return whether no upload of a step folder's manifest is due."""
        return folder not in self._waiting

    def drain(self, timeout_s: float) -> None:
        """Wait for the uploads; their thread ends with them."""
        if not self._background.close(timeout_s):
            logger.error("uploads to %s were not done after %g s", self.url, timeout_s)

    def leave(self) -> None:
        """Remove what has arrived, and name what has not."""
        for folder in sorted(self.folder.glob("step_*")):
            if folder not in self._failed and folder not in self._waiting:
                for name in (CONTROLLER_TRACE_NAME, MANIFEST_NAME):
                    (folder / name).unlink(missing_ok=True)
        for path, size in self._sent.items():
            if path.exists() and path.stat().st_size == size:
                path.unlink()
        if not remove_empty(self.folder):
            logger.error(
                "files of run %s wait in %s. To upload them: %s",
                *(self.url, self.folder, put_again(self.folder, self.url)),
            )


def _files_of(folder: Path, manifest: Manifest) -> Iterator[Path]:
    """Yield what of a step folder the controller uploads, in order."""
    for worker in manifest.workers:
        for artifact in worker.artifacts:
            path = folder / artifact.path
            if artifact.status in ("ok", "truncated") and not artifact.where and path.exists():
                yield path
    yield from (path for path in (folder / CONTROLLER_TRACE_NAME, folder / MANIFEST_NAME) if path.exists())
