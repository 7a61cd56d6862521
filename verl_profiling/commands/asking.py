"""Asks a running job for captures, and reads what became of them: in its run's folder, or behind a URL."""

from __future__ import annotations

import getpass
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from verl_profiling.capture_request import REFUSED, REQUEST, REQUESTS, Aim, Demand, new_request_id
from verl_profiling.errors import ProfilingError, TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, CaptureResult, Manifest, RunInfo
from verl_profiling.remote import LocalFolder, RemoteFolder, folder_at
from verl_profiling.run_files import read_manifest
from verl_profiling.timeline.inputs import is_step
from verl_profiling.watch_log import WATCH_LOG

_PAUSE_S = 0.25
_SLOW_PAUSE_S = 5.0
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)


@dataclass(frozen=True)
class Answer:
    """The state of a request so far.

    Attributes:
        state: ``accepted``, then ``done``; or ``refused``.
        reason: Why it was refused.
        captures: The manifests of its captures, in order.
    """

    state: str
    reason: str = ""
    captures: list[Manifest] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)

    @property
    def complete(self) -> bool:
        """Whether all steps were recorded to their end."""
        return all(capture.complete for capture in self.captures)

    @property
    def workers(self) -> list[CaptureResult]:
        """The results of the workers that took part in the last capture."""
        return self.captures[-1].workers if self.captures else []

    @property
    def policy_versions(self) -> list[int]:
        """Versions of the weights in these steps, where the loop reports them."""
        return [one.policy_version for one in self.captures if one.policy_version is not None]


@dataclass(frozen=True)
class Job:
    """A run that can be asked.

    Attributes:
        folder: Its folder, or what is behind its URL.
        info: Its ``run.json``.
    """

    folder: LocalFolder | RemoteFolder
    info: RunInfo
    _request_of: dict[str, str] = field(default_factory=dict)

    @property
    def place(self) -> str:
        """Where the job records."""
        return self.folder.url

    @property
    def gone(self) -> str:
        """Why nobody would answer; empty while the job runs, as far as can be seen from here."""
        info = _run_in(self.folder) or self.info
        if info.end_ns is not None:
            last = f" after step {info.last_step}" if info.last_step is not None else ""
            return f"training ended{last}, at {_time_of_day(info.end_ns)}"
        if info.process.alive() is False:
            return f"{info.process}, which ran the job, is gone"
        return ""

    def in_words(self) -> str:
        """Return what is known of the job now."""
        process = self.info.process
        text = f"the job runs ({process})"
        if process.alive() is None:
            text = f"whether the job runs ({process}) is not seen from here"
        with suppress(OSError):
            ago_s = time.time() - Path(self.place, WATCH_LOG).stat().st_mtime
            text += f"; its watch logged a step {max(ago_s, 0.0):.1f} s ago"
        return text

    def ask(self, aim: Aim, steps: int, at: int | None) -> Demand:
        """Leave a request; return it.

        Raises:
            OSError: The folder cannot be written; behind a URL it may be another error.
        """
        self._request_of.update(dict.fromkeys(self._steps() - self._request_of.keys(), ""))
        by = f"{_user()}@{socket.gethostname()}"[:200]
        demand = Demand(id=new_request_id(), by=by, asked_ns=time.time_ns(), steps=steps, at=at, aim=aim)
        self._requests.create(f"{demand.id}{REQUEST}", msgspec.json.encode(demand))
        return demand

    def answer(self, demand: Demand) -> Answer | None:
        """Return what became of a request so far; ``None`` while the job has not taken it."""
        names = self._requests.names()
        steps = sorted(self._steps())
        captures = {name: capture for name in steps if (capture := self._capture(name, demand.id))}
        folders, found = list(captures), list(captures.values())
        written = [capture for capture in found if capture.state == "written"]
        if f"{demand.id}{REFUSED}" in names:
            reason = self._requests.read(f"{demand.id}{REFUSED}").decode(errors="replace")
            return Answer("refused", reason, found, folders)
        if sum(len(capture.steps) for capture in written) >= demand.steps:
            return Answer("done", "", found, folders)
        taken = bool(found) or f"{demand.id}{REQUEST}" not in names
        return Answer("accepted", "", found, folders) if taken else None

    def waiting(self) -> list[str]:
        """Return the ids of the requests that the job has not taken yet."""
        names = self._requests.names()
        return sorted(name.removesuffix(REQUEST) for name in names if name.endswith(REQUEST))

    def follow(self, demand: Demand, seconds: float) -> Iterator[Answer]:
        """Yield the answers to a request as they come, until the last one, or until the time is up.

        Raises:
            ProfilingError: The job is gone.
        """
        deadline = time.monotonic() + seconds
        seen: Answer | None = None
        pause_s, most_s = 0.01, _PAUSE_S if isinstance(self.folder, LocalFolder) else _SLOW_PAUSE_S
        while True:
            gone = self.gone if pause_s == most_s else ""  # before the answer, which may be the last word
            answer = self.answer(demand)
            if answer is not None and answer != seen:
                yield (seen := answer)
                if answer.state != "accepted":
                    return
            if gone:
                raise ProfilingError(gone)
            if time.monotonic() > deadline:
                return
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, most_s)

    @property
    def _requests(self) -> LocalFolder | RemoteFolder:
        return self.folder.child(REQUESTS)

    def _steps(self) -> set[str]:
        return {name for name in self.folder.names() if name.startswith("step_")}

    def _capture(self, name: str, request: str) -> Manifest | None:
        """Return the manifest of a step folder, if its capture was made for a request."""
        if self._request_of.get(name, request) != request:
            return None
        try:
            if isinstance(self.folder, LocalFolder):
                manifest = read_manifest(self.folder.path / name)
            else:
                manifest = msgspec.json.decode(self.folder.child(name).read(MANIFEST_NAME), type=Manifest)
        except (*_UNREADABLE, TraceFormatError, OSError):  # it has just been made
            return None
        self._request_of[name] = manifest.trigger.request
        return manifest if manifest.trigger.request == request else None


