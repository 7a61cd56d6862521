"""Asks a running job for captures, through the folder of its run: what it says of itself, and its answers."""

from __future__ import annotations

import contextlib
import getpass
import os
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_profiling.aim import Aim
from verl_profiling.demand import (
    ANSWERS,
    CANCEL_SUFFIX,
    CONTROL,
    LOOP_NAME,
    REQUESTS,
    Answer,
    Demand,
    LoopState,
    new_request_id,
    read_message,
    write_message,
)
from verl_profiling.errors import ConfigError, ProfilingError, TraceFormatError

__all__ = ["Job", "find_job"]

_LONG_S = 5.0
_LONG_STEPS = 5.0
_GONE_S = 600.0
_GONE_STEPS = 50.0
_FINAL = ("done", "refused", "cancelled")


@dataclass(frozen=True)
class Job:
    """A run, and what its process said last.

    Attributes:
        run: Folder of the run.
        state: The sign of life.
    """

    run: Path
    state: LoopState

    @property
    def gone(self) -> str:
        """Why nobody would answer; empty while the job runs, as far as can be seen from here."""
        state = self.state
        last = f" after step {state.step}" if state.step is not None else ""
        if state.ended_ns is not None:
            return f"training ended{last}, at {_time_of_day(state.ended_ns)}"
        alive = state.process.alive()
        if alive is False:
            return f"{state.process}, which ran the job, is gone{last}"
        if alive is None and self.quiet_s > max(_GONE_S, _GONE_STEPS * state.step_s):
            return (
                f"nothing was heard of {state.process} for {self.quiet_s:.0f} s{last}, where a step takes "
                f"{state.step_s:.1f} s; from here it cannot be seen"
            )
        return ""

    @property
    def quiet_s(self) -> float:
        """How long ago the job said that a step begins."""
        return max(0.0, time.time() - self.state.begun_ns / 1e9)

    def in_words(self) -> str:
        """Return what the job does now."""
        state = self.state
        if state.step is None:
            return f"the job runs ({state.process}), and has begun no step yet"
        text = f"the job runs ({state.process}): step {state.step} began {self.quiet_s:.1f} s ago"
        if state.step_s:
            text += f", a step takes {state.step_s:.2f} s"
        if state.step_s and self.quiet_s > max(_LONG_S, _LONG_STEPS * state.step_s):
            text += "; it is in a long step, or between two (validation, a checkpoint)"
        return text

    def ask(self, aim: Aim, steps: int, at: int | None) -> Demand:
        """Leave a request; return it.

        Raises:
            ConfigError: What is asked for is known to be refused.
            TraceFormatError: The folder is a link to another one.
            OSError: The folder cannot be written.
        """
        if at is not None and self.state.step is not None and at <= self.state.step:
            raise ConfigError("--at", f"step {at} is over or has begun; the job is in step {self.state.step}")
        by = f"{_user()}@{socket.gethostname()}"[:200]
        demand = Demand(id=new_request_id(), by=by, asked_ns=time.time_ns(), steps=steps, at=at, aim=aim)
        control = self._control()
        write_message(control / REQUESTS / f"{demand.id}.json", demand, beside=control)
        return demand

    def cancel(self, request: str) -> None:
        """Ask to forget a request.

        Raises:
            ConfigError: There is no such request, or it is over.
            TraceFormatError: The folder is a link to another one.
            OSError: The folder cannot be written.
        """
        known = self.answer(request)
        if known is None and request not in {demand.id for demand in self.waiting()}:
            raise ConfigError("--cancel", f"the run has no request {request!r}; see --list")
        if known is not None and known.state in _FINAL:
            raise ConfigError("--cancel", f"request {request} is {known.state} already")
        (self._control() / REQUESTS / f"{request}{CANCEL_SUFFIX}").touch()

    def _control(self) -> Path:
        """Return the folder to write to, which leads nowhere else."""
        control = self.run / CONTROL
        for folder in (control, control / REQUESTS):
            if folder.is_symlink():
                raise TraceFormatError(folder, "is a link")
        return control

    def answer(self, request: str) -> Answer | None:
        """Return what the job has answered to a request so far."""
        if "/" in request or request.startswith("."):
            return None
        with contextlib.suppress(FileNotFoundError):
            return read_message(self.run / CONTROL / ANSWERS / f"{request}.json", Answer)
        return None

    def follow(self, request: str, seconds: float) -> Iterator[Answer]:
        """Yield the answers to a request as they come, until the last one, or until the time is up.

        Raises:
            ProfilingError: The job is gone.
        """
        deadline = time.monotonic() + seconds
        seen: Answer | None = None
        pause_s = 0.01
        while True:
            answer = self.answer(request)
            if answer is not None and answer != seen:
                yield (seen := answer)
                if answer.state in _FINAL:
                    return
            if time.monotonic() > deadline:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, 0.25)
            if pause_s >= 0.25 and (gone := _job(self.run)) is not None and gone.gone:
                if (last := self.answer(request)) is not None and last.state in _FINAL:
                    yield last
                    return
                raise ProfilingError(gone.gone)

    def answers(self) -> list[Answer]:
        """Return all answers that are there, the eldest first."""
        found = []
        for path in (self.run / CONTROL / ANSWERS).glob("*.json"):
            with contextlib.suppress(TraceFormatError, OSError):
                found.append(read_message(path, Answer))
        return sorted(found, key=lambda answer: answer.demand.asked_ns)

    def waiting(self) -> list[Demand]:
        """Return the requests that the job has not seen yet."""
        found = []
        for path in (self.run / CONTROL / REQUESTS).glob("*.json"):
            with contextlib.suppress(TraceFormatError, OSError):
                found.append(read_message(path, Demand))
        return found


def find_job(path: Path, run_id: str | None = None, must_run: bool = True) -> Job:
    """Return the job whose run, or whose ``save_path``, a folder is.

    Args:
        path: The folder.
        run_id: The run, where several are there.
        must_run: Whether one that has ended is an error.

    Raises:
        TraceFormatError: No job can be asked there, or several can.
    """
    if not path.is_dir():
        raise TraceFormatError(path, "no such folder")
    found = [job for run in (path, *sorted(path.glob("run_*"))) if (job := _job(run)) is not None]
    found = [job for job in found if run_id in (None, job.state.run_id)]
    if not found and run_id is not None:
        raise TraceFormatError(path, f"has no run {run_id!r} that can be asked")
    if not found:
        raise TraceFormatError(path, "no job here can be asked: it needs watch.enable=true")
    living = [job for job in found if not job.gone]
    if len(living) > 1 or (not living and len(found) > 1 and not must_run):
        which = ", ".join(f"{job.run} (run {job.state.run_id})" for job in living or found)
        raise TraceFormatError(path, f"several runs are here, name one with --run: {which}")
    if not living and must_run:
        why = "; ".join(f"{job.run.name}: {job.gone}" if len(found) > 1 else job.gone for job in found)
        raise TraceFormatError(path, f"no job runs here: {why}")
    return (living or found)[0]


def _job(run: Path) -> Job | None:
    try:
        return Job(run, read_message(run / CONTROL / LOOP_NAME, LoopState))
    except (FileNotFoundError, NotADirectoryError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return str(os.getuid())


def _time_of_day(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / 1e9))
