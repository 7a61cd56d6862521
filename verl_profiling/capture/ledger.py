"""The artifacts of one capture, from being expected to their final status."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from verl_profiling import clock
from verl_profiling.afterwards.uploads import Finish, uploaded
from verl_profiling.capture.background import Finisher
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.manifest import Artifact
from verl_profiling.tools import Destination, Output, Tool

__all__ = ["ArtifactLedger"]


class ArtifactLedger:
    """Keeps one entry per artifact, from the moment it is expected.

    Args:
        request: The capture.
        finisher: Does the background work on artifacts.
        done: Called with an artifact that a stage has left, and with the final status of what is finished
            in the background.
    """

    def __init__(
        self,
        request: CaptureRequest,
        finisher: Finisher,
        done: Callable[[Artifact], object],
    ) -> None:
        self._request = request
        self._finisher = finisher
        self._done = done
        self._entries: dict[str, Artifact] = {}

    def artifacts(self) -> list[Artifact]:
        """Return all entries, in the order in which they were expected."""
        return list(self._entries.values())

    def expect(self, tool: Tool, destination: Destination) -> None:
        """Add the artifact of a tool that is about to record; a tool that writes none has no entry."""
        if tool.suffix:
            expected = destination.artifact(type(tool))
            self._entries[expected.path] = expected

    def begin(self, stage: str | None) -> None:
        """Set the begin of everything expected of a stage, which records from now on."""
        now_ns = clock.now_ns()
        for path, artifact in self._entries.items():
            if artifact.stage == stage and not artifact.begin_ns:
                self._entries[path] = msgspec.structs.replace(artifact, begin_ns=now_ns)

    def keep(self, outputs: Sequence[Output], end_ns: int, truncated: str = "") -> None:
        """Enter what a recording wrote, and queue the rest of the work for the background.

        Args:
            outputs: What it wrote.
            end_ns: When it stopped.
            truncated: Why it stopped before its time.
        """
        for output in outputs:
            written, finish = uploaded(output, self._request.folder, self._request.upload)
            expected = next(
                (
                    known
                    for known in self._entries.values()
                    if known.status == "missing" and known.is_run_of(written)
                ),
                written,
            )
            complete = _completing(expected.begin_ns, end_ns, truncated)
            artifact = complete(written)
            if finish is not None:
                artifact = msgspec.structs.replace(artifact, status="pending")
            if artifact.path != expected.path:
                self._entries.pop(expected.path, None)
            self._entries[artifact.path] = artifact
            if artifact.stage is not None:  # more follows, and this process may be killed meanwhile
                self._done(artifact)
            if finish is not None:
                self._finisher.submit(self._request.capture_id, artifact, _then(finish, complete), self._done)

    def skip(self, tool: Tool, destination: Destination, reason: str) -> None:
        """Note that a tool did not record on purpose; one that writes nothing has no entry."""
        if tool.suffix:
            skipped = msgspec.structs.replace(
                destination.artifact(type(tool)), status="skipped", reason=reason
            )
            self._entries[skipped.path] = skipped

    def fail(self, tool: Tool, destination: Destination, reason: str) -> None:
        """Enter that a tool failed to record or to write."""
        artifact = destination.artifact(type(tool))
        self._entries[artifact.path] = msgspec.structs.replace(artifact, status="failed", reason=reason)


def _completing(begin_ns: int, end_ns: int, truncated: str) -> Callable[[Artifact], Artifact]:
    """Return what adds to an artifact what its tool does not know."""

    def complete(artifact: Artifact) -> Artifact:
        artifact = msgspec.structs.replace(artifact, begin_ns=begin_ns, end_ns=end_ns)
        if truncated and artifact.status == "ok":
            artifact = msgspec.structs.replace(artifact, status="truncated", reason=truncated)
        return artifact

    return complete


def _then(finish: Finish, complete: Callable[[Artifact], Artifact]) -> Finish:
    def finished() -> Artifact | float:
        artifact = finish()
        return complete(artifact) if isinstance(artifact, Artifact) else artifact

    return finished
