"""Does what is left to do on artifacts in the background, and keeps the outcome until it is asked for.

What that is, a tool says: the ``finish`` of its ``Output`` (compression is in ``tools/trace_file.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter

import msgspec

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.afterwards.uploads import Finish
from verl_profiling.capture.messages import Finished
from verl_profiling.manifest import Artifact

__all__ = ["Finisher"]

logger = logging.getLogger(__name__)


class Finisher:
    """Runs ``finish`` functions one after another, off the training path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._background = BackgroundWork("finisher")
        self._unfinished: Counter[str] = Counter()
        self._finished: list[Finished] = []

    def submit(self, capture_id: str, pending: Artifact, finish: Finish) -> None:
        """Queue the rest of the work on an artifact."""

        def work() -> float | None:
            try:
                artifact = finish()
            except Exception as error:
                logger.exception("finishing %s failed", pending.path)
                artifact = msgspec.structs.replace(
                    pending, status="failed", reason=f"finishing it raised {type(error).__name__}: {error}"
                )
            if not isinstance(artifact, Artifact):
                return artifact
            with self._lock:
                self._finished.append(Finished(capture_id, artifact))
                self._unfinished[capture_id] -= 1
            return None

        with self._lock:
            self._unfinished[capture_id] += 1
        self._background.submit(work)

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether it was done in time."""
        return self._background.drain(timeout_s)

    def is_done(self, capture_id: str) -> bool:
        """Return whether nothing is left to do on the artifacts of a capture."""
        with self._lock:
            self._unfinished += Counter()  # drops the captures that are done
            return capture_id not in self._unfinished

    def take_finished(self) -> list[Finished]:
        """Return the artifacts that were finished since the last call."""
        with self._lock:
            finished, self._finished = self._finished, []
        return finished
