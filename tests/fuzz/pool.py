"""Runs cases in processes with bounded time and memory, so that a hang or a death is seen and survived."""

from __future__ import annotations

import multiprocessing
import resource
import signal
import tempfile
from collections.abc import Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from shutil import rmtree

from tests.fuzz.cases import Case, Verdict, random_case, run_case
from tests.fuzz.inputs import build

__all__ = ["run_all"]

MEMORY_BYTES = 2 << 30
CPU_S = 10.0
WALL_S = 150.0  # a machine may be busy with other things

_CONTEXT = multiprocessing.get_context("spawn")


def run_all(cases: Iterable[int | Case], processes: int) -> Iterator[tuple[Case | int, Verdict]]:
    """Run cases, given as seeds or as they are; yield each with what came of it, in any order."""
    todo = iter(cases)
    workers = [_Worker() for _ in range(processes)]
    try:
        for worker in workers:
            worker.take(todo)
        while busy := {worker.pipe: worker for worker in workers if worker.case is not None}:
            ready = wait(list(busy), timeout=WALL_S)
            for worker in [busy[pipe] for pipe in ready] or list(busy.values()):
                yield worker.answer(late=not ready)
                worker.take(todo)
    finally:
        for worker in workers:
            worker.end()


class _Worker:
    """A process, and another one when it has died.

    Attributes:
        case: What it is doing; ``None`` if nothing.
        pipe: Where its answer arrives.
    """

    def __init__(self) -> None:
        self.case: int | Case | None = None
        self._start()

    def _start(self) -> None:
        self.pipe, other = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(other, CPU_S), daemon=True)
        self._process.start()
        other.close()

    def take(self, todo: Iterator[int | Case]) -> None:
        self.case = next(todo, None)
        if self.case is not None:
            self.pipe.send(self.case)

    def answer(self, late: bool) -> tuple[int | Case, Verdict]:
        case = self.case
        assert case is not None
        try:
            if late:
                raise EOFError
            verdict: Verdict = self.pipe.recv()
        except EOFError:
            self._process.kill() if late else None
            self._process.join()
            stopped = late or self._process.exitcode == -signal.SIGPROF
            verdict = Verdict("hang" if stopped else "crash", f"the process ended: {self._process.exitcode}")
            self._start()
        return case, verdict

    def end(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(pipe: Connection, cpu_s: float) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    with tempfile.TemporaryDirectory(prefix="verl-profiling-fuzz-") as scratch:
        whole, folder = Path(scratch) / "whole", Path(scratch) / "case"
        build(whole)
        while True:
            given = pipe.recv()
            signal.setitimer(signal.ITIMER_PROF, cpu_s)  # SIGPROF ends a process that takes longer
            case = random_case(given, whole) if isinstance(given, int) else given
            verdict = run_case(case, whole, folder)
            signal.setitimer(signal.ITIMER_PROF, 0)
            rmtree(folder, ignore_errors=True)
            pipe.send(verdict)
