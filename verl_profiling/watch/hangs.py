"""The open work of a process in a hang: stages, spans, collectives and Python stacks.

A busy process answers no call. So each process has a thread, until training ends, that writes
``hangs/<lane>.json`` while ``hangs/loop.json`` of the loop is there. Hooks do nothing for it: the
thread reads what the watch keeps anyway.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from inspect import CO_COROUTINE, iscoroutine
from itertools import islice
from pathlib import Path
from traceback import walk_stack
from types import FrameType
from typing import Any

import msgspec

from verl_profiling import clock
from verl_profiling.files.machine import process_status
from verl_profiling.files.opener import remove_file
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.identity import ROLLOUT_ROLE, ProcessId
from verl_profiling.manifest import WAIT
from verl_profiling.trajectories.spans import open_spans
from verl_profiling.watch.collectives import entered_collectives
from verl_profiling.watch.process_recorder import recorder_of
from verl_profiling.watch.process_sums import StageSums

logger = logging.getLogger(__name__)

LOOP_FILE = "loop.json"
"""Written by the loop; while it is there, each process writes a file of its own."""

# Bounds of a file: a hung agent loop has a span and a task for each of its samples.
_MOST_PARTS = 50
_MOST_FACTS = 8
_MOST_TASKS = 100
_PLAIN = (str, int, float)
"""Types of facts that are read; to print a tensor could wait for the device that hangs."""

_LIBRARIES = {*sys.stdlib_module_names, "ray", "torch", "verl_profiling"}
_STARTS_ACTORS = "default_worker.py"
_COLLECTIVES = "distributed_c10d.py"


class OpenPart(msgspec.Struct, frozen=True, omit_defaults=True):
    """A stage, or an innermost span, that is open.

    Attributes:
        name: Its name.
        open_s: Seconds since it began.
        trajectory: Group and sample of its trajectory; empty for a stage.
        facts: Named values that user code gave the span, as text, e.g. ``turns``.
    """

    name: str
    open_s: float
    trajectory: str = ""
    facts: dict[str, str] = {}

    @property
    def waits(self) -> bool:
        """Whether the state is a ``wait:NAME``, which only waits for other work."""
        return self.name.startswith(WAIT)


class ProcessState(msgspec.Struct, frozen=True, omit_defaults=True):
    """A process in a hang.

    Attributes:
        lane: Its lane.
        role: Its role.
        process: The process.
        request_ns: Time of :data:`LOOP_FILE`, to which this is the answer.
        quiet_s: Seconds since a stage or span began or ended, or a token was made.
        stages: Its open outermost stages.
        spans: Its innermost open spans, the oldest first, and behind them those that only wait.
        code: The innermost line of user code that runs, and why it got no CPU.
        calls: Library in which this code waits: ``ray``, ``collective`` (of torch), or empty.
        in_coroutine: Whether a coroutine runs, and keeps its event loop from others.
        collectives: Number of the last collective that it entered, by process group and size.
        threads: Stack of each thread, innermost frame first.
        tasks: Stack of each asyncio task, outermost frame first.
        problem: Why there is no state, or why the process cannot go on.
        distance: Number of the ``problem`` in ``watch/hang_kinds.py``: the least is reported first.
        answers: Whether it answers calls of the watch; set by the loop.
    """

    lane: str
    role: str
    process: ProcessId | None = None
    request_ns: int = 0
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
    """Reports when a process last made progress, and its open stages and spans.

    Args:
        reports: Folder of its file, and the pause between two polls for the loop's file there (s).
        lane: Lane of the process.
        role: Its role.
        sums: Returns the records of the process that the watch keeps.

    Attributes:
        reports: The folder and the pause.
        recorder: Writes the record of the process; ``None`` without a folder.
        ended: Set when the polls are to end.
    """

    def __init__(
        self,
        reports: tuple[str, float],
        lane: str,
        role: str,
        sums: Callable[[], Iterable[StageSums]],
    ) -> None:
        self.reports = reports
        self.ended = threading.Event()
        self._lane = lane
        self._role = role
        self._sums = sums
        self._loop = asyncio._get_running_loop()
        self._tokens: list[object] = []
        self._new_token_ns = 0
        self.recorder = recorder_of(reports[0], lane, role)

    def report(self, ended: threading.Event) -> None:
        """Write the file of this process for each new file of the loop, and remove it with the
        loop's file. Once ``ended`` is set, poll a last time.
        """
        folder, pause_s = self.reports
        path = Path(folder, f"{self._lane}.json")
        written_ns = 0
        is_last = False
        try:
            while not is_last:
                is_last = ended.wait(pause_s)
                self.record()
                self._token_ns()  # the time of a token is that of the poll that sees it first
                request_ns = 0
                with suppress(OSError):
                    request_ns = path.with_name(LOOP_FILE).stat().st_mtime_ns
                if request_ns and request_ns != written_ns:
                    write_json_atomically(path, self.state(request_ns), durable=False)
                elif written_ns and not request_ns:
                    remove_file(path)
                written_ns = request_ns
        except Exception as error:
            logger.warning(
                "watch: hangs of %s are not reported: %s", self._lane, error, exc_info=error
            )
        finally:
            if self.recorder is not None:
                self.recorder.end()

    def record(self) -> None:
        """Read memory and CPU of this process for the watch, and for the time after its death."""
        if self.recorder is None:
            return
        stages = self.stages()
        for sums in self._sums():
            if sums.memory.last is not None:
                self.recorder.memory = sums.memory
        use = self.recorder.read(stages)
        for sums in self._sums():
            sums.use = use

    def last_ns(self) -> int:
        """Return when a stage or span began or ended last, or when a new token was seen first."""
        times_ns = [self._token_ns()]
        times_ns += [sums.last_ns() for sums in self._sums()]
        times_ns += [span.begin_ns for span in open_spans()]
        return max(times_ns)

    def _token_ns(self) -> int:
        tokens = [count() for sums in self._sums() for count in sums.tokens]
        if tokens != self._tokens:
            self._tokens = tokens
            self._new_token_ns = clock.now_ns()
        return self._new_token_ns

    def stages(self) -> list[tuple[int, str]]:
        """Return the open outermost stages with their begin (unix ns), in order."""
        stages = []
        for sums in self._sums():
            stages += [(stage.begin_ns, stage.name) for stage in [*sums.open.values()]]
        return sorted(stages)

    def state(self, request_ns: int) -> ProcessState:
        """Return the state of this process; ``request_ns`` is the time of the loop's file."""
        now_ns = clock.now_ns()
        stacks = _stacks()
        # What a coroutine does is looked at first, as it keeps its event loop from all others.
        coroutines = [stack for stack in stacks.values() if _has_coroutine(stack)]
        stack, code = _user_code([*coroutines, *stacks.values()])
        if self.recorder is not None:
            code += self.recorder.no_cpu()
        spans = sorted(_innermost(now_ns), key=lambda part: (part.waits, -part.open_s))
        is_engine = self._role == ROLLOUT_ROLE
        return ProcessState(
            lane=self._lane,
            role=self._role,
            process=ProcessId.current(),
            request_ns=request_ns,
            quiet_s=(now_ns - self.last_ns()) / 1e9,
            stages=[OpenPart(name, (now_ns - begin_ns) / 1e9) for begin_ns, name in self.stages()],
            spans=spans[:_MOST_PARTS],
            code=code,
            calls=_library_called(stack),
            in_coroutine=bool(coroutines),
            collectives={group: number for group, number, _ in entered_collectives()},
            threads={name: [*map(_place, frames)] for name, frames in stacks.items()},
            tasks=dict(self._tasks()),
            problem=_stopped_child() if request_ns and is_engine else "",
        )

    def _tasks(self) -> Iterator[tuple[str, list[str]]]:
        loops = {getattr(span.trajectory, "running_loop", None) for span in open_spans()}
        loops.add(self._loop)
        with suppress(RuntimeError):  # tasks end meanwhile
            for loop in loops - {None}:
                for task in [*asyncio.all_tasks(loop)][:_MOST_TASKS]:
                    frames = islice(_awaited(task.get_coro()), _MOST_PARTS)
                    yield task.get_name(), [*map(_place, frames)]


