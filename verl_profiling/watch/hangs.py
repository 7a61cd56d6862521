"""The open work of a process in a hang: stages, spans, collectives and Python stacks; and the kinds
of hang.

A busy process answers no call. So each process has a thread, until training ends, that writes
``hangs/<lane>.json`` while the file of the loop is there. Hooks do nothing for it: the thread reads
what the watch keeps anyway.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from enum import IntEnum
from inspect import CO_COROUTINE, iscoroutine
from itertools import islice
from operator import itemgetter
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId, WorkerIdentity, pid_namespace
from verl_profiling.manifest import WAIT
from verl_profiling.opener import remove_file
from verl_profiling.run_files import write_json_atomically
from verl_profiling.trajectories.spans import TRAJECTORY, open_spans
from verl_profiling.units import duration
from verl_profiling.watch.collectives import entered_collectives
from verl_profiling.watch.sums import StageSums

logger = logging.getLogger(__name__)

LOOP_FILE = "loop.json"
"""Written by the loop; while it is there, each process writes a file of its own."""

_MOST_PARTS, _MOST_FACTS, _MOST_TASKS = 50, 8, 100
_PLAIN = (str, int, float)
"""Types of facts that are read; to print a tensor could wait for the device that hangs."""

_LIBRARIES = {*sys.stdlib_module_names, "ray", "torch", "verl_profiling"}
_STARTS_ACTORS, _COLLECTIVES = "default_worker.py", "distributed_c10d.py"
_STOPPED = "Tt"  # states in /proc


class OpenPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage, or an innermost span, that is open.

    Attributes:
        name: Its name.
        open_s: Seconds since it began.
        trajectory: Group and sample of its trajectory; empty for a stage.
        facts: Facts of the span.
    """

    name: str
    open_s: float
    trajectory: str = ""
    facts: dict[str, str] = {}

    @property
    def waits(self) -> bool:
        """Whether it only waits for another one."""
        return self.name.startswith(WAIT)


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process in a hang.

    Attributes:
        lane: Its lane.
        role: Its role.
        process: The process.
        asked_ns: Time of the loop's file, to which this is the answer.
        quiet_s: Seconds since something in it progressed.
        stages: Its open outermost stages.
        spans: Its innermost open spans, the oldest first, and behind them those that only wait.
        code: The innermost line of user code that runs.
        calls: What this code has called: ``ray``, ``collective`` or nothing of these.
        in_coroutine: Whether a coroutine runs, and keeps its event loop from others.
        collectives: Number of the last collective that it entered, by process group and size.
        threads: Stack of each thread, innermost frame first.
        tasks: Stack of each asyncio task, outermost frame first.
        problem: Why there is no state, or why the process cannot go on.
        distance: Kind of hang of such a problem; set by the loop.
        answers: Whether it answers calls; set by the loop.
    """

    lane: str
    role: str
    process: ProcessId | None = None
    asked_ns: int = 0
    quiet_s: float = 0.0
    stages: list[OpenPart] = []
    spans: list[OpenPart] = []
    code: str = ""
    calls: str = ""
    in_coroutine: bool = False
    collectives: dict[str, int] = {}
    threads: dict[str, list[str]] = {}
    tasks: dict[str, list[str]] = {}
    problem: str = ""
    distance: int = 0
    answers: bool = True


class HangReporter:
    """Knows when a process progressed last, and what it is in.

    Args:
        reports: Folder of its file, and the pause between two looks for the loop's file there (s).
        lane: Lane of the process.
        role: Its role.
        sums: Returns what the watch keeps of the process.

    Attributes:
        reports: Where it reports.
        ended: Set when its looks are to end.
    """

    def __init__(
        self,
        reports: tuple[str, float],
        lane: str,
        role: str,
        sums: Callable[[], Iterable[StageSums]],
    ) -> None:
        self.reports, self._lane, self._role, self._sums = reports, lane, role, sums
        self._loop, self.ended = asyncio._get_running_loop(), threading.Event()
        self._tokens: tuple[list[object], int] = [], 0

    def report(self, ended: threading.Event) -> None:
        """Write the file of this process whenever the loop's file is there; at the end,
        look once more.
        """
        path, written_ns, is_last = Path(self.reports[0], f"{self._lane}.json"), 0, False
        try:
            while not is_last:
                is_last, asked_ns, _ = ended.wait(self.reports[1]), 0, self._token_ns()
                with suppress(OSError):
                    asked_ns = path.with_name(LOOP_FILE).stat().st_mtime_ns
                if asked_ns and asked_ns != written_ns:
                    write_json_atomically(path, self.state(asked_ns), durable=False)
                elif written_ns and not asked_ns:
                    remove_file(path)
                written_ns = asked_ns
        except Exception as error:
            logger.warning(
                "watch: hangs of %s are not reported: %s", self._lane, error, exc_info=error
            )

    def last_ns(self) -> int:
        """Return when a stage or span began or ended last, or when a new token was seen first."""
        times_ns: list[int] = [sums.last_ns() for sums in self._sums()]
        return max([self._token_ns(), *times_ns, *(span.begin_ns for span in open_spans())])

    def _token_ns(self) -> int:
        tokens = [count() for sums in self._sums() for count in sums.tokens]
        if tokens != self._tokens[0]:
            self._tokens = tokens, clock.now_ns()
        return self._tokens[1]

    def stages(self) -> list[tuple[int, str]]:
        """Return the open outermost stages with their begin (unix ns), in order."""
        return sorted(
            (one.begin_ns, one.name) for sums in self._sums() for one in [*sums.open.values()]
        )

    def state(self, asked_ns: int) -> ProcessState:
        """Return the state of this process; ``asked_ns`` is the time of the loop's file."""
        now_ns, here, main = clock.now_ns(), threading.get_ident(), threading.main_thread().ident
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {
            f"{names.get(ident)} {ident}": [frame for frame, _ in walk_stack(top)]
            for ident, top in sorted(sys._current_frames().items(), key=lambda one: one[0] != main)
            if ident != here
        }
        coroutines = [
            one for one in stacks.values() if any(at.f_code.co_flags & CO_COROUTINE for at in one)
        ]
        found = ((stack, frame) for stack in (*coroutines, *stacks.values()) for frame in stack)
        stack, code = next(
            ((stack, _place(frame)) for stack, frame in found if _is_user(frame)), ([], "")
        )
        files = [frame.f_code.co_filename for frame in stack]
        in_collective = any(name.endswith(_COLLECTIVES) for name in files)
        return ProcessState(
            lane=self._lane,
            role=self._role,
            process=ProcessId.current(),
            asked_ns=asked_ns,
            quiet_s=(now_ns - self.last_ns()) / 1e9,
            stages=[OpenPart(name, (now_ns - begin_ns) / 1e9) for begin_ns, name in self.stages()],
            spans=sorted(_innermost(now_ns), key=lambda part: (part.waits, -part.open_s))[
                :_MOST_PARTS
            ],
            code=code,
            calls="collective"
            if in_collective
            else "ray"
            if any("/ray/" in name for name in files)
            else "",
            in_coroutine=bool(coroutines),
            collectives={group: number for group, number, _ in entered_collectives()},
            threads={name: [*map(_place, stack)] for name, stack in stacks.items()},
            tasks=dict(self._tasks()),
            problem=_stopped_child() if asked_ns and self._role == ROLLOUT_ROLE else "",
        )

    def _tasks(self) -> Iterator[tuple[str, list[str]]]:
        loops = {
            self._loop,
            *(getattr(span.trajectory, "running_loop", None) for span in open_spans()),
        }
        with suppress(RuntimeError):  # tasks end meanwhile
            for loop in loops - {None}:
                for task in [*asyncio.all_tasks(loop)][:_MOST_TASKS]:
                    yield (
                        task.get_name(),
                        [*map(_place, islice(_awaited(task.get_coro()), _MOST_PARTS))],
                    )


