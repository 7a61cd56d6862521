"""Records an engine whose profiler runs in processes of its own, one capture at a time.

All waiting for an engine is in this module: for its start, its stop, and its traces. The session of this
process cannot hold such a capture, because a capture of a trainer may be open at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.finishing import finish
from verl_profiling.capture.messages import (
    CaptureRequest,
    StartReply,
    StopReply,
    cannot_be_had,
    result_of,
)
from verl_profiling.capture.result_file import NOT_STOPPED, CostMeter, ResultFile, Slot
from verl_profiling.engines.adapter import EngineAdapter, EngineTool, EngineTrace, role_of_capture
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult, Device, expected_artifact, worst_status
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.tools.base import Output
from verl_profiling.tools.npu import NpuTool, output_of_recording
from verl_profiling.tools.nsys import NsysTool, process_ranges
from verl_profiling.tools.torch_profiler import TorchTool
from verl_profiling.tools.trace_file import CUDA, output_of_trace

logger = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT = 0.9
_RECORD_LESS = "record less: rollout.count, rollout.max_window_s, tools.torch.stack=false"
_LOOK_EVERY_S = 0.5
_DYING_S = 3.0  # an engine whose worker has died raises some error first, and ends later


@dataclass(eq=False)
class EngineRecorder:
    """Starts and stops the captures of one engine for its rollout server.

    Args:
        engine: The engine's adapter.
        tool: The tool that records the engine.
        identity: The replica.
        config: All settings.
        requests: The request log of the replica.
        devices: The engine's devices in order of rank; empty if unknown.
    """

    engine: EngineAdapter
    tool: EngineTool
    identity: WorkerIdentity
    config: ProfilingConfig
    requests: RequestLog
    devices: Sequence[Device] = ()

    def __post_init__(self) -> None:
        self._stop_s = min(self.config.rollout.stop_s, _SHARE_OF_TIMEOUT * self.config.timeouts.stop_s)
        self._window: Window | None = None
        self._halting: asyncio.Task[None] | None = None
        self._lock = asyncio.Lock()  # held while a window is opened or closed
        self._slot = Slot(self.config.after)

    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join it if it runs already.

        Raises:
            CaptureStateError: The engine has died, or is still writing.
            Exception: Whatever the engine raised; nothing records then.
        """
        received_ns, who = clock.now_ns(), self.identity
        try:
            role = role_of_capture(self.config, who.role, request, self.engine.name)
        except ConfigError as error:
            return StartReply(who, "refused", received_ns, cannot_be_had(request, error))
        ranks = [rank for rank in range(self.engine.ranks) if role.selects(who.rank + rank, who.replica)]
        if not ranks:
            self._slot.hooks.begun(request, who, recorded=False)
            return StartReply(who, "skipped", received_ns, "not selected")
        async with self._lock:
            if self._window is not None:
                if self._window.request.capture_id == request.capture_id:
                    return StartReply(who, "joined", received_ns)
                logger.warning("%s: step %d was never stopped", who, self._window.request.step)
                await self._close(self._window, NOT_STOPPED)
            if death := _death_of(self.engine):
                raise CaptureStateError(f"start_capture(step={request.step}): {death} ({who})")
            if self._halting is not None and not self._halting.done():
                raise CaptureStateError(
                    f"start_capture(step={request.step}): {self.engine.name} is still writing an earlier "
                    f"capture ({who}); {_RECORD_LESS}"
                )
            window = await self._open(request, role, ranks)
            self._slot.hooks.begun(request, who)
        return StartReply(who, "recording", received_ns, expected=window.expected)

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""
        received_ns = clock.now_ns()
        result = await asyncio.shield(self._end(capture_id))  # goes on if the caller is cancelled
        settle = partial(self._slot.settle, result, capture_id, finish_s)
        # Only what waits goes to a thread: the application may keep the threads of its loop busy.
        return StopReply(await asyncio.to_thread(settle) if finish_s else settle(), received_ns)

    async def _end(self, capture_id: str | None) -> CaptureResult:
        async with self._lock:
            window = self._window
            if window is not None and capture_id in (None, window.request.capture_id):
                return await self._close(window)
            return self._slot.result(capture_id, self.identity, window.request if window else None)

    async def _open(self, request: CaptureRequest, role: RoleConfig, ranks: Sequence[int]) -> Window:
        if request.keep:
            Path(request.folder).mkdir(parents=True, exist_ok=True)
        file = self._slot.file.opened(request, role, self.identity)
        window = Window(request, role, file, self.engine, self.tool, self.identity, ranks)
        try:
            with window.meter.measured("start", request.stage):
                await _while_alive(self.engine, self.engine.start(window.label))
        except BaseException:
            window.drop()
            raise
        try:
            window.opened()
        except OSError:
            await self.engine.stop()
            raise
        self._window, self._slot.file, self._halting = window, file, None
        clock.hold()
        self.requests.begin(request.policy_version)
        limit_s = self.config.rollout.max_window_s
        if limit_s is not None:
            window.timer = asyncio.get_running_loop().call_later(limit_s, self._end_by_time, window, limit_s)
        return window

    def _end_by_time(self, window: Window, limit_s: float) -> None:
        if self._halting is None:
            window.notes.append(
                f"{self.identity.name}: recording ended after {limit_s:g} s (rollout.max_window_s)"
            )
            self._halt(window)

    def _halt(self, window: Window) -> asyncio.Task[None]:
        """Start the task that stops the engine's profiler, once; return it."""
        if self._halting is None:
            window.end_ns = clock.now_ns()
            self._halting = asyncio.create_task(self._stop_engine(window))
        return self._halting

    async def _stop_engine(self, window: Window) -> None:
        with window.meter.measured("stop", window.request.stage):
            await _while_alive(self.engine, self.engine.stop())

    async def _close(self, window: Window, failed: str = "") -> CaptureResult:
        """Stop recording, and wait for the traces; return the result."""
        if window.timer is not None:
            window.timer.cancel()
        halting = self._halt(window)
        await asyncio.wait([halting], timeout=self._stop_s)
        if halting.done():
            artifacts = self._artifacts(window, self._problem(halting))
        else:
            reason = (
                f"{self.engine.name} had not written it {self._stop_s:g} s after the stop; {_RECORD_LESS}"
            )
            logger.error("%s: step %d: %s", self.identity, window.request.step, reason)
            artifacts = window.failed(reason)
            halting.add_done_callback(lambda task: self._enter_late(window, task, reason))
        result = self._result(window, artifacts)
        if failed:
            result = msgspec.structs.replace(result, status="failed", reason=failed)
        self._window = None
        clock.release()
        return self._slot.file.close(result)

    def _problem(self, halting: asyncio.Task[None]) -> str:
        """Return why the engine's profiler could not be stopped; empty if it could."""
        error = None if halting.cancelled() else halting.exception()
        if error is None:
            return ""
        logger.error("%s: stopping the profiler failed: %s", self.identity, error)
        return _death_of(self.engine) or f"stopping it raised {type(error).__name__}: {error}"

    def _enter_late(self, window: Window, halting: asyncio.Task[None], reason: str) -> None:
        """Add the artifacts that the engine has written after its deadline to the result."""
        self._problem(halting)
        for artifact in self._artifacts(window, reason):
            if artifact.status != "pending":
                window.file.finished(artifact)

    def _artifacts(self, window: Window, problem: str) -> list[Artifact]:
        """Move the traces into the step folder; return all expected artifacts with their status."""
        request = window.request
        try:
            outputs = window.gather(problem)
        except OSError as error:
            logger.error("%s: step %d: %s", self.identity, request.step, error)
            window.drop()
            return window.failed(f"{self.engine.name} recorded it, but it cannot be moved: {error}")
        return [finish(output, self._slot.background, request, window.file.finished) for output in outputs]

    def _result(self, window: Window, artifacts: list[Artifact]) -> CaptureResult:
        status, reason = worst_status(artifacts)
        if death := _death_of(self.engine):  # the workers may have written whole traces before they ended
            status, reason = "failed", death
        if not window.request.keep:
            status, reason, artifacts = "skipped", "warm-up", []
        cost = window.meter.cost()
        result = result_of(
            window.request,
            window.role,
            self.identity,
            tools=[self.tool.name],
            status=status,
            reason=reason,
            artifacts=artifacts,
            anchors=[window.anchor, clock.read_anchor()],
            cost=msgspec.structs.replace(cost, stop_s=cost.stop_s or self._stop_s),
            tool_spans=list(window.meter.spans),
            cores=os.cpu_count() or 0,
            notes=window.notes,
            devices=list(self.devices),
        )
        return self.requests.end_in_result(self.identity.name, result)