def in_background(function: Callable[[], None]) -> threading.Thread | None:
    """Start a daemon thread, which never delays the exit; ``None`` if the process exits."""
    thread = threading.Thread(target=function, name="verl-profiling-hangs", daemon=True)
    with suppress(RuntimeError):
        thread.start()
        return thread
    return None


def _stacks() -> dict[str, list[FrameType]]:
    """Return the frames of each thread but this one, innermost first; the main thread is first."""
    main = threading.main_thread().ident
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    del frames[threading.get_ident()]
    stacks = {}
    for ident in sorted(frames, key=lambda ident: ident != main):
        stacks[f"{names.get(ident)} {ident}"] = [frame for frame, _ in walk_stack(frames[ident])]
    return stacks


def _has_coroutine(stack: Iterable[FrameType]) -> bool:
    return any(frame.f_code.co_flags & CO_COROUTINE for frame in stack)


def _user_code(stacks: Iterable[list[FrameType]]) -> tuple[list[FrameType], str]:
    """Return the first stack with user code, and the innermost line of that code."""
    for stack in stacks:
        for frame in filter(_is_user, stack):
            return stack, _place(frame)
    return [], ""


def _library_called(stack: Iterable[FrameType]) -> str:
    """Return the library that user code waits in, as in :attr:`ProcessState.calls`."""
    files = [frame.f_code.co_filename for frame in stack]
    if any(name.endswith(_COLLECTIVES) for name in files):
        return "collective"
    return "ray" if any("/ray/" in name for name in files) else ""


