"""The workers of a capture: the calls that start and stop them, their replies and results."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from msgspec.structs import replace

from verl_profiling import clock
from verl_profiling.capture.protocol import CaptureStart, StartReply, StopReply, result_of
from verl_profiling.clock import Handshake
from verl_profiling.controller.roster import Roster
from verl_profiling.controller.spmd import HANDSHAKES, Ranks, measured_clock
from verl_profiling.controller.worker_calls import Call, Target, Waits, Worker, wait_for
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import CaptureResult, HostClock, Rpc

logger = logging.getLogger(__name__)

NOT_WRITTEN = "the capture has begun, and nothing was written since"


@dataclass
class CapturedWorkers:
    """The workers that take part in a capture.

    Attributes:
        roster: All workers of the callback.
        request: The request that is sent to them.
        ranks: The connection to the other ranks of an SPMD loop, where each rank captures its own
            workers; ``None`` in a loop of one process.
        notes: Sentences for the user about this capture, for its manifest.
        rpcs: Times of the calls that start and stop workers, for the manifest.
    """

    roster: Roster
    request: CaptureStart
    ranks: Ranks | None
    notes: list[str]
    rpcs: list[Rpc] = field(default_factory=list)
    _windows: int = 0
    _open: list[tuple[CaptureStart, list[Target]]] = field(default_factory=list)
    _started: dict[Worker, StartReply | None] = field(default_factory=dict)
    _results: dict[Worker, CaptureResult] = field(default_factory=dict)
    _failures: dict[Worker, CaptureResult] = field(default_factory=dict)
    _handshakes: dict[str, tuple[str, list[Handshake], list[Handshake]]] = field(
        default_factory=dict
    )

    def start(self, request: CaptureStart) -> Waits[None]:
        """Start the workers that a request selects.

        A request with a ``stage`` (the rollout) starts the engines in discrete mode. A request
        without one starts all other workers.
        """
        targets = self.roster.driven(request.selection, windowed=request.stage is not None)
        self._open.append((request, targets))  # to be stopped even if the start fails
        for target in targets:
            for worker in target.workers:
                self._started[worker] = None
        start_s = self.roster.config.timeouts.start_s
        calls = self.roster.call(targets, "start_capture", request, timeout_s=start_s)
        yield partial(wait_for, calls)
        for call in calls:
            self._take_start(call, request)
        self._note_twins()
        if self.ranks is None or request.selection is None or request.selection.ranks is None:
            self._note_idle_roles(calls)
        yield from self._shake_hands("start_capture", request, targets)

    def begin_rollout(self, step: int) -> Waits[None]:
        """Start the rollout engines in discrete mode; each of their recordings is one rollout."""
        yield from self.stop(ROLLOUT)
        selection = self.request.selection
        if self.roster.driven(selection, windowed=True):
            self._windows += 1
            window = replace(
                self.request,
                capture_id=f"{self.request.capture_id}/{self._windows}",
                stage=ROLLOUT,
                occurrence=self._windows,
                step=step,
            )
            yield from self.start(window)

    def stop(self, stage: str | None = None) -> Waits[None]:
        """Stop all workers that were started, concurrently; with a ``stage``, only its workers."""
        stopping = [opened for opened in self._open if stage in (None, opened[0].stage)]
        if not stopping:
            return
        stop_s = self.roster.config.timeouts.stop_s
        calls: dict[Call, CaptureStart] = {}
        for request, targets in stopping:
            stops = self.roster.call(targets, "stop_capture", request.capture_id, timeout_s=stop_s)
            calls |= dict.fromkeys(stops, request)
        yield partial(wait_for, calls)
        self._open = [opened for opened in self._open if opened not in stopping]
        for call, request in calls.items():
            self._take_stop(call, request)
        targets = [call.target for call in calls]
        yield from self._shake_hands("stop_capture", stopping[0][0].capture_id, targets)

    def _shake_hands(self, method: str, argument: object, targets: Iterable[Target]) -> Waits[None]:
        """Measure the clock offsets of other hosts by repeating a call, which starts or stops
        nothing again.

        One target per clock is enough. Each of its workers with this clock adds a handshake: the
        times of the call and of its reply.
        """
        here = clock.domain()
        reached: Counter[tuple[str, Target]] = Counter()
        for worker, started in self._started.items():
            domain, target = worker.identity.clock_domain, worker.target
            if started is not None and domain != here and target in targets:
                reached[domain, target] += 1
        chosen = dict(reached.keys())
        start_s = self.roster.config.timeouts.start_s
        for turn in range(HANDSHAKES):
            again = set()
            for domain, target in chosen.items():
                if turn * reached[domain, target] < HANDSHAKES:
                    again.add(target)
            if not again:
                return
            calls = self.roster.call(again, method, argument, timeout_s=start_s)
            yield partial(wait_for, calls)
            for call in calls:
                self._take(call, noted=False)

    def _take_start(self, call: Call, request: CaptureStart) -> None:
        reply = self._take(call)
        if not isinstance(reply, StartReply):
            self._fail(call.worker, request, call.problem(), stopped=False)
            return
        self._started[call.worker] = reply
        call.worker.identity = reply.identity
        if reply.status == "refused":
            who = reply.identity
            why = reply.reason
            logger.warning("step %d: %s is not captured: %s", request.step, who, why)
            self._failures[call.worker] = self._lost(call.worker, request, why, status="skipped")

    def _take_stop(self, call: Call, request: CaptureStart) -> None:
        """Keep the reply to ``stop_capture``; a worker
        that replies too late still writes its result file.
        """
        reply = self._take(call)
        started = self._started[call.worker]
        if not isinstance(reply, StopReply):
            self.roster.owing.add(call.target)
            self._fail(call.worker, request, call.problem())
            return
        result = reply.result
        if started is not None and started.status in ("skipped", "refused"):
            return  # it recorded nothing, as its start reply said
        if started is None and result.status == "skipped":
            return  # its start failed
        if started is not None and reply.process != started.process:
            reason = (
                f"{started.process} recorded, but {reply.process} answered the stop: the "
                "worker was restarted, and its recording is lost"
            )
            self._fail(call.worker, request, reason)
        elif result.status == "skipped" and not result.revision:
            self._fail(call.worker, request, result.reason)  # another capture closed it
        else:
            call.worker.identity = result.identity
            self._results[call.worker] = result
            for artifact in result.artifacts:
                if artifact.status == "pending":
                    self.roster.owing.add(call.target)

    def _take(self, call: Call, noted: bool = True) -> StartReply | StopReply | None:
        """Return the reply to a call; keep its clock handshake and, if ``noted``,
        the call's times.
        """
        reply: StartReply | StopReply = call.reply()
        answered = isinstance(reply, StartReply | StopReply)
        if noted:
            end_ns = call.returned_ns or call.sent_ns
            name = call.worker.identity.name
            self.rpcs.append(Rpc(name, call.method, call.sent_ns, end_ns, answered))
        if not answered:
            return None
        identity = reply.identity if isinstance(reply, StartReply) else reply.result.identity
        _, opening, closing = self._handshakes.setdefault(
            identity.clock_domain, (identity.host, [], [])
        )
        handshake = Handshake(call.sent_ns, reply.received_ns, reply.replied_ns, call.returned_ns)
        (opening if isinstance(reply, StartReply) else closing).append(handshake)
        return reply

    def _fail(
        self, worker: Worker, request: CaptureStart, reason: str, stopped: bool = True
    ) -> None:
        """Record the failure of a worker.

        Unless the worker is ``stopped``, a delayed request may still start it.
        """
        if worker in self._failures:  # the first reason is kept
            return
        logger.error("step %d: %s was not captured: %s", request.step, worker.identity, reason)
        self._failures[worker] = self._lost(worker, request, reason, stopped=stopped)

    def _note_twins(self) -> None:
        first: dict[str, WorkerIdentity] = {}
        for worker in self._started:
            who = worker.identity
            twin = first.setdefault(who.name, who)
            if (twin.host, twin.pid) != (who.host, who.pid):
                self._note(
                    f"two workers are called {twin.name} and overwrite each other: pass rank= to "
                    "init_capture"
                )

    def _note_idle_roles(self, calls: list[Call]) -> None:
        """Add a note for each role whose workers were all called, but none records."""
        reasons_of: dict[str, list[str]] = {}
        for call in calls:
            started = self._started[call.worker]
            skipped = started is not None and started.status == "skipped"
            reason = started.reason if started and skipped else ""
            reasons_of.setdefault(call.target.roles[0], []).append(reason)
        for role, reasons in reasons_of.items():
            if set(reasons) == {"not selected"}:
                self._note(
                    f"the selection of ranks or replicas matches none of {len(reasons)} workers "
                    f"of role {role}"
                )
            elif all(reasons):
                why = ", ".join(dict.fromkeys(reasons))
                self._note(f"no worker of role {role} is captured: {why}")

    def _note(self, text: str) -> None:
        if text not in self.notes:
            logger.warning("%s", text)
            self.notes.append(text)

    def expected(self) -> list[CaptureResult]:
        """Return one placeholder result per worker, with the artifacts that its start reply lists.

        The manifest has them until the real results come. Placeholders for the other ranks of the
        loop follow.
        """
        expected: dict[str, CaptureResult] = {}
        for target in self.roster.driven(self.request.selection):
            for worker in target.workers:
                started = self._started.get(worker)
                if started is not None and started.status not in ("recording", "armed"):
                    continue
                result = self._failures.get(worker)
                if result is None:
                    result = self._lost(worker, self.request, NOT_WRITTEN)
                expected.setdefault(result.identity.name, result)
        return [*expected.values(), *self.others()]

    def results(self) -> list[CaptureResult]:
        """Return one result per process: its latest, or a result ``failed`` with the reason."""
        results: dict[str, CaptureResult] = {}
        for worker in self._started:
            failure = self._failures.get(worker)
            result = self._results.get(worker, failure)
            if result is None:
                continue
            if failure is not None and result is not failure:  # one of several rollouts failed
                artifacts = [*result.artifacts, *failure.artifacts]
                result = replace(
                    result, status=failure.status, reason=failure.reason, artifacts=artifacts
                )
            name = result.identity.name
            if name not in results or results[name].revision < result.revision:
                results[name] = result
        return list(results.values())

    def others(self) -> list[CaptureResult]:
        """Return empty results for the other ranks of the loop, which write the real results
        themselves.
        """
        if self.ranks is None:
            return []
        [target, *_] = self.roster.driven(self.request.selection) or self.roster.targets
        model = self._lost(target.workers[0], self.request, NOT_WRITTEN, artifacts=[])
        return self.ranks.expected(model, self.request.selection)

    def _lost(
        self, worker: Worker, request: CaptureStart, reason: str, **fields: Any
    ) -> CaptureResult:
        role = self.roster.config.for_role(worker.target.roles[0], self.request.selection)
        started = self._started.get(worker)
        if started is not None:
            fields["process"] = started.process
            lost = partial(replace, status="missing", step=request.step, reason=reason)
            fields.setdefault("artifacts", list(map(lost, started.expected)))
        fields = {"status": "failed", **fields}
        roles = list(worker.target.roles)
        return result_of(request, role, worker.identity, roles=roles, reason=reason, **fields)

    def clocks(self) -> list[HostClock]:
        """Return the measured clock offset of each clock domain."""
        clocks = []
        for domain, (host, opening, closing) in self._handshakes.items():
            if domain == clock.domain():
                clocks.append(HostClock(host=host, clock_domain=domain))
            elif opening:
                clocks.append(measured_clock(host, domain, opening, closing))
        return clocks
