"""The ``trajectories`` tool: the spans of each trajectory of a rollout,
and the lag of event loops.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from verl_profiling.files.trajectory_log import LOG_SUFFIX, write_log
from verl_profiling.manifest import Artifact
from verl_profiling.tools.base import Destination, Output, Recording, Tool
from verl_profiling.trajectories.open_log import OpenLog
from verl_profiling.trajectories.spans import keep_trajectories, start_log, stop_log
from verl_profiling.typed_values import Positive


@dataclass(frozen=True, kw_only=True)
class TrajectoriesOptions:
    """Options of the ``trajectories`` tool.

    Attributes:
        max_spans: Maximum number of spans that a process keeps in a capture, and also of
            trajectories. Each takes about 400 bytes of memory. Further ones are only counted and
            reported.
    """

    max_spans: Positive = 200_000


class TrajectoriesTool(Tool):
    """Records :func:`verl_profiling.trajectory` and :func:`verl_profiling.span`, and the lag of
    event loops.

    The file is read by :func:`verl_profiling.files.trajectory_log.read_log`.
    """

    name = "trajectories"
    suffix = LOG_SUFFIX
    options_class = TrajectoriesOptions
    options: TrajectoriesOptions

    def prepare(self) -> None:
        """Remember open trajectories, for captures that begin during a trajectory."""
        keep_trajectories()

    def start(self, destination: Destination) -> Recording:
        """Start to record into a new log."""
        log = OpenLog(self.options.max_spans)
        start_log(log)
        return _TrajectoryRecording(destination, log)


@dataclass(eq=False)
class _TrajectoryRecording(Recording):
    _destination: Destination
    _log: OpenLog

    def stop(self) -> Sequence[Output]:
        self.discard()
        artifact = self._destination.artifact(TrajectoriesTool)
        events = len(self._log.spans) + len(self._log.trajectories)
        if not events:
            reason = "no trajectory and no span ran in this process"
            return [Output(artifact.with_status("skipped", reason))]
        pending = artifact.with_status("pending", events=events)
        return [Output(pending, lambda: self._written(pending))]

    def discard(self) -> None:
        stop_log(self._log)
        self._log.end()

    def _written(self, artifact: Artifact) -> Artifact:
        log = self._log.close(self._destination.lane)
        size = write_log(self._destination.path(LOG_SUFFIX), log)
        if not log.spans_left_out + log.trajectories_left_out:
            return artifact.with_status("ok", bytes=size)
        reason = (
            f"{log.spans_left_out:,} spans and {log.trajectories_left_out:,} trajectories after "
            f"the first {self._log.max_spans:,} were left out; raise tools.trajectories.max_spans "
            "to keep them"
        )
        return artifact.with_status("truncated", reason, bytes=size)
