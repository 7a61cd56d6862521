"""The recording of one window of an engine: its own traces, or a report of Nsight Systems."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
from isal import igzip

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.engines.adapter import EngineAdapter, EngineTrace, is_spool
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.tools.base import Output
from verl_profiling.tools.npu import NpuTool, output_of_recording
from verl_profiling.tools.nsys import NsysTool, process_ranges
from verl_profiling.tools.torch_profiler import TorchTool
from verl_profiling.tools.trace_file import CUDA, EventCount, output_of_raw_trace, without_device

__all__ = ["RangeRecording", "TraceRecording", "output_of"]


class TraceRecording:
    """The traces that an engine's ranks write into its spool folder, whatever the step.

    Attributes:
        label: Name of the capture.
        expected: The artifacts that the window will have if all goes well.
        notes: Further notes on it.

    Args:
        engine: The engine.
        tool: What records it.
        identity: The replica.
        request: The capture.
        ranks: The ranks inside the replica that are selected.

    Raises:
        OSError: The spool folder cannot be made.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        tool: TorchTool | NpuTool,
        identity: WorkerIdentity,
        request: CaptureRequest,
        ranks: Sequence[int],
    ) -> None:
        self.label = _label(request)
        self.notes: list[str] = []
        self._engine = engine
        self._tool = tool
        self._request = request
        self._traces = [EngineTrace(rank, part) for rank in ranks for part in engine.stages]
        self.expected = [
            expected_artifact(
                identity.lane(rank),
                tool.name,
                tool.suffix,
                "-".join(filter(None, (request.stage, part))) or None,
                request.occurrence,
            )
            for rank, part in self._traces
        ]
        engine.spool.mkdir(parents=True, exist_ok=True)
        self._before = set(engine.spool.iterdir())

    def opened(self) -> None:
        """Handle that the engine records from now on."""
        self.expected = _begun(self.expected)

    def gather(self, end_ns: int, problem: str) -> list[Output]:
        """Return the expected artifacts with their status, once the engine has stopped.

        Args:
            end_ns: When the window was closed.
            problem: Why stopping failed; empty if it did not.
        """
        folder, outputs = Path(self._request.folder), []
        raws = self._written() if self._request.keep else {}
        for trace, expected in zip(self._traces, self.expected, strict=True):
            artifact = msgspec.structs.replace(expected, end_ns=end_ns)
            if trace in raws:
                outputs.append(output_of(raws[trace], folder, artifact, self._tool, self._engine.device))
            else:
                outputs.append(Output(self._without_file(artifact, problem)))
        self.drop()
        return outputs

    def drop(self) -> None:
        """Remove what is left in the spool: tables, and traces of ranks that are not selected."""
        if is_spool(self._engine.spool):
            shutil.rmtree(self._engine.spool, ignore_errors=True)
            try:
                self._engine.spool.parent.rmdir()
            except OSError:
                pass  # it contains the spool of another engine

    def _written(self) -> dict[EngineTrace, Path]:
        """Return what the engine wrote since its start; of several files of a kind, the newest."""
        new = [path for path in _content_of(self._engine.spool) if path not in self._before]
        found = {}
        for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
            if (trace := self._engine.identify(path, self.label)) is not None:
                found[trace] = path
        return found

    def _without_file(self, artifact: Artifact, problem: str) -> Artifact:
        if self._engine.window.bounded and not problem:
            reason = f"the window was never reached ({self._engine.window})"
            return msgspec.structs.replace(artifact, status="empty", reason=reason)
        silent = f"{self._engine.name} reported no error and wrote no trace; its own log may say why"
        return msgspec.structs.replace(artifact, status="failed", reason=problem or silent)


class RangeRecording:
    """One range of Nsight Systems in all processes of a replica; its report is collected after the run.

    It has the attributes and methods of :class:`TraceRecording`.

    Raises:
        CaptureStateError: Nsight Systems would not record another range.
    """

    def __init__(self, identity: WorkerIdentity, request: CaptureRequest) -> None:
        process_ranges().check(identity.name)
        self.label = _label(request)
        self.notes: list[str] = []
        self._request = request
        self.expected = [
            expected_artifact(
                identity.name, NsysTool.name, NsysTool.suffix, request.stage, request.occurrence
            )
        ]

    def opened(self) -> None:
        """Handle that the engine records from now on.

        Raises:
            OSError: The record of the range cannot be written.
        """
        self.expected = _begun(self.expected)
        process_ranges().note_opened(Path(self._request.folder), self.expected[0].path)

    def gather(self, end_ns: int, problem: str) -> list[Output]:
        """Return the report that will be, once the engine has stopped."""
        artifact = msgspec.structs.replace(self.expected[0], end_ns=end_ns)
        run = Path(self._request.folder).parent
        pending = process_ranges().note_closed(artifact, run, keep=self._request.keep)
        if problem:
            return [Output(msgspec.structs.replace(artifact, status="failed", reason=problem))]
        return [Output(pending)]

    def drop(self) -> None:
        """Do nothing: no range was opened."""


def _label(request: CaptureRequest) -> str:
    return f"step{request.step}-{request.occurrence}-{clock.now_ns():x}"


def _begun(artifacts: Sequence[Artifact]) -> list[Artifact]:
    now_ns = clock.now_ns()
    return [msgspec.structs.replace(artifact, begin_ns=now_ns) for artifact in artifacts]


def _content_of(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def output_of(
    raw: Path, folder: Path, expected: Artifact, tool: TorchTool | NpuTool, device: str = "cpu"
) -> Output:
    """Move what an engine wrote into the step folder and return its artifact.

    Args:
        raw: A file of JSON, or of gzip-compressed JSON; or the folder of a recording of torch_npu.
        folder: The step folder.
        expected: The artifact as expected.
        tool: What recorded it.
        device: Kind of what the engine runs on.
    """
    final = folder / expected.path
    if isinstance(tool, NpuTool):
        final.mkdir()
        recorded = final / raw.name
        shutil.move(raw, recorded)
        return output_of_recording(recorded, expected, tool.options)
    activities = tool.options.activities
    if device != CUDA or (activities is not None and CUDA not in activities):
        device = ""
    if raw.suffix == ".gz":
        shutil.move(raw, final)
        pending = msgspec.structs.replace(expected, status="pending")
        return Output(pending, lambda: _verify(final, pending, device))
    part = final.with_name(f".{final.stem}.part")
    shutil.move(raw, part)
    return output_of_raw_trace(part, final, expected, device=device)


def _verify(path: Path, pending: Artifact, device: str) -> Artifact:
    """Read a compressed trace through, and say what it holds."""
    count = EventCount(device)
    whole = False
    try:
        with igzip.open(path, "rb") as file:
            for _ in count.read(file):
                pass
        whole = count.whole
    except (OSError, EOFError):
        pass  # cut off inside of the compression
    size = path.stat().st_size
    artifact = msgspec.structs.replace(pending, bytes=size, events=count.events)
    if not whole:
        reason = f"cut off after {size} bytes: the engine did not write it to the end"
        return msgspec.structs.replace(artifact, status="truncated", reason=reason)
    if not count.spans:
        return msgspec.structs.replace(artifact, status="empty", reason="the trace holds no spans")
    return without_device(msgspec.structs.replace(artifact, status="ok"), count.lost_device)
