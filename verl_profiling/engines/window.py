"""One window of an engine: its own traces, or a report of Nsight Systems."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.capture.result_file import CostMeter, ResultFile
from verl_profiling.engines.adapter import EngineAdapter, EngineTool, EngineTrace, is_spool
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, expected_artifact
from verl_profiling.settings.config import RoleConfig
from verl_profiling.tools.base import Output
from verl_profiling.tools.npu import NpuTool, output_of_recording
from verl_profiling.tools.nsys import NsysTool, process_ranges
from verl_profiling.tools.torch_profiler import TorchTool
from verl_profiling.tools.trace_file import CUDA, output_of_trace


class Window:
    """One capture of an engine, from its start to its result.

    The engine's ranks write a trace each into its spool folder, whatever the step. Nsight Systems writes one
    report for all processes of a replica, which is collected after the run.

    Args:
        request: The capture.
        role: The replica's settings.
        file: The result's file.
        engine: The engine.
        tool: What records it.
        identity: The replica.
        ranks: The ranks inside the replica that are selected.

    Attributes:
        expected: The artifacts that it will have if all goes well.
        label: Name of the capture for the engine.
        end_ns: When recording ended; 0 before.
        timer: Ends recording after ``rollout.max_window_s``.

    Raises:
        CaptureStateError: Nsight Systems would not record another range.
        OSError: The spool folder cannot be made.
    """

    def __init__(
        self,
        request: CaptureRequest,
        role: RoleConfig,
        file: ResultFile,
        engine: EngineAdapter,
        tool: EngineTool,
        identity: WorkerIdentity,
        ranks: Sequence[int],
    ) -> None:
        self.request, self.role, self.file = request, role, file
        self.label = f"step{request.step}-{request.occurrence}-{clock.now_ns():x}"
        self.notes: list[str] = []
        self.meter = CostMeter()
        self.anchor = clock.read_anchor()
        self.end_ns = 0
        self.timer: asyncio.TimerHandle | None = None
        self._engine = engine
        self._tool = tool
        self._before: set[Path] = set()
        self._traces: list[EngineTrace] = []
        lanes: list[tuple[str, str | None]] = [(identity.name, None)]
        if isinstance(tool, NsysTool):
            process_ranges().check(identity.name)
        else:
            self._traces = [EngineTrace(rank, part) for rank in ranks for part in engine.stages]
            lanes = [(identity.lane(rank), part) for rank, part in self._traces]
            engine.spool.mkdir(parents=True, exist_ok=True)
            self._before = set(engine.spool.iterdir())
        self.expected = [
            expected_artifact(
                lane,
                tool.name,
                tool.suffix,
                "-".join(filter(None, (request.stage, part))) or None,
                request.occurrence,
            )
            for lane, part in lanes
        ]

    def opened(self) -> None:
        """Note that the engine records from now on.

        Raises:
            OSError: That cannot be written down.
        """
        now_ns = clock.now_ns()
        self.expected = [msgspec.structs.replace(artifact, begin_ns=now_ns) for artifact in self.expected]
        if isinstance(self._tool, NsysTool):
            process_ranges().note_opened(Path(self.request.folder), self.expected[0].path)

    def gather(self, problem: str) -> list[Output]:
        """Return the expected artifacts with their status, once the engine has stopped.

        Args:
            problem: Why stopping failed; empty if it did not.

        Raises:
            OSError: A trace cannot be moved.
        """
        folder = Path(self.request.folder)
        if isinstance(self._tool, NsysTool):
            pending = process_ranges().note_closed(self.expected[0], folder.parent, keep=self.request.keep)
            [failed] = self.failed(problem)
            return [Output(failed if problem else msgspec.structs.replace(pending, end_ns=self.end_ns))]
        outputs = []
        raws = self._written() if self.request.keep else {}
        for trace, expected in zip(self._traces, self.expected, strict=True):
            artifact = msgspec.structs.replace(expected, end_ns=self.end_ns)
            if trace in raws:
                outputs.append(output_of(raws[trace], folder, artifact, self._tool, self._engine.device))
            else:
                outputs.append(Output(self._without_file(artifact, problem)))
        self.drop()
        return outputs

    def drop(self) -> None:
        """Remove what is left in the spool: tables, and traces of ranks that are not selected."""
        if self._traces and is_spool(self._engine.spool):
            shutil.rmtree(self._engine.spool, ignore_errors=True)
            try:
                self._engine.spool.parent.rmdir()
            except OSError:
                pass  # it contains the spool of another engine

    def failed(self, reason: str) -> list[Artifact]:
        """Return the artifacts if nothing of them is there."""
        return [
            msgspec.structs.replace(artifact, status="failed", reason=reason, end_ns=self.end_ns)
            for artifact in self.expected
        ]

    def _written(self) -> dict[EngineTrace, Path]:
        """Return what the engine wrote since its start; of several files of a kind, the newest."""
        spool = self._engine.spool
        new = set(spool.iterdir() if spool.is_dir() else ()) - self._before
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
    return output_of_trace(raw, final, expected, device=device)