@dataclass(eq=False)
class Window:
    """One capture of an engine, from its start to its result.

    Each rank of the engine writes a trace into the engine's spool folder. Nsight Systems instead writes one
    report for all processes of a replica, which is collected after the run.

    Args:
        request: The capture.
        role: The replica's settings.
        file: The result's file.
        engine: The engine.
        tool: The tool that records the engine.
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

    request: CaptureRequest
    role: RoleConfig
    file: ResultFile
    engine: EngineAdapter
    tool: EngineTool
    identity: WorkerIdentity
    ranks: Sequence[int]
    end_ns: int = 0
    timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        request, engine = self.request, self.engine
        self.label = f"step{request.step}-{request.occurrence}-{clock.now_ns():x}"
        self.notes: list[str] = []
        self.meter = CostMeter()
        self.anchor = clock.read_anchor()
        self._before: set[Path] = set()
        self._traces: list[EngineTrace] = []
        lanes: list[tuple[str, str | None]] = [(self.identity.name, None)]
        if isinstance(self.tool, NsysTool):
            process_ranges().check(self.identity.name)
        else:
            self._traces = [EngineTrace(rank, part) for rank in self.ranks for part in engine.stages]
            lanes = [(self.identity.lane(rank), part) for rank, part in self._traces]
            engine.spool.mkdir(parents=True, exist_ok=True)
            self._before = set(engine.spool.iterdir())
        self.expected = [
            expected_artifact(
                lane,
                self.tool.name,
                self.tool.suffix,
                "-".join(filter(None, (request.stage, part))) or None,
                request.occurrence,
            )
            for lane, part in lanes
        ]

    def opened(self) -> None:
        """Record that the engine records from now on.

        Raises:
            OSError: The file with the ranges of Nsight Systems cannot be written.
        """
        now_ns = clock.now_ns()
        self.expected = [msgspec.structs.replace(artifact, begin_ns=now_ns) for artifact in self.expected]
        if isinstance(self.tool, NsysTool):
            process_ranges().note_opened(Path(self.request.folder), self.expected[0].path)

    def gather(self, problem: str) -> list[Output]:
        """Return the expected artifacts with their status, once the engine has stopped.

        Args:
            problem: Why stopping failed; empty if it did not.

        Raises:
            OSError: A trace cannot be moved.
        """
        folder = Path(self.request.folder)
        if isinstance(self.tool, NsysTool):
            pending = process_ranges().note_closed(self.expected[0], folder.parent, keep=self.request.keep)
            [failed] = self.failed(problem)
            return [Output(failed if problem else msgspec.structs.replace(pending, end_ns=self.end_ns))]
        outputs = []
        raws = self._written() if self.request.keep else {}
        for trace, expected in zip(self._traces, self.expected, strict=True):
            artifact = msgspec.structs.replace(expected, end_ns=self.end_ns)
            if trace in raws:
                outputs.append(output_of(raws[trace], folder, artifact, self.tool, self.engine.device))
            else:
                outputs.append(Output(self._without_file(artifact, problem)))
        self.drop()
        return outputs

    def drop(self) -> None:
        """Remove the spool with its remaining files: tables, and traces of unselected ranks."""
        if self._traces:
            self.engine.remove_spool()

    def failed(self, reason: str) -> list[Artifact]:
        """Return all expected artifacts as failed."""
        return [one.with_status("failed", reason, end_ns=self.end_ns) for one in self.expected]

    def _written(self) -> dict[EngineTrace, Path]:
        """Return the newest trace of each rank and stage that the engine wrote in this window."""
        spool = self.engine.spool
        new = set(spool.iterdir() if spool.is_dir() else ()) - self._before
        found = {}
        for path in sorted(new, key=lambda path: path.stat().st_mtime_ns):
            if (trace := self.engine.identify(path, self.label)) is not None:
                found[trace] = path
        return found

    def _without_file(self, artifact: Artifact, problem: str) -> Artifact:
        if self.engine.window.bounded and not problem:
            reason = f"the window was never reached ({self.engine.window})"
            return artifact.with_status("empty", reason)
        silent = f"{self.engine.name} reported no error and wrote no trace; its own log may say why"
        return artifact.with_status("failed", problem or silent)


def output_of(
    raw: Path, folder: Path, expected: Artifact, tool: TorchTool | NpuTool, device: str = "cpu"
) -> Output:
    """Move a trace of an engine into the step folder and return its artifact.

    Args:
        raw: A file of JSON, or of gzip-compressed JSON; or the folder of a recording of torch_npu.
        folder: The step folder.
        expected: The artifact as expected.
        tool: The tool that recorded it.
        device: Device type of the engine, e.g. ``cuda``.
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


