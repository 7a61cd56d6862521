"""The recording of one window of an engine: its own traces, or a report of Nsight Systems."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.engines.artifacts import expected_artifacts, output_of
from verl_profiling.engines.base import EngineAdapter, FolderTool, TraceTool
from verl_profiling.engines.spool import Spool
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.tools.base import Output
from verl_profiling.tools.nsys import NsysTool, process_ranges

__all__ = ["EngineRecording", "RangeRecording", "RecordingMaker", "TraceRecording"]


class EngineRecording(ABC):
    """The recording of one window.

    Attributes:
        tool: Name of the tool that records.
        expected: The artifacts that the window will have if all goes well.
        notes: Further notes on it.
    """

    tool: str
    expected: list[Artifact]

    def __init__(self) -> None:
        self.notes: list[str] = []

    @abstractmethod
    def opened(self) -> None:
        """Handle that the engine records from now on.

        Raises:
            OSError: A file that this needs cannot be written.
        """

    @abstractmethod
    def gather(self, end_ns: int, problem: str) -> list[Output]:
        """Return the expected artifacts with their status, once the engine has stopped.

        Args:
            end_ns: When the window was closed.
            problem: Why stopping failed; empty if it did not.
        """

    @abstractmethod
    def drop(self) -> None:
        """Handle that the engine did not start."""

    def _begin_now(self) -> None:
        now_ns = clock.now_ns()
        self.expected = [msgspec.structs.replace(artifact, begin_ns=now_ns) for artifact in self.expected]


RecordingMaker = Callable[[CaptureRequest, str, Sequence[int]], EngineRecording]
"""Makes the recording of a window from its request, its label, and the selected ranks of the replica."""


class TraceRecording(EngineRecording):
    """The traces that an engine's ranks write into its spool folder.

    Args:
        engine: The engine.
        identity: The replica.
        tool: What records it.
        request: The capture.
        label: Its label.
        ranks: The ranks inside the replica that are selected.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        identity: WorkerIdentity,
        tool: TraceTool | FolderTool,
        request: CaptureRequest,
        label: str,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self._engine = engine
        self._name = identity.name
        self.tool = tool.name
        self._recorder = tool
        self._request = request
        by_trace = expected_artifacts(request, identity, engine, tool, ranks)
        self._traces = list(by_trace)
        self.expected = list(by_trace.values())
        self._spool = Spool(engine, label)

    def opened(self) -> None:
        self._begin_now()

    def gather(self, end_ns: int, problem: str) -> list[Output]:
        folder = Path(self._request.folder)
        raws = self._spool.take() if self._request.keep else {}
        outputs = []
        for trace, expected in zip(self._traces, self.expected, strict=True):
            artifact = msgspec.structs.replace(expected, end_ns=end_ns)
            raw = raws.get(trace)
            if raw is None:
                outputs.append(Output(self._without_file(artifact, problem)))
            else:
                outputs.append(output_of(raw, folder, artifact, self._recorder, self._engine.device))
        if self._request.keep:
            self.notes.extend(self._spool.keep_extras(folder, self._name))
        self._spool.clear()
        return outputs

    def drop(self) -> None:
        self._spool.clear()

    def _without_file(self, artifact: Artifact, problem: str) -> Artifact:
        if self._engine.window.bounded and not problem:
            reason = f"the window was never reached ({self._engine.window})"
            return msgspec.structs.replace(artifact, status="empty", reason=reason)
        reason = (
            problem or f"{self._engine.name} reported no error and wrote no trace; its own log may say why"
        )
        return msgspec.structs.replace(artifact, status="failed", reason=reason)


class RangeRecording(EngineRecording):
    """One range in all processes of the replica; its report is collected after the run.

    Args:
        identity: The replica.
        tool: What records it.
        request: The capture.
        label: Its label.
        ranks: The ranks inside the replica that are selected.

    Raises:
        CaptureStateError: The tool would not record another range.
    """

    def __init__(
        self,
        identity: WorkerIdentity,
        tool: NsysTool,
        request: CaptureRequest,
        label: str,
        ranks: Sequence[int],
    ) -> None:
        super().__init__()
        self.tool = tool.name
        self._ranges = process_ranges()
        self._ranges.check(identity.name)
        self._request = request
        self.expected = [
            expected_artifact(identity.name, tool.name, tool.suffix, request.stage, request.occurrence)
        ]

    def opened(self) -> None:
        self._begin_now()
        self._ranges.note_opened(Path(self._request.folder), self.expected[0].path)

    def gather(self, end_ns: int, problem: str) -> list[Output]:
        artifact = msgspec.structs.replace(self.expected[0], end_ns=end_ns)
        run = Path(self._request.folder).parent
        pending = self._ranges.note_closed(artifact, run, keep=self._request.keep)
        if problem:
            return [Output(msgspec.structs.replace(artifact, status="failed", reason=problem))]
        return [Output(pending)]

    def drop(self) -> None:
        """Do nothing: no range was opened."""
