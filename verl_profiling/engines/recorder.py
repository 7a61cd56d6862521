"""One capture at a time of one engine, however many callers start and stop it."""

from __future__ import annotations

import asyncio
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.capture.finisher import Finisher
from verl_profiling.capture.messages import CaptureRequest, StartReply, StartStatus, StopReply
from verl_profiling.engines.base import EngineAdapter
from verl_profiling.engines.recording import EngineRecording, RecordingMaker
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureCost, CaptureResult, worst_fate
from verl_profiling.settings.config import ProfilingConfig, RoleConfig

__all__ = ["EngineRecorder", "Recorder", "skipped"]

logger = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT = 0.9
_RECORD_LESS = "record less: rollout.count, rollout.max_window_s, tools.torch.stack=false"


class Recorder(ABC):
    """What a rollout server hands ``start_capture`` and ``stop_capture`` to."""

    @abstractmethod
    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join it if it runs already.

        Raises:
            CaptureStateError: Another capture is open.
            Exception: Whatever the engine raised; nothing records then.
        """

    @abstractmethod
    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""

    @abstractmethod
    def set_policy_version(self, version: int) -> None:
        """Note that the engine has other weights from now on."""


class _OpenCapture:
    """One open capture: what was expected, and how far stopping is."""

    def __init__(self, request: CaptureRequest, recording: EngineRecording) -> None:
        self.request = request
        self.recording = recording
        self.end_ns = 0
        self.start_s = 0.0
        self.stop_s = 0.0
        self.anchors = [clock.read_anchor()]
        self.timer: asyncio.TimerHandle | None = None
        self.halting: asyncio.Task[None] | None = None
        self.closing: asyncio.Task[CaptureResult] | None = None


class EngineRecorder(Recorder):
    """Records an engine whose profiler runs in processes of its own.

    Args:
        engine: The engine's adapter.
        identity: The replica.
        role: Its settings.
        config: All settings.
        recording: Makes what a window brings home.
        requests: Takes note of requests.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        identity: WorkerIdentity,
        role: RoleConfig,
        config: ProfilingConfig,
        recording: RecordingMaker,
        requests: RequestLog,
    ) -> None:
        self._engine = engine
        self._identity = identity
        self._role = role
        self._recording = recording
        self._requests = requests
        self._rollout = config.rollout
        self._stop_s = min(config.rollout.stop_s, _SHARE_OF_TIMEOUT * config.timeouts.stop_s)
        self._ranks = [
            rank for rank in range(engine.ranks) if role.selects(identity.rank + rank, identity.replica)
        ]
        self._window: _OpenCapture | None = None
        self._last: CaptureResult | None = None
        self._overdue: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._finisher = Finisher()

    async def start(self, request: CaptureRequest) -> StartReply:
        received_ns = clock.now_ns()
        if not self._ranks:
            return self._reply("skipped", received_ns, reason="not selected")
        async with self._starting:
            window = self._window
            if window is not None:
                if window.request.capture_id != request.capture_id:
                    raise CaptureStateError(
                        f"start_capture(step={request.step}): already recording step {window.request.step} "
                        f"({self._identity}); call stop_capture() first"
                    )
                return self._reply("joined", received_ns)
            if self._overdue is not None and not self._overdue.done():
                raise CaptureStateError(
                    f"start_capture(step={request.step}): {self._engine.name} is still writing an earlier "
                    f"capture ({self._identity}); {_RECORD_LESS}"
                )
            window = await self._open(request)
        return self._reply("recording", received_ns, expected=window.recording.expected)

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        received_ns = clock.now_ns()
        window = self._window
        if window is not None and capture_id in (None, window.request.capture_id):
            if window.closing is None:
                window.closing = asyncio.create_task(self._close(window))
            result = await asyncio.shield(window.closing)
        elif self._last is not None and capture_id in (None, self._last.capture_id):
            result = self._last
        else:
            open_now = f"capture {window.request.capture_id} is open" if window else "nothing is open"
            result = skipped(
                self._identity, f"stop_capture: {open_now}; call start_capture(...) first", capture_id
            )
        if finish_s:
            await asyncio.to_thread(self._finisher.drain, finish_s)
        return StopReply(
            result=result,
            finished=self._finisher.take_finished(),
            received_ns=received_ns,
            replied_ns=clock.now_ns(),
        )

    def set_policy_version(self, version: int) -> None:
        self._requests.set_policy_version(version)

    async def _open(self, request: CaptureRequest) -> _OpenCapture:
        if request.keep:
            Path(request.folder).mkdir(parents=True, exist_ok=True)
        label = f"step{request.step}-{request.occurrence}-{clock.now_ns():x}"
        window = _OpenCapture(request, self._recording(request, label, self._ranks))
        begin = time.perf_counter()
        try:
            await self._engine.start(label)
        except BaseException:
            window.recording.drop()
            raise
        window.start_s = time.perf_counter() - begin
        try:
            window.recording.opened()
        except OSError:
            await self._engine.stop()
            raise
        self._window = window
        self._requests.begin(request.policy_version)
        if self._rollout.max_window_s is not None:
            loop = asyncio.get_running_loop()
            window.timer = loop.call_later(self._rollout.max_window_s, self._end_by_time, window)
        return window

    def _end_by_time(self, window: _OpenCapture) -> None:
        if window.halting is None:
            window.recording.notes.append(
                f"{self._identity.name}: recording ended after {self._rollout.max_window_s:g} s "
                "(rollout.max_window_s)"
            )
            self._halt(window)

    def _halt(self, window: _OpenCapture) -> asyncio.Task[None]:
        """Begin to stop the engine's profiler, once; return the task that does it."""
        if window.halting is None:
            window.end_ns = clock.now_ns()
            window.halting = asyncio.create_task(self._stop_engine(window))
        return window.halting

    async def _stop_engine(self, window: _OpenCapture) -> None:
        begin = time.perf_counter()
        try:
            await self._engine.stop()
        finally:
            window.stop_s = time.perf_counter() - begin

    async def _close(self, window: _OpenCapture) -> CaptureResult:
        if window.timer is not None:
            window.timer.cancel()
        halting = self._halt(window)
        begin = time.perf_counter()
        await asyncio.wait([halting], timeout=self._stop_s)
        waited_s = time.perf_counter() - begin
        if not halting.done():
            artifacts = self._leave_overdue(window, halting)
        elif (error := halting.exception()) is not None:
            logger.error("%s: stopping the profiler failed: %s", self._identity, error)
            artifacts = self._fates(window, f"stopping it raised {type(error).__name__}: {error}")
        else:
            artifacts = self._fates(window, "")
        self._last = self._result(window, artifacts, waited_s)
        self._window = None
        return self._last

    def _leave_overdue(self, window: _OpenCapture, halting: asyncio.Task[None]) -> list[Artifact]:
        """Give up waiting, and have the traces collected when the engine is done after all."""
        reason = f"{self._engine.name} had not written it {self._stop_s:g} s after the stop; {_RECORD_LESS}"
        logger.error("%s: step %d: %s", self._identity, window.request.step, reason)
        self._overdue = halting

        def collect(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                logger.error("%s: stopping the profiler failed: %s", self._identity, error)
            self._fates(window, reason)

        halting.add_done_callback(collect)
        return [
            msgspec.structs.replace(artifact, status="failed", reason=reason, end_ns=window.end_ns)
            for artifact in window.recording.expected
        ]

    def _fates(self, window: _OpenCapture, problem: str) -> list[Artifact]:
        """Bring what was recorded into the step folder; return what became of all expected."""
        outputs = window.recording.gather(window.end_ns, problem)
        for output in outputs:
            if output.finish is not None:
                self._finisher.submit(window.request.capture_id, output.artifact, output.finish)
        return [output.artifact for output in outputs]

    def _result(self, window: _OpenCapture, artifacts: list[Artifact], waited_s: float) -> CaptureResult:
        status, reason = worst_fate(artifacts)
        if not window.request.keep:
            status, reason, artifacts = "skipped", "warm-up", []
        window.anchors.append(clock.read_anchor())
        requests = self._requests.end()
        return CaptureResult(
            identity=self._identity,
            roles=[self._identity.role],
            capture_id=window.request.capture_id,
            step=window.request.step,
            mode=self._role.mode,
            tools=[window.recording.tool],
            status=status,
            reason=reason,
            artifacts=artifacts,
            anchors=window.anchors,
            cost=CaptureCost(start_s=window.start_s, stop_s=window.stop_s or waited_s),
            notes=[*window.recording.notes, *self._requests.weight_updates(self._identity.name, requests)],
            requests=requests,
            policy_versions=self._requests.policy_versions,
        )

    def _reply(
        self,
        status: StartStatus,
        received_ns: int,
        reason: str = "",
        expected: Sequence[Artifact] = (),
    ) -> StartReply:
        return StartReply(
            identity=self._identity,
            status=status,
            reason=reason,
            expected=list(expected),
            finished=self._finisher.take_finished(),
            received_ns=received_ns,
            replied_ns=clock.now_ns(),
        )


def skipped(identity: WorkerIdentity, reason: str, capture_id: str | None = None) -> CaptureResult:
    """Return the result of a worker that recorded nothing, and was not to."""
    return CaptureResult(identity=identity, capture_id=capture_id or "", status="skipped", reason=reason)