def _death_of(engine: EngineAdapter) -> str:
    """Return a sentence on how an engine died and where its log is; empty while it lives."""
    how = engine.died()
    if not how:
        return ""
    remedy = "look there for the cause (PYTHONFAULTHANDLER=1 shows crashes), and start the engine anew"
    return f"{engine.name} died ({how}); its log is {_log_of_this_process()}: {remedy}"


async def _while_alive(engine: EngineAdapter, call: Awaitable[None]) -> None:
    """Await a call to an engine, but give up if the engine dies, because no answer would come.

    Raises:
        CaptureStateError: The engine died.
        Exception: Whatever the call raised while the engine lives.
    """
    task = asyncio.ensure_future(call)
    try:
        while not task.done() and not _death_of(engine):
            await asyncio.wait([task], timeout=_LOOK_EVERY_S)
    finally:
        task.cancel()
    if task.done() and task.exception() is None:
        return
    deadline = time.monotonic() + _DYING_S
    while not (death := _death_of(engine)) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)
    if death:
        raise CaptureStateError(death) from (task.exception() if task.done() else None)
    await task


def _log_of_this_process() -> str:
    """Return the place of this process's output, to which an engine's processes write by default."""
    files = []
    for stream in (1, 2):
        path = Path(f"/proc/self/fd/{stream}")
        if path.is_file() and (target := str(path.readlink())) not in files:
            files.append(target)
    return " and ".join(files) or f"the output of process {os.getpid()} on {socket.gethostname()}"
