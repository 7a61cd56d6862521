"""The kinds of hang, and the process that all others wait for.

A new kind is a number of :class:`_Kind`, and the rule by which a process has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path

from verl_profiling import clock
from verl_profiling.files.machine import process_status
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId, WorkerIdentity, pid_namespace
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import duration
from verl_profiling.watch.hangs import OpenPart, ProcessState

_STOPPED = ("T", "t")  # states in /proc
_DEAD = ("Z", "X")


class _Kind(IntEnum):
    """The kinds of hang; the process with the least is reported. docs/hangs.md explains each.

    A process that cannot answer comes first, then one whose open work no other process explains.
    Processes wait along a chain: loop, worker or agent loop, engine, tool or collective.
    """

    DEAD_OR_STOPPED = 0
    WRITES_NOTHING = 1
    BLOCKS_ITS_EVENT_LOOP = 2
    LATE_IN_A_COLLECTIVE = 3
    IN_THE_STAGE_OF_THE_LOOP = 4
    IN_A_SPAN = 5
    IN_ANOTHER_STAGE = 6
    IN_SPANS_THAT_WAIT = 7
    ANSWERS_NO_CALL = 8
    HOST_IS_UNKNOWN = 8
    LOOP_IN_ITS_OWN_CODE = 9
    IN_ITS_OWN_CODE = 10


def culprit(everyone: Sequence[ProcessState], stage: str) -> tuple[str, str, list[str]]:
    """Return the lane that all wait for, a clause on its open work, and other processes with open
    work as text.

    Args:
        everyone: The loop's process, and the others.
        stage: The stage that is open in the loop.
    """
    reasons = [(_reason(state, everyone, stage), state.lane) for state in everyone]
    (*_, clause), lane = min(reasons, key=lambda reason: reason[0][:2])
    others = [state for state in everyone if state.lane != lane and (state.spans or state.stages)]
    return lane, clause, [f"{state.lane} in {_named(state)}" for state in others[:8]]


def silent(
    lane: str, role: str, process: ProcessId | WorkerIdentity, seen: set[str]
) -> ProcessState:
    """Return the state of a process that neither answers nor writes, with the reason.

    Args:
        lane: Its lane.
        role: Its role.
        process: The process.
        seen: Machines, by clock domain, that have written a file here. If the process's machine is
            not among them, missing files say nothing about the process.
    """
    where = f"(pid {process.pid}"
    status = ""
    if (process.clock_domain, process.namespace) == (clock.domain(), pid_namespace()):
        with suppress(OSError):
            _, status, _ = process_status(Path(f"/proc/{process.pid}/stat"))
    if status in _DEAD or status in _STOPPED:
        how = "dead" if status in _DEAD else "stopped by a signal"
        return ProcessState(
            lane, role, problem=f"is {how} {where})", distance=_Kind.DEAD_OR_STOPPED
        )
    where += f" on {process.host})"
    if process.clock_domain in (*seen, clock.domain()):
        problem = f"answers nothing, and writes no file {where}"
        return ProcessState(lane, role, problem=problem, distance=_Kind.WRITES_NOTHING)
    problem = f"answers nothing, and writes no file, nor does any process of its host {where}"
    return ProcessState(lane, role, problem=problem, distance=_Kind.HOST_IS_UNKNOWN)


_Reason = tuple[int, float, str]
"""Kind of hang of a process, time in its open stage or span (s, negative), and a clause on it."""


def _reason(state: ProcessState, everyone: Sequence[ProcessState], stage: str) -> _Reason:
    """Return the kind of hang of a process, with the reason; the first rule that fits holds.

    Args:
        state: The process.
        everyone: The loop's process, and the others.
        stage: The stage that is open in the loop.
    """
    loop, *others = everyone
    if state.problem:
        return state.distance, 0.0, state.problem
    spans = _unexplained(state, others)
    part = _innermost_part(state, spans)
    longest_s = 0.0 if part is None else part.open_s
    what = f"is in {_named(state, spans)}"
    if state.in_coroutine and not state.answers:
        # No span begins while the event loop is blocked, so the latest one is in the way.
        latest = _named(state, state.spans[-1:])
        clause = f"blocks its event loop at {state.code}; it is in {latest}"
        return _Kind.BLOCKS_ITS_EVENT_LOOP, -longest_s, clause
    if _is_late([peer for peer in everyone if peer.role == state.role], state):
        clause = f"{what}, and has not entered the collective of the others"
        return _Kind.LATE_IN_A_COLLECTIVE, -longest_s, clause
    if state is not loop and state.stages and not state.spans:
        kind = _Kind.IN_ANOTHER_STAGE
        if any(part.name == stage for part in state.stages):
            kind = _Kind.IN_THE_STAGE_OF_THE_LOOP
        return kind, -longest_s, f"{what}{_work_of_a_stage(state)}"
    if spans:
        kind = _Kind.IN_SPANS_THAT_WAIT if spans[0].waits else _Kind.IN_A_SPAN
        return kind, -longest_s if spans[0].trajectory else 0.0, what
    return _in_no_part(state, is_loop=state is loop, has_others=bool(others))


def _in_no_part(state: ProcessState, is_loop: bool, has_others: bool) -> _Reason:
    """Return the kind of hang of a process without open stages and spans to report."""
    if not state.answers:
        return _Kind.ANSWERS_NO_CALL, 0.0, f"answers no call, and is at {state.code}"
    clause = f"is in its own code at {state.code}"
    if not is_loop:
        return _Kind.IN_ITS_OWN_CODE, 0.0, clause
    if state.calls == "ray" and has_others:
        clause = f"waits at {state.code} for Ray, with no worker in anything; is a task scheduled?"
    return _Kind.LOOP_IN_ITS_OWN_CODE, 0.0, clause


def _unexplained(state: ProcessState, others: Iterable[ProcessState]) -> list[OpenPart]:
    """Return the open spans that no stage of another role explains, the likeliest cause first.

    An engine's stage ``generate`` explains a span ``generate`` of an agent loop.
    """
    explained = {part.name for other in others if other.role != state.role for part in other.stages}
    spans = [span for span in state.spans if span.name not in explained]
    spans.sort(
        key=lambda span: (span.waits, not span.trajectory, span.name == TRAJECTORY, -span.open_s)
    )
    return spans


def _work_of_a_stage(state: ProcessState) -> str:
    requests = " with requests, of which none ends" if state.role == ROLLOUT_ROLE else ""
    return f"{requests} at {state.code}" if state.code else requests


def _is_late(peers: Sequence[ProcessState], state: ProcessState) -> bool:
    """Return whether a process has not entered a collective that others of its role are in."""
    groups = {group for peer in peers for group in peer.collectives}
    for group in groups:
        if not group.endswith(f" {len(peers)}"):  # its ranks are not those of the role
            continue
        entered = [peer.collectives.get(group, 0) for peer in peers]
        if min(entered) < max(entered):
            return state.collectives.get(group, 0) < max(entered)
    return state.calls != "collective" and any(peer.calls == "collective" for peer in peers)


def _innermost_part(state: ProcessState, spans: Sequence[OpenPart] = ()) -> OpenPart | None:
    """Return what a sentence names of a process that hangs: its oldest open span, else the
    outermost stage that it entered last; ``None`` without any.

    Args:
        state: The process.
        spans: Open spans that come first, as no other process explains them.
    """
    return next(iter((*spans, *state.spans, *state.stages[-1:])), None)


def _named(state: ProcessState, spans: Sequence[OpenPart] = ()) -> str:
    part = _innermost_part(state, spans)
    if part is None:
        return f"its own code at {state.code}" if state.code else "no stage"
    trajectory = f" of trajectory {part.trajectory}" if part.trajectory else ""
    return f"{part.name}{trajectory} for {duration(part.open_s)}"
