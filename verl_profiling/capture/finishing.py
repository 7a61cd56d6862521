"""Finishing artifacts while training goes on: compress, upload, and note the outcome."""

from __future__ import annotations

import logging
import socket
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.manifest import Artifact
from verl_profiling.remote import Upload, copy_line
from verl_profiling.tools import Output

logger = logging.getLogger(__name__)


class BackgroundWork:
    """Runs functions one after another, on a thread that exists while there is work.

    It is no executor of Python's, for which the interpreter waits at its end.

    Args:
        name: What it does, for the name of its thread.
        at_once: Where no thread starts, work is done on the caller's, else in :meth:`drain`.
    """

    def __init__(self, name: str, at_once: bool = True) -> None:
        self._name = name
        self._at_once = at_once
        self._changed = threading.Condition()
        self._work: deque[Callable[[], object]] = deque()
        self._running = False

    def submit(self, work: Callable[[], object]) -> None:
        """Queue a function."""
        with self._changed:
            self._work.append(work)
            if self._running:
                return
            self._running = True
        thread = threading.Thread(target=self._run, name=f"verl-profiling-{self._name}", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # the interpreter ends, and since Python 3.12 starts no thread
            with self._changed:
                self._running = False
            if self._at_once:
                self._run()

    def drain(self, timeout_s: float) -> bool:
        """Wait until all work is done; return whether it was done in time."""
        if not self._running and self._work:
            self._run()
        with self._changed:
            return self._changed.wait_for(lambda: not self._running, max(0.0, timeout_s))

    def _run(self) -> None:
        while True:
            with self._changed:
                if not self._work:
                    self._running = False
                    self._changed.notify_all()
                    return
                work = self._work.popleft()
            try:
                work()
            except Exception:
                logger.exception("%s: work in the background failed", self._name)


def finish(
    output: Output,
    background: BackgroundWork,
    request: CaptureRequest,
    done: Callable[[Artifact], object],
    complete: Callable[[Artifact], Artifact] = lambda artifact: artifact,
) -> Artifact:
    """Return an artifact as it is now, and queue the rest of the work on it.

    Args:
        output: What was recorded.
        background: Does the work.
        request: The capture.
        done: Called with the artifact's final status, if there is work.
        complete: Adds what the tool does not know.
    """
    compress, upload = output.finish, request.upload
    uploads = upload is not None and (compress or output.artifact.status in ("ok", "truncated"))
    artifact = complete(output.artifact)
    if not (compress or uploads):
        return artifact
    pending = msgspec.structs.replace(artifact, status="pending", reason="")

    def work() -> None:
        try:
            final = complete(compress()) if compress is not None else artifact
            if upload is not None:
                final = _uploaded(Path(request.folder), upload, final)
        except Exception as error:
            logger.exception("finishing %s failed", pending.path)
            reason = f"finishing it raised {type(error).__name__}: {error}"
            final = msgspec.structs.replace(pending, status="failed", reason=reason)
        done(final)

    background.submit(work)
    return pending


def _uploaded(folder: Path, upload: Upload, artifact: Artifact) -> Artifact:
    """Move a finished artifact to where it belongs; return it, with its place if that failed."""
    local = folder / artifact.path
    if not local.exists():  # empty or failed, or removed meanwhile
        return artifact
    try:
        upload.move(local, artifact.path)
    except Exception as error:  # each file system raises errors of its own
        logger.error(
            "%s was not uploaded: %s: %s; it stays in %s. To upload all that waits there: %s",
            *(artifact.path, type(error).__name__, error, folder, copy_line(folder, upload.url)),
        )
        reason = f"not uploaded: {type(error).__name__}: {error}"
        return msgspec.structs.replace(
            artifact,
            where=f"{socket.gethostname()}:{local}",
            reason="; ".join(filter(None, (artifact.reason, reason))),
        )
    return artifact
