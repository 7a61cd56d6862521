"""Asks a running job for captures: what it says of itself, and its answers."""

from __future__ import annotations

import getpass
import os
import re
import socket
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from verl_profiling.aim import Aim
from verl_profiling.commands.folder_line import FolderLine
from verl_profiling.demand import FINAL, Answer, Demand, LoopState, new_request_id
from verl_profiling.errors import ConfigError, ProfilingError, TraceFormatError
from verl_profiling.timeline.inputs import is_step

__all__ = ["Job", "Line", "find_job", "find_job_through_ray"]

_LONG_S = 5.0
_LONG_STEPS = 5.0
_GONE_S = 600.0
_GONE_STEPS = 50.0
_PAUSE_S = 0.25


class Line(Protocol):
    """A way to reach a job: the folder of its run, or an actor of Ray.

    Its methods raise ``OSError`` where the folder, and ``ProfilingError`` where the actor cannot be had.

    Attributes:
        place: Where the job records, in words.
        ends_with_job: Whether nothing is heard through it once the job's process is gone.
    """

    place: str
    ends_with_job: bool

    def state(self) -> LoopState | None:
        """Return the sign of life; ``None``: there is none."""

    def ask(self, demand: Demand) -> None:
        """Leave a request."""

    def cancel(self, request: str) -> None:
        """Leave word that a request is to be forgotten."""

    def answer(self, request: str) -> Answer | None:
        """Return what was answered to a request so far."""

    def answers(self) -> list[Answer]:
        """Return all answers that are there."""

    def waiting(self) -> list[Demand]:
        """Return the requests that the job has not seen yet."""


@dataclass(frozen=True)
class Job:
    """A run, and what its process said last.

    Attributes:
        line: What reaches it.
        state: The sign of life.
    """

    line: Line
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
        if (
            alive is None
            and not self.line.ends_with_job
            and self.quiet_s > max(_GONE_S, _GONE_STEPS * state.step_s)
        ):
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
            ProfilingError: The job cannot be reached any more, or the folder is a link to another one.
            OSError: The folder cannot be written.
        """
        if at is not None and self.state.step is not None and at <= self.state.step:
            now = f"step {at} is over or has begun; the job is in step {self.state.step}"
            raise ConfigError("--at", f"{now}; name a later one, or leave it out for the next")
        by = f"{_user()}@{socket.gethostname()}"[:200]
        demand = Demand(id=new_request_id(), by=by, asked_ns=time.time_ns(), steps=steps, at=at, aim=aim)
        self.line.ask(demand)
        return demand

    def cancel(self, request: str) -> None:
        """Ask to forget a request.

        Raises:
            ConfigError: There is no such request, or it is over.
            ProfilingError: The job cannot be reached any more, or the folder is a link to another one.
            OSError: The folder cannot be written.
        """
        known = self.answer(request)
        if known is None and request not in {demand.id for demand in self.waiting()}:
            raise ConfigError("--cancel", f"the run has no request {request!r}; see --list")
        if known is not None and known.state in FINAL:
            raise ConfigError("--cancel", f"request {request} is {known.state} already")
        self.line.cancel(request)

    def answer(self, request: str) -> Answer | None:
        """Return what the job has answered to a request so far."""
        return self.line.answer(request)

    def answers(self) -> list[Answer]:
        """Return all answers that are there, the eldest first."""
        return sorted(self.line.answers(), key=lambda answer: answer.demand.asked_ns)

    def waiting(self) -> list[Demand]:
        """Return the requests that the job has not seen yet."""
        return self.line.waiting()

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
                if answer.state in FINAL:
                    return
            if time.monotonic() > deadline:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, _PAUSE_S)
            if pause_s == _PAUSE_S and (gone := self._now_gone()):
                if (last := self.answer(request)) is not None and last.state in FINAL:
                    yield last
                    return
                raise ProfilingError(gone)

    def _now_gone(self) -> str:
        state = self.line.state()
        return Job(self.line, state).gone if state is not None else f"{self.line.place}: the job is gone"


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
    if is_step(path):
        raise TraceFormatError(path, f"is a step; name its run, {path.absolute().parent}")
    jobs = _jobs((FolderLine(run) for run in (path, *sorted(path.glob("run_*")))), run_id)
    if not jobs:
        raise TraceFormatError(path, "no job here can be asked: it needs watch.enable=true")
    return _the_one(jobs, str(path), run_id, must_run)


def find_job_through_ray(
    where: str, address: str = "auto", run_id: str | None = None, must_run: bool = True
) -> Job:
    """Return the job that a Ray cluster runs.

    Args:
        where: Its run's id, its run's folder or URL, or its ``save_path``.
        address: Address of the cluster; ``auto`` for the one that this host is part of.
        run_id: The run, where several are there.
        must_run: Whether one that has ended is an error.

    Raises:
        ToolUnavailableError: There is no Ray, or no cluster.
        TraceFormatError: No job can be asked there, or several can.
    """
    from verl_profiling.commands.ray_line import lines_through_ray

    where = where.rstrip("/")
    jobs = _jobs(lines_through_ray(address), run_id)
    found = [job for job in jobs if where == job.state.run_id or _is_at(job.state.place, where)]
    if not found:
        others = ", ".join(f"{job.state.run_id} ({job.line.place})" for job in jobs) or "none"
        raise TraceFormatError(
            where,
            "no job in the Ray cluster can be asked for it: it has ended or died, runs without "
            f"watch.enable=true, or in a folder without watch.ray=true; others there are: {others}",
        )
    return _the_one(found, where, run_id, must_run)


def _is_at(place: str, where: str) -> bool:
    """Return whether a run is at a place, or in one of the folders of a ``save_path`` that several share."""
    return place == where or re.fullmatch(rf"{re.escape(where)}/run_\w+", place) is not None


def _jobs(lines: Iterable[Line], run_id: str | None) -> list[Job]:
    """Return the jobs that are reached. One that says nothing readable is in the way, unless one is named."""
    found: list[Job] = []
    for line in lines:
        try:
            state = line.state()
        except (ProfilingError, OSError):
            if run_id is None:
                raise
            continue
        if state is not None:
            found.append(Job(line, state))
    return found


def _the_one(found: list[Job], where: str, run_id: str | None, must_run: bool) -> Job:
    """Return the job that is meant: the only one that runs."""
    found = [job for job in found if run_id in (None, job.state.run_id)]
    if not found:
        raise TraceFormatError(where, f"has no run {run_id!r} that can be asked")
    living = [job for job in found if not job.gone]
    if len(living) > 1 or (not living and len(found) > 1 and not must_run):
        which = ", ".join(f"{job.line.place} (run {job.state.run_id})" for job in living or found)
        raise TraceFormatError(where, f"several runs are here, name one with --run: {which}")
    if not living and must_run:
        named = len(found) > 1
        why = "; ".join(f"{Path(job.line.place).name}: {job.gone}" if named else job.gone for job in found)
        raise TraceFormatError(where, f"no job runs here: {why}")
    return (living or found)[0]


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return str(os.getuid())


def _time_of_day(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / 1e9))
