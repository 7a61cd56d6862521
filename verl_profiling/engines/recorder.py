"""Records one engine, one capture at a time, however many callers start and stop it.

Whoever waits for an engine does so here: for its start, its stop, and the traces that it writes.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

import msgspec

from verl_profiling import clock
from verl_profiling.afterwards.hooks import FinishHooks
from verl_profiling.afterwards.uploads import uploaded
from verl_profiling.capture.background import Finisher
from verl_profiling.capture.cost import CostMeter
from verl_profiling.capture.messages import CaptureRequest, StartReply, StartStatus, StopReply
from verl_profiling.capture.replies import (
    cannot_be_had,
    nothing_to_stop,
    start_reply,
    stop_reply,
)
from verl_profiling.capture.result_file import NOT_STOPPED, ResultFile
from verl_profiling.capture.states import ENGINE_TRANSITIONS, Event, State, StateMachine
from verl_profiling.devices import Device
from verl_profiling.engines.base import EngineAdapter
from verl_profiling.engines.death import death_of, while_alive
from verl_profiling.engines.recording import EngineRecording, RecordingMaker
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Artifact, CaptureResult, worst_fate
from verl_profiling.settings.config import ProfilingConfig, RoleConfig

__all__ = ["EngineRecorder", "Recorder"]

logger = logging.getLogger(__name__)

_SHARE_OF_TIMEOUT = 0.9
_RECORD_LESS = "record less: rollout.count, rollout.max_window_s, tools.torch.stack=false"


class Recorder(ABC):
    """The object to which a rollout server passes ``start_capture`` and ``stop_capture``."""

    @abstractmethod
    async def start(self, request: CaptureRequest) -> StartReply:
        """Start a capture, or join it if it runs already.

        Raises:
            CaptureStateError: The engine has died, or is still writing.
            Exception: Whatever the engine raised; nothing records then.
        """

    @abstractmethod
    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        """Stop a capture; never raises for one that is not open."""

    @abstractmethod
    def set_policy_version(self, version: int) -> None:
        """Record that the engine has new weights from now on."""


class _OpenCapture:
    """One open capture: what was expected, and how far stopping is."""

    def __init__(
        self, request: CaptureRequest, role: RoleConfig, recording: EngineRecording, file: ResultFile
    ) -> None:
        self.request = request
        self.file = file
        self.role = role
        self.recording = recording
        self.end_ns = 0
        self.meter = CostMeter()
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
        recording: Makes the recording of a window.
        requests: The log of its requests.
        devices: What it computes on, in order of rank, where that is known.
    """

    def __init__(
        self,
        engine: EngineAdapter,
        identity: WorkerIdentity,
        role: RoleConfig,
        config: ProfilingConfig,
        recording: RecordingMaker,
        requests: RequestLog,
        devices: Sequence[Device] = (),
    ) -> None:
        self._devices = list(devices)
        self._engine = engine
        self._identity = identity
        self._role = role
        self._config = config
        self._recording = recording
        self._requests = requests
        self._rollout = config.rollout
        self._stop_s = min(config.rollout.stop_s, _SHARE_OF_TIMEOUT * config.timeouts.stop_s)
        self._machine = StateMachine(ENGINE_TRANSITIONS, str(identity))
        self._open_capture: _OpenCapture | None = None
        self._file = ResultFile()
        self._starting = asyncio.Lock()
        self._finisher = Finisher()
        self._hooks = FinishHooks(config.after)

    async def start(self, request: CaptureRequest) -> StartReply:
        received_ns = clock.now_ns()
        try:
            role = self._role_for(request)
        except ConfigError as error:
            return self._reply("refused", received_ns, reason=cannot_be_had(request, error))
        if not self._ranks(role):
            self._hooks.begun(request, self._identity, recorded=False)
            return self._reply("skipped", received_ns, reason="not selected")
        async with self._starting:
            capture = self._open_capture
            if capture is not None:
                if capture.request.capture_id == request.capture_id:
                    return self._reply("joined", received_ns)
                logger.warning("%s: step %d was never stopped", self._identity, capture.request.step)
                capture.closing = capture.closing or asyncio.create_task(self._close(capture, NOT_STOPPED))
                await asyncio.shield(capture.closing)
            if death := death_of(self._engine):
                raise CaptureStateError(f"start_capture(step={request.step}): {death} ({self._identity})")
            if self._machine.state is State.OVERDUE:
                raise CaptureStateError(
                    f"start_capture(step={request.step}): {self._engine.name} is still writing an earlier "
                    f"capture ({self._identity}); {_RECORD_LESS}"
                )
            capture = await self._open(request, role)
            self._hooks.begun(request, self._identity)
        return self._reply("recording", received_ns, expected=capture.recording.expected)

    async def stop(self, capture_id: str | None, finish_s: float) -> StopReply:
        received_ns = clock.now_ns()
        async with self._starting:  # a capture that is being opened ends once it is open
            capture = self._open_capture
        if capture is not None and capture_id in (None, capture.request.capture_id):
            if capture.closing is None:
                capture.closing = asyncio.create_task(self._close(capture))
            result = await asyncio.shield(capture.closing)
        elif self._file.holds(capture_id):
            result = self._file.result
        else:
            result = nothing_to_stop(self._identity, capture_id, capture.request if capture else None)
        ended = result.capture_id if capture_id is None else capture_id
        self._hooks.ended(ended, lambda: self._finisher.is_done(ended))
        if finish_s:
            await asyncio.to_thread(self._finisher.drain, finish_s)
            if capture_id is None:
                self._hooks.train_ends()
                await asyncio.to_thread(self._hooks.drain, self._hooks.longest_s)
            if result.capture_id and result.capture_id == self._file.result.capture_id:
                result = self._file.result
        return stop_reply(result, received_ns)

    def set_policy_version(self, version: int) -> None:
        self._requests.set_policy_version(version)

    def _role_for(self, request: CaptureRequest) -> RoleConfig:
        """Return the settings of a capture.

        Raises:
            ConfigError: It is aimed at what the engine was not started for.
        """
        if request.aim is None:
            return self._role
        role = self._config.for_role(self._role.role, request.aim)
        own, wanted = (
            [(tool.name, tool.options) for tool in one.tools if tool.suffix] for one in (self._role, role)
        )
        if role.enable and own != wanted:
            tools = ", ".join(name for name, _ in own)
            raise ConfigError(
                f"roles.{role.role}.tool", f"{self._engine.name} was started to record with {tools} alone"
            )
        return role

    def _ranks(self, role: RoleConfig) -> list[int]:
        """Return the ranks inside the replica that are selected."""
        who = self._identity
        return [rank for rank in range(self._engine.ranks) if role.selects(who.rank + rank, who.replica)]

    async def _open(self, request: CaptureRequest, role: RoleConfig) -> _OpenCapture:
        if request.keep:
            Path(request.folder).mkdir(parents=True, exist_ok=True)
        label = f"step{request.step}-{request.occurrence}-{clock.now_ns():x}"
        file = self._file.opened(request, role, self._identity)
        capture = _OpenCapture(request, role, self._recording(request, label, self._ranks(role)), file)
        try:
            with capture.meter.starting(request.stage):
                await while_alive(self._engine, self._engine.start(label))
        except BaseException:
            capture.recording.drop()
            raise
        try:
            capture.recording.opened()
        except OSError:
            await self._engine.stop()
            capture.recording.drop()
            raise
        self._machine.move(Event.START)
        self._open_capture, self._file = capture, capture.file
        clock.hold()
        self._requests.begin(request.policy_version)
        if self._rollout.max_window_s is not None:
            loop = asyncio.get_running_loop()
            capture.timer = loop.call_later(self._rollout.max_window_s, self._end_by_time, capture)
        return capture

    def _end_by_time(self, capture: _OpenCapture) -> None:
        if capture.halting is None:
            capture.recording.notes.append(
                f"{self._identity.name}: recording ended after {self._rollout.max_window_s:g} s "
                "(rollout.max_window_s)"
            )
            self._halt(capture)

    def _halt(self, capture: _OpenCapture) -> asyncio.Task[None]:
        """Start the task that stops the engine's profiler, once; return it."""
        if capture.halting is None:
            self._machine.move(Event.HALT)
            capture.end_ns = clock.now_ns()
            capture.halting = asyncio.create_task(self._stop_engine(capture))
        return capture.halting

    async def _stop_engine(self, capture: _OpenCapture) -> None:
        try:
            with capture.meter.stopping(capture.request.stage):
                await while_alive(self._engine, self._engine.stop())
        finally:
            self._machine.move(Event.WRITTEN)

    async def _close(self, capture: _OpenCapture, failed: str = "") -> CaptureResult:
        if capture.timer is not None:
            capture.timer.cancel()
        halting = self._halt(capture)
        begin = time.perf_counter()
        await asyncio.wait([halting], timeout=self._stop_s)
        waited_s = time.perf_counter() - begin
        if not halting.done():
            artifacts = self._leave_overdue(capture, halting)
        elif (error := halting.exception()) is not None:
            logger.error("%s: stopping the profiler failed: %s", self._identity, error)
            problem = death_of(self._engine) or f"stopping it raised {type(error).__name__}: {error}"
            artifacts = self._fates(capture, problem)
        else:
            artifacts = self._fates(capture, "")
        result = self._result(capture, artifacts, waited_s)
        if failed:
            result = msgspec.structs.replace(result, status="failed", reason=failed)
        self._machine.move(Event.STOP if self._machine.state is State.STOPPED else Event.GIVE_UP)
        self._open_capture = None
        clock.release()
        return capture.file.close(result)

    def _leave_overdue(self, capture: _OpenCapture, halting: asyncio.Task[None]) -> list[Artifact]:
        """Stop waiting; the traces are collected if the engine finishes later."""
        reason = f"{self._engine.name} had not written it {self._stop_s:g} s after the stop; {_RECORD_LESS}"
        logger.error("%s: step %d: %s", self._identity, capture.request.step, reason)

        def collect(task: asyncio.Task[None]) -> None:
            error = None if task.cancelled() else task.exception()
            if error is not None:
                logger.error("%s: stopping the profiler failed: %s", self._identity, error)
            for artifact in self._fates(capture, reason):
                if artifact.status != "pending":
                    capture.file.finished(artifact)

        halting.add_done_callback(collect)
        return _failed(capture, reason)

    def _fates(self, capture: _OpenCapture, problem: str) -> list[Artifact]:
        """Move what was recorded into the step folder; return all expected artifacts with their status."""
        request, artifacts = capture.request, []
        try:
            outputs = capture.recording.gather(capture.end_ns, problem)
        except OSError as error:
            logger.error("%s: step %d: %s", self._identity, request.step, error)
            capture.recording.drop()
            return _failed(capture, f"{self._engine.name} recorded it, but it cannot be moved: {error}")
        for output in outputs:
            artifact, finish = uploaded(output, request.folder, request.upload)
            artifacts.append(artifact)
            if finish is not None:
                self._finisher.submit(request.capture_id, artifact, finish, capture.file.finished)
        return artifacts

    def _result(self, capture: _OpenCapture, artifacts: list[Artifact], waited_s: float) -> CaptureResult:
        status, reason = worst_fate(artifacts)
        if death := death_of(self._engine):  # the workers may have written whole traces before they ended
            status, reason = "failed", death
        if not capture.request.keep:
            status, reason, artifacts = "skipped", "warm-up", []
        capture.anchors.append(clock.read_anchor())
        requests, cost = self._requests.end(), capture.meter.cost()
        return CaptureResult(
            identity=self._identity,
            roles=[self._identity.role],
            capture_id=capture.request.capture_id,
            step=capture.request.step,
            mode=capture.role.mode,
            tools=[capture.recording.tool],
            status=status,
            reason=reason,
            artifacts=artifacts,
            anchors=capture.anchors,
            cost=msgspec.structs.replace(cost, stop_s=cost.stop_s or waited_s),
            tool_spans=list(capture.meter.spans),
            cores=os.cpu_count() or 0,
            notes=[*capture.recording.notes, *self._requests.weight_updates(self._identity.name, requests)],
            requests=requests,
            policy_versions=self._requests.policy_versions,
            devices=self._devices,
            requests_logged=self._requests.enabled,
            pending_since_ns=self._requests.pending_since_ns,
        )

    def _reply(
        self,
        status: StartStatus,
        received_ns: int,
        reason: str = "",
        expected: Sequence[Artifact] = (),
    ) -> StartReply:
        return start_reply(
            self._identity,
            status,
            received_ns,
            reason=reason,
            expected=expected,
        )


def _failed(capture: _OpenCapture, reason: str) -> list[Artifact]:
    return [
        msgspec.structs.replace(artifact, status="failed", reason=reason, end_ns=capture.end_ns)
        for artifact in capture.recording.expected
    ]