def in_background(function: Callable[[], None]) -> threading.Thread | None:
    """Start a thread that never holds up the end of the process; at exit, there is none."""
    thread = threading.Thread(target=function, name="verl-profiling-hangs", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _stopped_child() -> str:
    """Return a clause on a process, started by this one or its children,
    that a signal has stopped.
    """
    own, found = str(os.getpid()), {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            name, _, fields = path.read_text(errors="replace").rpartition(
                ")"
            )  # names are cut at 15 bytes
            found[path.parent.name] = (name.partition("(")[2], *fields.split()[:2])
    for pid, (name, status, parent) in found.items():
        for _ in found:  # a pid may be used again meanwhile, so that parents form a ring
            if parent == own or parent not in found:
                break
            parent = found[parent][2]
        if status == "T" and parent == own:
            return f"has a process that is stopped by a signal ({name}, pid {pid})"
    return ""


def _innermost(now_ns: int) -> Iterator[OpenPart]:
    """Yield the open spans with no open span inside."""
    opened = [span for span in open_spans() if span.begin_ns]
    around = {id(span.parent) for span in opened}
    for span in opened:
        if id(span) not in around:
            whole = span.trajectory
            name = f"{whole.group}, sample {whole.sample}" if whole is not None else ""
            known = [
                (fact, value) for fact, value in [*span.facts.items()] if isinstance(value, _PLAIN)
            ]
            facts = {str(fact): str(value)[:99] for fact, value in known[:_MOST_FACTS]}
            yield OpenPart(str(span.name), (now_ns - span.begin_ns) / 1e9, name, facts)


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of what it awaits, from outside to inside."""
    while coroutine is not None:
        yield from filter(None, [getattr(coroutine, "cr_frame", None)])
        inside = filter(
            iscoroutine, gc.get_referents(coroutine)
        )  # of Ray's, which are no Python code
        coroutine = getattr(coroutine, "cr_await", None) or next(inside, None)


def _is_user(frame: FrameType) -> bool:
    module, file = (
        str(frame.f_globals.get("__name__", "")).partition(".")[0],
        frame.f_code.co_filename,
    )
    is_made = (
        file.startswith("<") and module != "__main__"
    )  # by a library, such as methods of a dataclass
    return not is_made and module not in _LIBRARIES and not file.endswith(_STARTS_ACTORS)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class _Kind(IntEnum):
    """The kinds of hang, that of the process to report first.

    A process that cannot answer comes first, then one whose open part no other process explains.
    The chain is loop, worker or agent loop, engine, tool or collective.
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
    """Return the lane that is waited for, a clause on what it is in, and others that are in a stage
    or span.

    Args:
        everyone: The loop's process, and the others.
        stage: The stage that is open in the loop.
    """
    found = [(*_reason(one, everyone, stage), one.lane) for one in everyone]
    *_, reason, lane = min(found, key=itemgetter(0, 1))
    others = [one for one in everyone if one.lane != lane and (one.spans or one.stages)]
    return lane, reason, [f"{one.lane} in {_named(one)}" for one in others][:8]


def silent(
    lane: str, role: str, process: ProcessId | WorkerIdentity, seen: set[str]
) -> ProcessState:
    """Return the state of a process that neither answers nor writes, with the reason.

    Args:
        lane: Its lane.
        role: Its role.
        process: The process.
        seen: Clock domains of the processes whose files are visible here.
    """
    if (process.clock_domain, process.namespace) == (clock.domain(), pid_namespace()):
        with suppress(OSError):
            text = Path(f"/proc/{process.pid}/stat").read_text(errors="replace")
            status = text.rpartition(")")[2].split()[0]
            if status in f"{_STOPPED}ZX":
                problem = (
                    f"is {'dead' if status in 'ZX' else 'stopped by a signal'} (pid {process.pid})"
                )
                return ProcessState(lane, role, problem=problem, distance=_Kind.DEAD_OR_STOPPED)
    is_seen = process.clock_domain in (*seen, clock.domain())
    unseen = "" if is_seen else ", nor does any process of its host"
    problem = f"answers nothing, and writes no file{unseen} (pid {process.pid} on {process.host})"
    return ProcessState(
        lane,
        role,
        problem=problem,
        distance=_Kind.WRITES_NOTHING if is_seen else _Kind.HOST_IS_UNKNOWN,
    )


def _reason(
    state: ProcessState, everyone: Sequence[ProcessState], stage: str
) -> tuple[int, float, str]:
    """Return the kind of hang of a process, its time in its open part (s, negative), and a clause.

    Args:
        state: The process.
        everyone: The loop's process, and the others.
        stage: The stage that is open in the loop.
    """
    loop, *others = everyone
    names = {part.name for one in others if one.role != state.role for part in one.stages}
    spans = [
        span for span in state.spans if span.name not in names
    ]  # an engine's stage explains a generate
    spans.sort(
        key=lambda span: (span.waits, not span.trajectory, span.name == TRAJECTORY, -span.open_s)
    )
    opened = spans or state.spans or state.stages[-1:]
    longest_s, what = opened[0].open_s if opened else 0.0, f"is in {_named(state, opened)}"
    if state.problem:
        return state.distance, 0.0, state.problem
    if state.in_coroutine and not state.answers:
        # No span begins while the event loop is blocked, so the latest one is in the way.
        blocks = (
            f"blocks its event loop at {state.code}; it is in {_named(state, state.spans[-1:])}"
        )
        return _Kind.BLOCKS_ITS_EVENT_LOOP, -longest_s, blocks
    if _is_late([one for one in everyone if one.role == state.role], state):
        clause = f"{what}, and has not entered the collective of the others"
        return _Kind.LATE_IN_A_COLLECTIVE, -longest_s, clause
    if state is not loop and state.stages and not state.spans:
        requests = " with requests, of which none ends" if state.role == ROLLOUT_ROLE else ""
        at = f" at {state.code}" if state.code else ""
        is_first = stage in [part.name for part in state.stages]
        kind = _Kind.IN_THE_STAGE_OF_THE_LOOP if is_first else _Kind.IN_ANOTHER_STAGE
        return kind, -longest_s, f"{what}{requests}{at}"
    if spans:
        kind = _Kind.IN_SPANS_THAT_WAIT if spans[0].waits else _Kind.IN_A_SPAN
        return kind, -longest_s if spans[0].trajectory else 0.0, what
    if not state.answers:
        return _Kind.ANSWERS_NO_CALL, 0.0, f"answers no call, and is at {state.code}"
    if state is loop and state.calls == "ray" and others:
        clause = f"waits at {state.code} for Ray, with no worker in anything; is a task scheduled?"
        return _Kind.LOOP_IN_ITS_OWN_CODE, 0.0, clause
    kind = _Kind.LOOP_IN_ITS_OWN_CODE if state is loop else _Kind.IN_ITS_OWN_CODE
    return kind, 0.0, f"is in its own code at {state.code}"


def _is_late(peers: Sequence[ProcessState], state: ProcessState) -> bool:
    """Return whether a process has not entered a collective that others of its role are in."""
    for group in {
        group for one in peers for group in one.collectives if group.endswith(f" {len(peers)}")
    }:
        entered = [one.collectives.get(group, 0) for one in peers]
        if min(entered) < max(entered):
            return state.collectives.get(group, 0) < max(entered)
    return state.calls != "collective" and any(one.calls == "collective" for one in peers)


def _named(state: ProcessState, opened: Sequence[OpenPart] = ()) -> str:
    for part in (*opened, *state.spans, *state.stages[-1:]):
        trajectory = f" of trajectory {part.trajectory}" if part.trajectory else ""
        return f"{part.name}{trajectory} for {duration(part.open_s)}"
    return f"its own code at {state.code}" if state.code else "no stage"
