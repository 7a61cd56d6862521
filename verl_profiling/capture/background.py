"""Finishes artifacts in the background: compression, as a tool's ``Output.finish`` says, and uploads."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

import msgspec

from verl_profiling.afterwards.background import BackgroundWork
from verl_profiling.afterwards.uploads import Finish
from verl_profiling.manifest import Artifact

__all__ = ["Finisher"]

logger = logging.getLogger(__name__)


class Finisher:
    """Runs ``finish`` functions one after another, off the training path."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._background = BackgroundWork("finisher")
        self._unfinished: Counter[str] = Counter()

    def submit(
        self, capture_id: str, pending: Artifact, finish: Finish, done: Callable[[Artifact], object]
    ) -> None:
        """Queue the rest of the work on an artifact.

        Args:
            capture_id: The capture.
            pending: The artifact as it is now.
            finish: Does the work.
            done: Called with the artifact's final status.
        """

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
            done(artifact)
            with self._lock:
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
