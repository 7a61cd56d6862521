"""A run behind a URL: claims its folder there, and uploads what the controller writes.

The files of a step wait in a folder of this host. The manifest goes last; what has arrived is removed here.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TypeVar

from verl_profiling.capture.finishing import BackgroundWork
from verl_profiling.identity import safe_name
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME
from verl_profiling.remote import RemoteFolder, copy_line
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch_log import OLDER_WATCH_LOG, WATCH_LOG

__all__ = ["RemoteRun", "in_time"]

logger = logging.getLogger(__name__)

T = TypeVar("T")


def in_time(function: Callable[[], T], timeout_s: float) -> T:
    """Return what a function returns that talks to a store, or raise what it raised.

    Raises:
        TimeoutError: It takes longer.
    """
    answer: Future[T] = Future()

    def call() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=call, name="remote-run", daemon=True).start()
    return answer.result(timeout_s)


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
        names = (RUN_NAME, OLDER_WATCH_LOG, WATCH_LOG)
        wanted = [*(self.folder / name for name in names), *([folder / MANIFEST_NAME] if folder else ())]
        for path in wanted:
            if path.exists() and path not in self._queued:
                self._queued.add(path)
                self._background.submit(partial(self._put, path))

    def _put(self, path: Path) -> None:
        self._queued.discard(path)
        inside = path.parent.relative_to(self.folder).as_posix()
        try:
            size = path.stat().st_size
            RemoteFolder(self.url).put(path, f"{inside}/{path.name}".removeprefix("./"), self._retry_s)
            self._sent[path] = size
        except Exception as error:  # each file system raises errors of its own
            logger.error(
                "%s was not uploaded to %s: %s: %s; it stays in %s",
                *(path.name, self.url, type(error).__name__, error, path.parent),
            )

    def drain(self, timeout_s: float) -> None:
        """Wait for the uploads."""
        if not self._background.drain(timeout_s):
            logger.error("uploads to %s were not done after %g s", self.url, timeout_s)

    def leave(self) -> None:
        """Remove what has arrived, and log what has not."""
        for path, size in self._sent.items():
            if path.exists() and path.stat().st_size == size:
                path.unlink()
        if any(names for _, _, names in os.walk(self.folder)):  # whose folders others may remove meanwhile
            logger.error(
                "files of run %s wait in %s. To upload them: %s",
                *(self.url, self.folder, copy_line(self.folder, self.url)),
            )
        else:
            shutil.rmtree(self.folder, ignore_errors=True)