def _stopped_child() -> str:
    """Return a clause on a child process, at any depth, that a signal has stopped; else empty."""
    this = str(os.getpid())
    processes: dict[str, tuple[str, str, str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            processes[path.parent.name] = process_status(path)
    for pid, (name, status, parent) in processes.items():
        if status != "T":
            continue
        for _ in processes:  # a pid may be used again meanwhile, so that parents form a ring
            if parent == this or parent not in processes:
                break
            parent = processes[parent][2]
        if parent == this:
            return f"has a process that is stopped by a signal ({name}, pid {pid})"
    return ""


def _innermost(now_ns: int) -> Iterator[OpenPart]:
    """Yield the open spans with no open span inside."""
    opened = [span for span in open_spans() if span.begin_ns]
    around = {id(span.parent) for span in opened}
    for span in opened:
        if id(span) in around:
            continue
        whole = span.trajectory
        name = f"{whole.group}, sample {whole.sample}" if whole is not None else ""
        plain = [fact for fact in [*span.facts.items()] if isinstance(fact[1], _PLAIN)]
        facts = {str(fact): str(value)[:99] for fact, value in plain[:_MOST_FACTS]}
        yield OpenPart(str(span.name), (now_ns - span.begin_ns) / 1e9, name, facts)


def _awaited(coroutine: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the coroutines that it awaits, outermost first."""
    while coroutine is not None:
        yield from filter(None, [getattr(coroutine, "cr_frame", None)])
        # The awaitables of Ray are no Python code, and have no cr_await.
        inside = filter(iscoroutine, gc.get_referents(coroutine))
        coroutine = getattr(coroutine, "cr_await", None) or next(inside, None)


def _is_user(frame: FrameType) -> bool:
    file = frame.f_code.co_filename
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if file.startswith("<") and module != "__main__":
        return False  # made by a library, such as methods of a dataclass
    return module not in _LIBRARIES and not file.endswith(_STARTS_ACTORS)


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
