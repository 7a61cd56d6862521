"""The answers of the workers of one capture: what they recorded, why some did not, and their clocks."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from verl_profiling import clock
from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply, result_of
from verl_profiling.capture_request import Aim
from verl_profiling.clock import Handshake, best_handshake
from verl_profiling.controller.targets import Call, Round, Target, Worker
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, HostClock, Rpc
from verl_profiling.settings.config import ProfilingConfig

__all__ = ["Answers"]

logger = logging.getLogger(__name__)

NOT_WRITTEN = "the capture has begun, and nothing was written since"
Reply = TypeVar("Reply", StartReply, StopReply)


@dataclass
class _Answer:
    """The answers of one worker.

    Attributes:
        target: Its target.
        identity: Who it is.
        started: Its answer to the last start; ``None`` if there is none.
        is_open: It was started, and has not been stopped.
        result: Its last result.
        failure: What stands for a result that it owes.
    """

    target: Target
    identity: WorkerIdentity
    started: StartReply | None = None
    is_open: bool = False
    result: CaptureResult | None = None
    failure: CaptureResult | None = None


class Answers:
    """Keeps the answers of every worker during one capture.

    Args:
        config: The settings.
        known: Identity of each worker, from its answers; kept from capture to capture.
        aim: What the capture does differently.
        alone: There are no workers in other processes that it may be aimed at instead.

    Attributes:
        rpcs: All calls made.
        notes: Notes for the user.
        owing: Workers that may still write something when their stop has been answered, or should have been.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        known: dict[Worker, WorkerIdentity],
        aim: Aim | None = None,
        alone: bool = True,
    ) -> None:
        self.rpcs: list[Rpc] = []
        self.notes: list[str] = []
        self.owing: set[Worker] = set()
        self._config = config
        self._aim = aim
        self._is_aimed_elsewhere = not alone and aim is not None and aim.ranks is not None
        self._known = known
        self._all: dict[Worker, _Answer] = {}
        self._opening: dict[str, list[Handshake]] = {}
        self._closing: dict[str, list[Handshake]] = {}

    def called(self, targets: Iterable[Target]) -> None:
        """Note who is called to start: whatever happens now, they have to be stopped."""
        for worker in ((target, index) for target in targets for index in range(target.size)):
            answer = self._all.setdefault(worker, _Answer(worker[0], self._identity(worker)))
            answer.started, answer.is_open = None, True

    def take_starts(self, round: Round, request: CaptureRequest) -> None:
        """Take the answers to ``start_capture``."""
        for call in round.calls:
            answer = self._all[call.worker]
            answer.started = reply = self._reply(call, StartReply, self._opening)
            if reply is None:
                self._fail(answer, request, call.problem(round.timeout_s), stopped=False)
                continue
            answer.identity = self._known[call.worker] = reply.identity
            if reply.status == "refused":
                logger.warning("step %d: %s is not captured: %s", request.step, answer.identity, reply.reason)
                lost = self._lost(answer, request, reply.reason)
                answer.failure = msgspec.structs.replace(lost, status="skipped")
        self._note_twins()
        if not self._is_aimed_elsewhere:
            self._note_idle_roles(round)

    def take_stops(self, round: Round, request: CaptureRequest) -> None:
        """Take the answers to ``stop_capture``; a worker that is late writes its result itself."""
        for call in round.calls:
            answer = self._all.get(call.worker)
            if answer is None or not answer.is_open:
                continue
            answer.is_open = False
            reply, started = self._reply(call, StopReply, self._closing), answer.started
            if reply is None:
                self.owing.add(call.worker)
                self._fail(answer, request, call.problem(round.timeout_s))
            elif started is not None and started.status in ("skipped", "refused"):
                pass  # it recorded nothing, as it said
            elif reply.result.status == "skipped" and started is None:
                pass  # its start failed
            elif started is not None and reply.process != started.process:
                reason = (
                    f"{started.process} recorded, but {reply.process} answered the stop: the "
                    "worker was restarted, and what it had recorded is lost"
                )
                self._fail(answer, request, reason)
            elif reply.result.status == "skipped" and not reply.result.revision:
                self._fail(answer, request, reply.result.reason)  # another capture closed it
            else:
                answer.identity = self._known[call.worker] = reply.result.identity
                answer.result = reply.result
                if any(artifact.status == "pending" for artifact in reply.result.artifacts):
                    self.owing.add(call.worker)

    def take_handshakes(self, round: Round, closing: bool) -> None:
        """Take the answers to repeated calls, which only measure clocks."""
        for call in round.calls:
            reply = call.reply()
            if isinstance(reply, StartReply | StopReply):
                self._shake(self._closing if closing else self._opening, call, reply)

    @property
    def targets(self) -> list[Target]:
        """Those that were called to start."""
        return list(dict.fromkeys(target for target, _ in self._all))

    def expected(self, request: CaptureRequest, targets: Iterable[Target]) -> list[CaptureResult]:
        """Return what stands for each worker until its result is there, with what it has promised."""
        found: dict[str, CaptureResult] = {}
        for target in targets:
            for worker in ((target, index) for index in range(target.size)):
                answer = self._all.get(worker) or _Answer(target, self._identity(worker))
                if answer.started is None or answer.started.status in ("recording", "armed"):
                    result = answer.failure or self._lost(answer, request, NOT_WRITTEN)
                    found.setdefault(result.name, result)
        return list(found.values())

    def model(self, request: CaptureRequest, target: Target) -> CaptureResult:
        """Return what stands for a worker of a target that has not answered."""
        return self._lost(_Answer(target, self._identity((target, 0))), request, NOT_WRITTEN)

    def remote_clocks(self, targets: Iterable[Target], handshakes: int) -> Counter[Target]:
        """Return by which of some targets each clock is reached that is not the controller's.

        Args:
            targets: The targets.
            handshakes: How many are to be had of each clock; every worker of a target that reads it has one.

        Returns:
            How often each target has to be called for that.
        """
        asked, here = set(targets), clock.domain()
        reached = Counter(
            (answer.identity.clock_domain, target)
            for (target, _), answer in self._all.items()
            if answer.started is not None and answer.identity.clock_domain != here and target in asked
        )
        times: Counter[Target] = Counter()
        for domain, target in dict(reached.keys()).items():
            times[target] = max(times[target], -(-handshakes // reached[domain, target]))
        return times

    def clocks(self) -> list[HostClock]:
        """Return one entry for each clock that was seen."""
        hosts = {answer.identity.clock_domain: answer.identity.host for answer in self._all.values()}
        return [self._clock(domain, host) for domain, host in hosts.items() if domain in self._opening]

    def results(self) -> list[CaptureResult]:
        """Return one result for each process, sorted by role and rank: its latest, or why there is none."""
        found: dict[str, CaptureResult] = {}
        for answer in self._all.values():
            result = _with_failure(answer.result, answer.failure)
            if result is None:
                continue
            other = found.get(result.name)
            if other is None or other.revision < result.revision:
                found[result.name] = result
        return sorted(
            found.values(), key=lambda one: (one.identity.role, one.identity.replica or 0, one.identity.rank)
        )

    def _reply(self, call: Call, kind: type[Reply], handshakes: dict[str, list[Handshake]]) -> Reply | None:
        reply = call.reply()
        worker = self._known.get(call.worker) or self._identity(call.worker)
        end_ns = call.returned_ns or call.sent_ns
        self.rpcs.append(Rpc(worker.name, call.method, call.sent_ns, end_ns, isinstance(reply, kind)))
        if not isinstance(reply, kind):
            return None
        self._shake(handshakes, call, reply)
        return reply

    def _identity(self, worker: Worker) -> WorkerIdentity:
        """Return a worker's identity, derived from its target if it has never answered."""
        target, index = worker
        number = target.first + index
        replica = number if target.is_rollout else None
        guess = WorkerIdentity(
            role=target.roles[0], rank=number, replica=replica, host="unknown", clock_domain="unknown", pid=0
        )
        return self._known.get(worker, guess)

    def _fail(self, answer: _Answer, request: CaptureRequest, reason: str, stopped: bool = True) -> None:
        """Note that a worker failed; its first failure stays.

        Args:
            answer: Its answers so far.
            request: The capture.
            reason: Why it failed.
            stopped: ``False``: it may begin to record whenever the request reaches it.
        """
        logger.error("step %d: %s was not captured: %s", request.step, answer.identity, reason)
        lost = msgspec.structs.replace(self._lost(answer, request, reason), stopped=stopped)
        answer.failure = answer.failure or lost

    def _lost(self, answer: _Answer, request: CaptureRequest, reason: str) -> CaptureResult:
        role = self._config.for_role(answer.target.roles[0], self._aim)
        started = answer.started
        return result_of(
            request,
            role,
            answer.identity,
            roles=list(answer.target.roles),
            status="failed",
            reason=reason,
            process=started.process if started is not None else None,
            artifacts=[
                msgspec.structs.replace(artifact, status="missing", step=request.step, reason=reason)
                for artifact in (started.expected if started is not None else ())
            ],
        )

    def _note_twins(self) -> None:
        seen: dict[str, WorkerIdentity] = {}
        for answer in self._all.values():
            twin = seen.setdefault(answer.identity.name, answer.identity)
            if (twin.host, twin.pid) != (answer.identity.host, answer.identity.pid):
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
        self, handshakes: dict[str, list[Handshake]], call: Call, reply: StartReply | StopReply
    ) -> None:
        who = reply.identity if isinstance(reply, StartReply) else reply.result.identity
        handshake = Handshake(call.sent_ns, reply.received_ns, reply.replied_ns, call.returned_ns)
        handshakes.setdefault(who.clock_domain, []).append(handshake)

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


def _with_failure(result: CaptureResult | None, failure: CaptureResult | None) -> CaptureResult | None:
    """Return the result of a worker's windows, of which one may have failed."""
    if result is None or failure is None:
        return result or failure
    return msgspec.structs.replace(
        result,
        status=failure.status,
        reason=failure.reason,
        artifacts=[*result.artifacts, *failure.artifacts],
    )
