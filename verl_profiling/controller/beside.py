"""Writes a file beside the training loop, which does not wait for the disk."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from verl_profiling.manifest import Manifest
from verl_profiling.run_files import write_json_atomically

__all__ = ["BesideWriter"]

logger = logging.getLogger(__name__)


class BesideWriter:
    """Writes manifests on a thread that lives while there is one to write; of several, the latest."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next: tuple[Path, Manifest] | None = None
        self._thread: threading.Thread | None = None

    def write(self, path: Path, manifest: Manifest) -> None:
        """Write a manifest soon. An error is logged: the loop needs none of it."""
        with self._lock:
            self._next = (path, manifest)
            if self._thread is not None:
                return
            self._thread = threading.Thread(target=self._run, name="verl-profiling-beside", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the interpreter is shutting down, and starts no thread
            self._run()

    def settle(self) -> None:
        """Give up what is not being written yet, and wait for the rest."""
        with self._lock:
            self._next, thread = None, self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._lock:
                if self._next is None:
                    self._thread = None
                    return
                (path, manifest), self._next = self._next, None
            try:
                write_json_atomically(path, manifest)
            except OSError as error:
                logger.warning("a capture begins, and its folder does not say so: %s", error)