def find_job(place: str | Path, run_id: str | None = None) -> Job:
    """Return the job that runs in a folder, or behind a URL.

    Args:
        place: Its run's folder, or its ``save_path``.
        run_id: The run, where several are there.

    Raises:
        TraceFormatError: No job can be asked there, or several can.
    """
    root = folder_at(str(place).rstrip("/"))
    if isinstance(root, LocalFolder) and not root.path.is_dir():
        raise TraceFormatError(place, "no such folder")
    if isinstance(root, LocalFolder) and is_step(root.path):
        raise TraceFormatError(place, f"is a step; name its run, {root.path.absolute().parent}")
    folders: list[LocalFolder | RemoteFolder] = [root]
    folders += [root.child(name) for name in sorted(root.names()) if name.startswith("run_")]
    jobs = [Job(folder, info) for folder in folders if (info := _run_in(folder)) is not None]
    found = [job for job in jobs if job.info.config.get("watch", {}).get("enable")]
    if not found:
        raise TraceFormatError(place, "no job here can be asked: it needs watch.enable=true")
    found = [job for job in found if run_id in (None, job.info.run_id)]
    if not found:
        raise TraceFormatError(place, f"has no run {run_id!r} that can be asked")
    running = [job for job in found if not job.gone]
    if not running:
        raise TraceFormatError(place, f"no job runs here: {found[-1].gone}")
    if len(running) > 1:
        which = ", ".join(f"{job.place} (run {job.info.run_id})" for job in running)
        raise TraceFormatError(place, f"several runs are here, name one with --run: {which}")
    return running[0]


def _run_in(folder: LocalFolder | RemoteFolder) -> RunInfo | None:
    """Return the file of a run; ``None`` where there is none that can be read."""
    try:
        return msgspec.json.decode(folder.read(RUN_NAME), type=RunInfo)
    except (*_UNREADABLE, OSError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return str(os.getuid())


def _time_of_day(at_ns: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at_ns / 1e9))
