"""Runs what is left to do on artifacts on one background thread, which is started when there is work.

What that is, a tool says: the ``finish`` of its ``Output`` (compression is in ``tools/trace_file.py``).
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import msgspec

from verl_profiling.capture.messages import Finished
from verl_profiling.manifest import Artifact

__all__ = ["Finisher"]

logger = logging.getLogger(__name__)

_IDLE_S = 2.0


class Finisher:
    """Runs ``finish`` functions one after another, off the training path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._work: queue.SimpleQueue[tuple[str, Artifact, Callable[[], Artifact]]] = queue.SimpleQueue()
        self._unfinished = 0
        self._running = False
        self._finished: list[Finished] = []

    def submit(self, capture_id: str, pending: Artifact, finish: Callable[[], Artifact]) -> None:
        """Queue the rest of the work on an artifact."""
        with self._lock:
            self._unfinished += 1
            self._work.put((capture_id, pending, finish))
            if not self._running:
                self._running = True
                threading.Thread(target=self._run, name="verl-profiling-finisher", daemon=True).start()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether it was done in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            return self._changed.wait_for(lambda: not self._unfinished, max(0.0, deadline - time.monotonic()))

    def take_finished(self) -> list[Finished]:
        """Return the artifacts that were finished since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished

    def _run(self) -> None:
        while True:
            try:
                capture_id, pending, finish = self._work.get(timeout=_IDLE_S)
            except queue.Empty:
                with self._lock:
                    if self._work.empty():
                        self._running = False
                        return
                continue
            try:
                artifact = finish()
            except Exception as error:
                logger.exception("finishing %s failed", pending.path)
                artifact = msgspec.structs.replace(
                    pending, status="failed", reason=f"finishing it raised {type(error).__name__}: {error}"
                )
            with self._changed:
                self._finished.append(Finished(capture_id, artifact))
                self._unfinished -= 1
                self._changed.notify_all()
