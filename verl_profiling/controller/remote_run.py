"""A run behind a URL: claims its folder there, and uploads what the controller writes.

The files of a step wait in a folder of this host. The manifest goes last; what has arrived is removed here.
"""

from __future__ import annotations

import logging
import shutil
import threading
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.afterwards.uploads import Retries, remove_empty
from verl_profiling.errors import TraceFormatError
from verl_profiling.identity import safe_name
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, RunInfo
from verl_profiling.remote import RemoteFolder, put_again
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG

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

    def run(self) -> RunInfo | None:
        """Read what a run left; ``None`` if there is none.

        Raises:
            TraceFormatError: It cannot be read.
        """
        if RUN_NAME not in self._names:
            return None
        try:
            return msgspec.json.decode(self.folder.read(RUN_NAME), type=RunInfo)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceFormatError(f"{self.label}/{RUN_NAME}", f"not the file of a run: {error}") from error

    def steps(self) -> set[str]:
        """Return the names of the step folders."""
        return {name for name in self._names if name.startswith("step_")}

    def create(self, info: RunInfo) -> bool:
        """Write a run's file unless it exists; return whether."""
        created = self.folder.create(RUN_NAME, msgspec.json.format(msgspec.json.encode(info), indent=2))
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
    """Uploads the loop's files of a run.

    Args:
        config: The settings.
        run_id: The run.
        url: The run's folder.
    """

    def __init__(self, config: ProfilingConfig, run_id: str, url: str) -> None:
        self.url = url
        self.folder = config.local_folder / f"{safe_name(run_id)}-{uuid.uuid4().hex[:8]}"
        self._retry_s = config.remote.retry_s
        self._background = BackgroundWork("upload")
        self._sent: dict[Path, int] = {}
        self._queued: set[Path] = set()
        self.folder.mkdir(parents=True, mode=0o700)

    def publish(self, folder: Path | None = None) -> None:
        """Upload, in the background, the run's files, and the manifest of a step as it is by then."""
        manifest = folder / MANIFEST_NAME if folder is not None else self.folder
        if manifest in self._queued:
            return
        self._queued.add(manifest)
        retries = Retries(self._retry_s)

        def work() -> float | None:
            self._queued.discard(manifest)
            try:
                self._put_run_files()
                if folder is not None:
                    self._put(RemoteFolder(f"{self.url}/{folder.name}"), manifest)
            except Exception as error:  # each file system raises errors of its own
                wait_s = retries.next_s()
                if wait_s is None:
                    logger.error(
                        "%s was not uploaded to %s: %s: %s; it stays in %s",
                        *(manifest.name, self.url, type(error).__name__, error, manifest.parent),
                    )
                return wait_s
            return None

        self._background.submit(work)

    def _put_run_files(self) -> None:
        remote = RemoteFolder(self.url)
        if (self.folder / RUN_NAME).exists():
            self._put(remote, self.folder / RUN_NAME)
        for name in (OLDER_WATCH_LOG, WATCH_LOG):
            if (self.folder / name).exists():
                self._put(remote, self.folder / name)

    def _put(self, remote: RemoteFolder, path: Path) -> None:
        """Upload a file as it is now; it may be written again meanwhile."""
        copy = path.with_name(f".{path.name}.upload")
        shutil.copyfile(path, copy)
        try:
            remote.put(copy, path.name)
            self._sent[path] = copy.stat().st_size
        finally:
            copy.unlink()

    def drain(self, timeout_s: float) -> None:
        """Wait for the uploads; their thread ends with them."""
        if not self._background.close(timeout_s):
            logger.error("uploads to %s were not done after %g s", self.url, timeout_s)

    def leave(self) -> None:
        """Remove what has arrived, and log what has not."""
        for path, size in self._sent.items():
            if path.exists() and path.stat().st_size == size:
                path.unlink()
        if not remove_empty(self.folder):
            logger.error(
                "files of run %s wait in %s. To upload them: %s",
                *(self.url, self.folder, put_again(self.folder, self.url)),
            )
