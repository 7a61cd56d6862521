"""The workers of one capture: gathers their answers, names failures, merges results."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import Aim, CaptureRequest, Finished, StartReply, StopReply
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.calls import Call, Round, Target, Worker
from verl_profiling.controller.leftovers import take_up
from verl_profiling.controller.loop_metrics import finite_numbers
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    CaptureCost,
    CaptureResult,
    CaptureStatus,
    HostClock,
    Rpc,
    worst_fate,
)
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Participants"]

logger = logging.getLogger(__name__)

NOT_WRITTEN = "the capture has begun, and nothing was written since"
_WORST_FIRST: tuple[CaptureStatus, ...] = ("failed", "truncated", "empty", "ok", "skipped")
Reply = TypeVar("Reply", StartReply, StopReply)


@dataclass
class _Participant:
    identity: WorkerIdentity
    started: StartReply | None = None
    recorder: StartReply | None = None
    results: list[CaptureResult] = field(default_factory=list)


class Participants:
    """Keeps the answers of every worker during one capture.

    Args:
        config: The settings.
        known: Identity of each worker, from its answers; kept from capture to capture.
        aim: What the capture does differently.
        alone: There are none in other processes that it may be aimed at instead.

    Attributes:
        rpcs: All calls made.
        finished: Artifacts of earlier captures that were finished since.
        notes: Notes for the user.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        known: dict[Worker, WorkerIdentity],
        aim: Aim | None = None,
        alone: bool = True,
    ) -> None:
        self.rpcs: list[Rpc] = []
        self.finished: list[Finished] = []
        self.notes: list[str] = []
        self._config = config
        self._aim = aim
        self._is_aimed_elsewhere = not alone and aim is not None and aim.ranks is not None
        self._known = known
        self._all: dict[Worker, _Participant] = {}
        self._opening: dict[str, list[Handshake]] = {}
        self._closing: dict[str, list[Handshake]] = {}

    def take_calls(self, round: Round) -> None:
        """Note who was called to start: whatever happens now, they have to be stopped."""
        for call in round.calls:
            self._all.setdefault(call.worker, _Participant(self._identity(call.worker)))

    def take_starts(self, round: Round, request: CaptureRequest) -> None:
        """Take the answers to ``start_capture``."""
        for call in round.calls:
            reply = self._reply(call, StartReply)
            if reply is not None:
                self._known[call.worker] = reply.identity
                self._shake(self._opening, call, reply.identity, reply)
            entry = self._all.setdefault(call.worker, _Participant(self._identity(call.worker)))
            entry.identity = self._identity(call.worker)
            entry.started = entry.recorder = reply
            if reply is None:
                entry.results.append(self._failed(entry, request, call.problem(round.timeout_s), call.target))
            elif reply.status == "refused":
                entry.results.append(self._refused(entry, request, reply.reason, call.target))
        self._note_twins()
        if not self._is_aimed_elsewhere:
            self._note_idle_roles(round)

    def take_stops(self, round: Round, request: CaptureRequest) -> list[Call]:
        """Note the answers to ``stop_capture``; return the calls that may still bring a recording."""
        overdue = []
        for call in round.calls:
            entry = self._all.get(call.worker)
            if entry is None or (entry.started is None and entry.results):
                self.finished += getattr(call.reply(), "finished", ())
                continue
            if entry.started is None:
                self._take_interrupted(entry, call, request)
                continue
            reply = self._reply(call, StopReply)
            if reply is not None:
                self._shake(self._closing, call, entry.identity, reply)
                if entry.started.status in ("skipped", "refused"):
                    pass
                elif reply.process != entry.started.process:
                    reason = (
                        f"{entry.started.process} recorded, but {reply.process} answered the stop: the "
                        "worker was restarted, and what it had recorded is lost"
                    )
                    entry.results.append(self._failed(entry, request, reason, call.target, gone=True))
                else:
                    result = _labelled(reply.result, request, call.target)
                    entry.results.append(_with_all_promised(result, entry.started, request))
            else:
                gone = self._is_gone(call)
                reason = call.problem(round.timeout_s)
                entry.results.append(self._failed(entry, request, reason, call.target, gone=gone))
                recorded = entry.started.status not in ("skipped", "refused")
                if recorded and (not call.future.done() or self.is_ending(call)):
                    overdue.append(call)
            entry.started = None
        return overdue

    def is_ending(self, call: Call) -> bool:
        """Return whether a worker seems to be dead whose process can still be seen: it may be writing."""
        return call.may_have_died and not self._is_gone(call)

    def _is_gone(self, call: Call) -> bool:
        recorder = self._all[call.worker].recorder
        alive = recorder.process.alive() if recorder is not None else None
        return alive is False or (alive is None and call.died)

    def _take_interrupted(self, entry: _Participant, call: Call, request: CaptureRequest) -> None:
        """Take what a worker recorded whose answer to the start nobody waited for: an exception came."""
        reply = self._reply(call, StopReply)
        if reply is None:
            reason = "the start of the capture was interrupted before the worker had answered"
            entry.results.append(self._failed(entry, request, reason, call.target))
        elif reply.result.status != "skipped":
            entry.identity = self._known[call.worker] = reply.result.identity
            entry.results.append(_labelled(reply.result, request, call.target))

    def take_late_stop(self, call: Call, request: CaptureRequest) -> CaptureResult | None:
        """Note an answer to ``stop_capture`` that came late; return the worker's result, if there is one."""
        if call.may_have_died:
            entry = self._all[call.worker]
            lost = self._failed(entry, request, call.problem(0.0), call.target, gone=True)
            return self._replace(entry, lost)
        reply = call.reply()
        if not isinstance(reply, StopReply) or reply.result.capture_id != request.capture_id:
            return None
        late = _labelled(reply.result, request, call.target)
        seconds = (call.returned_ns - call.sent_ns) / 1e9
        note = (
            f"{late.name} stopped {seconds:.1f} s after it was told to, later than timeouts.stop_s="
            f"{self._config.timeouts.stop_s:g}; its recording is taken up, and may reach beyond the step"
        )
        logger.warning("step %d: %s", request.step, note)
        late = msgspec.structs.replace(late, notes=[*late.notes, note])
        return self._replace(self._all[call.worker], late)

    def _replace(self, entry: _Participant, late: CaptureResult) -> CaptureResult:
        """Put a worker's result in the place of the one of the same capture; return its merged result."""
        entry.results = [late if result.capture_id == late.capture_id else result for result in entry.results]
        return next(result for result in self.results() if result.name == late.name)

    def take_handshakes(self, round: Round, closing: bool) -> None:
        """Take the answers to repeated calls, which only measure clocks."""
        for call in round.calls:
            reply = call.reply()
            if isinstance(reply, StartReply | StopReply):
                self.finished += reply.finished
                side = self._closing if closing else self._opening
                self._shake(side, call, self._identity(call.worker), reply)

    def called(self, targets: Iterable[Target]) -> list[Target]:
        """Return those of ``targets`` that were called to start."""
        told = {id(target) for target, _ in self._all}
        return [target for target in targets if id(target) in told]

    def identities(self) -> list[WorkerIdentity]:
        """Return who records, in no particular order."""
        return [
            entry.identity
            for entry in self._all.values()
            if entry.started is not None and entry.started.status in ("recording", "armed")
        ]

    def expected(self, request: CaptureRequest, targets: Iterable[Target]) -> list[CaptureResult]:
        """Return what stands for each worker until its results are there, with what it has promised."""
        found: dict[str, CaptureResult] = {}
        for target in targets:
            for worker in ((target, index) for index in range(target.size)):
                entry = self._all.get(worker, _Participant(self._identity(worker)))
                if entry.started is None or entry.started.status in ("recording", "armed"):
                    result = self._lost(entry, request, NOT_WRITTEN, target)
                    found.setdefault(result.name, result)
        return list(found.values())

    def remote_clocks(self) -> list[Target]:
        """Return one target for each clock that is not the controller's."""
        found: dict[str, Target] = {}
        for (target, _), entry in self._all.items():
            if entry.started is not None and entry.identity.clock_domain != clock.domain():
                found.setdefault(entry.identity.clock_domain, target)
        return list(found.values())

    def clocks(self) -> list[HostClock]:
        """Return one entry for each clock that was seen."""
        hosts = {entry.identity.clock_domain: entry.identity.host for entry in self._all.values()}
        return [self._clock(domain, host) for domain, host in hosts.items() if domain in self._opening]

    def results(self) -> list[CaptureResult]:
        """Return one result for each worker, its windows merged, sorted by role and rank."""
        by_name: dict[str, list[CaptureResult]] = {}
        for entry in self._all.values():
            for result in entry.results:
                same = by_name.setdefault(result.name, [])
                for place, other in enumerate(same):
                    if (result.capture_id, result.identity) == (other.capture_id, other.identity):
                        same[place] = _with_requests(other, result)
                        break
                else:
                    same.append(result)
        merged = [_merge(results) for results in by_name.values()]
        return sorted(
            merged,
            key=lambda result: (result.identity.role, result.identity.replica or 0, result.identity.rank),
        )

    def _reply(self, call: Call, kind: type[Reply]) -> Reply | None:
        reply = call.reply()
        usable = reply if isinstance(reply, kind) else None
        if usable is not None:
            self.finished += usable.finished
        worker = self._known.get(call.worker) or self._identity(call.worker)
        end_ns = call.returned_ns or call.sent_ns
        self.rpcs.append(Rpc(worker.name, call.method, call.sent_ns, end_ns, usable is not None))
        return usable

    def _identity(self, worker: Worker) -> WorkerIdentity:
        """Return a worker's identity, derived from its target if it has never answered."""
        target, index = worker
        number = target.first + index
        replica = number if target.is_rollout else None
        guess = WorkerIdentity(
            role=target.roles[0], rank=number, replica=replica, host="unknown", clock_domain="unknown", pid=0
        )
        return self._known.get(worker, guess)

    def _failed(
        self,
        entry: _Participant,
        request: CaptureRequest,
        reason: str,
        target: Target,
        gone: bool = False,
    ) -> CaptureResult:
        """Return the result of a worker without an answer; with what it left if its process is gone."""
        logger.error("step %d: %s was not captured: %s", request.step, entry.identity, reason)
        result = self._lost(entry, request, reason, target)
        if not gone or not request.keep:
            return result
        tools = self._config.for_role(target.roles[0], self._aim).tools
        left = take_up(Path(request.folder), entry.identity.lane(), tools, result.artifacts)
        return msgspec.structs.replace(
            result, artifacts=[msgspec.structs.replace(artifact, step=request.step) for artifact in left]
        )

    def _refused(
        self, entry: _Participant, request: CaptureRequest, reason: str, target: Target
    ) -> CaptureResult:
        """Return the result of a worker that cannot record what the capture is aimed at."""
        logger.warning("step %d: %s is not captured: %s", request.step, entry.identity, reason)
        return msgspec.structs.replace(self._lost(entry, request, reason, target), status="skipped")

    def _lost(
        self, entry: _Participant, request: CaptureRequest, reason: str, target: Target
    ) -> CaptureResult:
        role = self._config.for_role(target.roles[0], self._aim)
        expected = entry.recorder.expected if entry.recorder is not None else ()
        return CaptureResult(
            identity=entry.identity,
            roles=list(target.roles),
            capture_id=request.capture_id,
            step=request.step,
            mode=role.mode,
            tools=[tool.name for tool in role.tools],
            status="failed",
            reason=reason,
            artifacts=[
                msgspec.structs.replace(artifact, status="missing", step=request.step, reason=reason)
                for artifact in expected
            ],
        )

    def _note_twins(self) -> None:
        seen: dict[str, WorkerIdentity] = {}
        for entry in self._all.values():
            twin = seen.setdefault(entry.identity.name, entry.identity)
            if (twin.host, twin.pid) != (entry.identity.host, entry.identity.pid):
                self._note(
                    f"two workers are called {twin.name} and overwrite each other: pass rank= to init_capture"
                )

    def _note_idle_roles(self, round: Round) -> None:
        """Note roles of which all workers were called to start, but none records."""
        reasons: dict[str, list[str]] = {}
        for call in round.calls:
            started = self._all[call.worker].started
            skipped = started is not None and started.status == "skipped"
            reasons.setdefault(call.target.roles[0], []).append(started.reason if started and skipped else "")
        for role, found in reasons.items():
            if set(found) == {"not selected"}:
                self._note(
                    f"the selection of ranks or replicas matches none of {len(found)} workers of role {role}"
                )
            elif all(found):
                self._note(f"no worker of role {role} is captured: {', '.join(dict.fromkeys(found))}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            logger.warning("%s", text)
            self.notes.append(text)

    def _shake(
        self,
        side: dict[str, list[Handshake]],
        call: Call,
        identity: WorkerIdentity,
        reply: StartReply | StopReply,
    ) -> None:
        handshake = Handshake(call.sent_ns, reply.received_ns, reply.replied_ns, call.returned_ns)
        side.setdefault(identity.clock_domain, []).append(handshake)

    def _clock(self, domain: str, host: str) -> HostClock:
        if domain == clock.domain():
            return HostClock(host=host, clock_domain=domain)
        opening, closing = self._opening[domain], self._closing.get(domain, [])
        first, last = best_handshake(opening), best_handshake(closing or opening)
        return HostClock(
            host=host,
            clock_domain=domain,
            offset_ns=first.offset_ns,
            error_ns=first.error_ns,
            closing_offset_ns=last.offset_ns,
            closing_error_ns=last.error_ns,
            samples=len(opening) + len(closing),
        )


def _labelled(result: CaptureResult, request: CaptureRequest, target: Target) -> CaptureResult:
    """Return a result with its roles, checked metrics, and step and versions on its artifacts."""
    metrics, notes = finite_numbers(result.metrics)
    return msgspec.structs.replace(
        result,
        metrics=metrics,
        notes=[*result.notes, *(f"{result.name}: {note}" for note in notes)],
        roles=list(dict.fromkeys([*result.roles, *target.roles])),
        artifacts=[
            msgspec.structs.replace(artifact, step=request.step, policy_versions=result.policy_versions)
            for artifact in result.artifacts
        ],
    )


def _with_all_promised(result: CaptureResult, started: StartReply, request: CaptureRequest) -> CaptureResult:
    """Return a result with an entry for every artifact that was promised at the start."""
    if not request.keep:
        return result
    reason = "the worker promised it, and did not say what became of it"
    lost = [
        msgspec.structs.replace(promised, status="missing", step=request.step, reason=reason)
        for promised in started.expected
        if not any(promised.is_run_of(artifact) for artifact in result.artifacts)
    ]
    if not lost:
        return result
    artifacts = [*result.artifacts, *lost]
    status, why = worst_fate(artifacts)
    return msgspec.structs.replace(result, artifacts=artifacts, status=status, reason=why)


def _with_requests(result: CaptureResult, other: CaptureResult) -> CaptureResult:
    """Return a recording with what only another object of its process knows: the requests of its engine."""
    known = {(request.replica, request.id, request.begin_ns, request.end_ns) for request in result.requests}
    more = [
        request
        for request in other.requests
        if (request.replica, request.id, request.begin_ns, request.end_ns) not in known
    ]
    return msgspec.structs.replace(
        result,
        requests=[*result.requests, *more],
        policy_versions=list(dict.fromkeys([*result.policy_versions, *other.policy_versions])),
        notes=list(dict.fromkeys([*result.notes, *other.notes])),
    )


def _merge(results: list[CaptureResult]) -> CaptureResult:
    """Return one result for several windows (or several names) of one worker."""
    first = min(results, key=lambda result: _WORST_FIRST.index(result.status))
    return msgspec.structs.replace(
        first,
        step=min(result.step for result in results),
        roles=list(dict.fromkeys(role for result in results for role in result.roles)),
        artifacts=[artifact for result in results for artifact in result.artifacts],
        stages=[span for result in results for span in result.stages],
        anchors=[anchor for result in results for anchor in result.anchors],
        requests=[request for result in results for request in result.requests],
        notes=list(dict.fromkeys(note for result in results for note in result.notes)),
        policy_versions=list(dict.fromkeys(v for result in results for v in result.policy_versions)),
        metrics={name: value for result in results for name, value in result.metrics.items()},
        cost=CaptureCost(
            start_s=sum(result.cost.start_s for result in results),
            stop_s=sum(result.cost.stop_s for result in results),
            export_s=sum(result.cost.export_s for result in results),
        ),
    )
