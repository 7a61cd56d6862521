"""Records a rollout engine by the profiler in its own processes.

This module waits for engines: for their start, their stop, and their traces. Such engines are
recorded apart from the session, which may hold a capture of a trainer at the same time.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial

from verl_profiling import clock
from verl_profiling.capture.finishing import finish
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply, result_of
from verl_profiling.capture.result_file import NOT_STOPPED, Slot, measured
from verl_profiling.capture.session import process_session
from verl_profiling.engines.adapter import EngineAdapter, refusal
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.engines.window import RangeWindow, SpoolWindow, Window
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    NUMBER_BYTES,
    Artifact,
    CaptureResult,
    Device,
    ToolSpan,
    worst_status,
)
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.tools.base import SpansTool
from verl_profiling.watch.process_sums import WatchQuestion, WatchReading

logger = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT = 0.9  # of a timeout of the callback, so that the reply is in time
_RECORD_LESS = "record less: rollout.count, rollout.max_window_s, tools.torch.stack=false"
_LOOK_EVERY_S = 0.5
_DYING_S = 3.0  # an engine whose worker has died raises some error first, and ends later


@dataclass(eq=False)
class EngineRecorder:
    """Starts and stops the captures of one engine for its rollout server.

    Args:
        engine: The engine's adapter.
        identity: Role, rank and host of the replica.
        config: All settings.
        requests: The request log of the replica.
        devices: The engine's devices in order of rank; empty if unknown.

    Raises:
        ToolUnavailableError: The engine was not launched under a tool that has to launch it.
    """

    engine: EngineAdapter
    identity: WorkerIdentity
    config: ProfilingConfig
    requests: RequestLog
    devices: Sequence[Device] = ()

    def __post_init__(self) -> None:
        self._stop_s = min(
            self.config.rollout.stop_s, _SHARE_OF_TIMEOUT * self.config.timeouts.stop_s
        )
        self._ranges = self.engine.tool.engine_ranges()
        self._window: Window | None = None
        self._halting: asyncio.Task[list[Artifact]] | None = None
        self._in_doubt = False  # whether the engine may record although no window is open
        self._settling: asyncio.Task[str | None] | None = None
        self._lock = asyncio.Lock()  # held while a window is opened or closed
        self._slot = Slot(self.config.after)

    async def start_capture(self, request: CaptureStart) -> StartReply:
        """Start a capture, or join the capture if it runs already.

        Raises:
            CaptureStateError: The engine has died, or is still writing.
            Exception: The exception of the engine; nothing is recorded then.
        """
        received_ns, who = clock.now_ns(), self.identity
        if why := refusal(self.config, who.role, request, self.engine.name):
            return StartReply(who, "refused", received_ns, why)
        role = self.config.for_role(who.role, request.selection)
        ranks = [
            rank for rank in range(self.engine.ranks) if role.selects(who.rank + rank, who.replica)
        ]
        if not ranks:
            self._slot.hooks.begun(request, who, recorded=False)
            return StartReply(who, "skipped", received_ns, "not selected")
        async with self._lock:
            if self._window is not None:
                if self._window.request.capture_id == request.capture_id:
                    return StartReply(who, "joined", received_ns)
                logger.warning(
                    "%s: the capture of step %d was never stopped", who, self._window.request.step
                )
                await self._close(self._window, NOT_STOPPED)
            if death := _death_of(self.engine):
                raise CaptureStateError(f"start_capture(step={request.step}): {death} ({who})")
            if self._halting is not None and not self._halting.done():
                raise CaptureStateError(
                    f"start_capture(step={request.step}): {self.engine.name} is still writing an "
                    f"earlier capture ({who}); {_RECORD_LESS}"
                )
            if self._in_doubt and not await self._settle(
                _SHARE_OF_TIMEOUT * self.config.timeouts.start_s
            ):
                raise CaptureStateError(
                    f"start_capture(step={request.step}): {self.engine.name} has not answered an "
                    f"earlier start or stop of its profiler ({who})"
                )
            has_artifacts = any(tool.suffix for tool in role.tools)
            window = await self._open(request, role, ranks if has_artifacts else [])
            self._slot.hooks.begun(request, who)
        return StartReply(who, "recording", received_ns, expected=window.expected)

    async def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        """Stop a capture, if one is open.

        Args:
            capture_id: The capture to stop; ``None`` for any that is open.
            finish_s: Seconds to wait for background work on artifacts.
        """
        received_ns = clock.now_ns()
        result = await asyncio.shield(self._end(capture_id))  # goes on if the caller is cancelled
        settle = partial(self._slot.settle, result, capture_id, finish_s)
        # Only what waits goes to a thread: the application may keep the threads of its loop busy.
        return StopReply(await asyncio.to_thread(settle) if finish_s else settle(), received_ns)

    def read_watch(self, question: WatchQuestion) -> WatchReading | None:
        """Return the stages of this process in some steps, or ``None`` without a watch."""
        return process_session().read_watch(self.identity, question)

    async def _end(self, capture_id: str | None) -> CaptureResult:
        async with self._lock:
            window = self._window
            if window is not None and capture_id in (None, window.request.capture_id):
                return await self._close(window)
            if self._in_doubt:
                await self._settle(self._stop_s)
            return self._slot.result(capture_id, self.identity, window.request if window else None)

    async def _open(self, request: CaptureStart, role: RoleConfig, ranks: Sequence[int]) -> Window:
        if request.keep:
            request.make_folder()
        file = self._slot.file.opened(request, role, self.identity)
        window: Window
        if self._ranges is None or not ranks:
            window = SpoolWindow(file, role, self.engine, self.identity, ranks)
        else:
            window = RangeWindow(file, role, self.engine, self.identity, ranks, self._ranges)
        try:
            with measured(window.tool_spans, "start", request.stage):
                if ranks:
                    await _while_alive(self.engine, self.engine.start())
        except BaseException as error:
            self._in_doubt = True
            self.engine.remove_spool()
            if isinstance(error, Exception):  # after a cancellation, the loop may be about to end
                self._settle_in_background()
            raise
        window.opened()
        self._window, self._slot.file, self._halting = window, file, None
        clock.hold()
        self.requests.begin(request.policy_version)
        limit_s = self.config.rollout.max_window_s
        if limit_s is not None:
            window.timer = asyncio.get_running_loop().call_later(
                limit_s, self._end_by_time, window, limit_s
            )
        return window

    def _settle_in_background(self) -> asyncio.Task[str | None]:
        """Stop the engine's profiler after a start or stop whose outcome is unknown."""
        if self._settling is None or self._settling.done():
            self._settling = asyncio.create_task(_while_alive(self.engine, self.engine.settle()))
            self._settling.add_done_callback(self._settled)
        return self._settling

    def _settled(self, settling: asyncio.Task[str | None]) -> None:
        if settling.cancelled():
            return
        if (error := settling.exception()) is not None:
            logger.warning(
                "%s: it is unknown whether %s records: %s", self.identity, self.engine.name, error
            )
            return
        self._in_doubt = False
        if self._window is None:
            self.engine.remove_spool()

    async def _settle(self, timeout_s: float) -> bool:
        """Wait for :meth:`_settle_in_background`; return whether the engine has answered."""
        settling = self._settle_in_background()
        await asyncio.wait([settling], timeout=timeout_s)
        return settling.done()

    def _end_by_time(self, window: Window, limit_s: float) -> None:
        if self._halting is None:
            self._halting = asyncio.create_task(self._halt(window))
            window.notes.append(
                f"{self.identity.name}: recording ended after {limit_s:g} s (rollout.max_window_s)"
            )

    async def _halt(self, window: Window) -> list[Artifact]:
        """Stop the engine's profiler, and move its traces into the step folder; return all
        artifacts.

        The artifacts are also added to the result file, because the deadline of the stop may have
        passed.
        """
        problem = ""
        window.ended()
        try:
            with measured(window.tool_spans, "stop", window.request.stage):
                if window.ranks:
                    problem = await _while_alive(self.engine, self.engine.stop()) or ""
        except Exception as error:
            self._in_doubt = True
            logger.error("%s: stopping the profiler failed: %s", self.identity, error)
            problem = _death_of(self.engine) or f"the stop raised {type(error).__name__}: {error}"
        artifacts, enter = [], window.file.finished
        for output in window.gather(problem):
            artifacts.append(finish(output, self._slot.background, window.request, enter))
            enter(artifacts[-1])
        return artifacts

    async def _close(self, window: Window, failed: str = "") -> CaptureResult:
        """Stop recording, and wait for the traces; return the result."""
        if window.timer is not None:
            window.timer.cancel()
        halting = self._halting = self._halting or asyncio.create_task(self._halt(window))
        await asyncio.wait([halting], timeout=self._stop_s)
        tool_spans = list(window.tool_spans)
        if halting.done():
            artifacts = halting.result()
        else:
            tool_spans.append(ToolSpan("stop", window.end_ns, clock.now_ns(), window.request.stage))
            reason = (
                f"{self.engine.name} wrote no trace in the {self._stop_s:g} s after the "
                f"stop; {_RECORD_LESS}"
            )
            logger.error("%s: step %d: %s", self.identity, window.request.step, reason)
            artifacts = window.failed(reason)
        status, reason = worst_status(artifacts)
        if death := _death_of(self.engine):  # its workers may have written whole traces before
            status, reason = "failed", death
        metrics: dict[str, float] = {}
        if self.engine.number_bytes is not None:
            metrics[NUMBER_BYTES] = self.engine.number_bytes
        result = result_of(
            window.request,
            window.role,
            self.identity,
            tools=[self.engine.tool.name] if window.ranks else [SpansTool.name],
            status=status,
            reason=reason,
            artifacts=artifacts,
            anchors=[window.anchor, clock.read_anchor()],
            tool_spans=tool_spans,
            notes=window.notes,
            devices=list(self.devices),
            metrics=metrics,
        )
        self._window = None
        clock.release()
        return self._slot.file.close(self.requests.end_in_result(result), failed)


def _death_of(engine: EngineAdapter) -> str:
    """Return a sentence on an engine's death and the place of its log;
    empty while the engine lives.
    """
    how = engine.died()
    if not how:
        return ""
    log = f"the output of process {os.getpid()} on {socket.gethostname()}"
    remedy = (
        "see the log for the cause (PYTHONFAULTHANDLER=1 shows crashes), and start the engine anew"
    )
    return f"{engine.name} died ({how}); its log is {log}: {remedy}"


async def _while_alive(engine: EngineAdapter, call: Awaitable[str | None]) -> str | None:
    """Await a call to an engine, and return its reply; give up if the engine dies.

    If the caller is cancelled, the call still goes on: engines answer calls in order, and a
    cancelled call could block the later calls.

    Raises:
        CaptureStateError: The engine died.
        Exception: The exception of the call, while the engine lives.
    """
    task = asyncio.ensure_future(call)
    while not task.done() and not engine.died():
        await asyncio.wait([task], timeout=_LOOK_EVERY_S)
    if task.done() and task.exception() is None:
        return task.result()
    deadline = time.monotonic() + _DYING_S
    while not (death := _death_of(engine)) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_EVERY_S)
    if death:
        task.cancel()
        raise CaptureStateError(death)
    return await task
