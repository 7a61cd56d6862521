"""``verl-profiling trigger``: sends a capture request to a running job, until it is accepted or
refused.

A request is a file in the run's folder, which may be a URL.
"""

from __future__ import annotations

import argparse
import getpass
import math
import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_profiling.capture_request import (
    REFUSED,
    REQUEST,
    REQUESTS,
    CaptureSelection,
    Demand,
    new_request_id,
    parse_ranks,
)
from verl_profiling.commands import EXIT_FINDING, EXIT_OK, at_least_0, count, option
from verl_profiling.errors import ConfigError, ProfilingError, TraceFormatError
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.remote import LocalFolder, RemoteFolder, is_url
from verl_profiling.timeline.inputs import is_step, numbered, runs_at
from verl_profiling.timeline.trace import UNDECODABLE
from verl_profiling.units import visible
from verl_profiling.watch_log import WATCH_LOG

ACCEPTED = "accepted"
_SOON_S = 0.3
_PAUSE_S = 0.1
_URL_PAUSE_S = 12.0
"""Longer than a job takes to list a folder behind a URL again."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Requests captures of the next steps from a running job with watch.enable=true. "
        "Options change the "
        "settings for these captures only. Prints at once whether a job runs there. Exits 1 "
        "when the request "
        "is refused, and when the time of --wait is over."
    )
    parser.epilog = "example: verl-profiling trigger outputs/run --roles actor --ranks 0,3 --wait"
    parser.add_argument("run", metavar="RUN", help="the run's folder or URL, or its save_path")
    option(parser, "--steps N", "consecutive steps (default: 1)", count, default=1)
    what = parser.add_argument_group("changes of the settings for these captures")
    what.add_argument("--mode", choices=("e2e", "discrete"))
    what.add_argument(
        "--tool", type=_names, metavar="NAMES", help="e.g. torch or torch,torch_memory"
    )
    what.add_argument("--roles", type=_names, metavar="NAMES", help="e.g. actor,rollout")
    what.add_argument("--ranks", metavar="RANKS", help="e.g. 0,8-15")
    what.add_argument("--replicas", metavar="REPLICAS", help="replicas of the rollout, e.g. 0,2-3")
    what.add_argument(
        "--stages", type=_names, metavar="NAMES", help="e.g. update_actor; in discrete mode"
    )
    help = "wait until the request is accepted or refused, at most this time"
    option(parser, "--wait [SECONDS]", help, at_least_0("a number of seconds"), const=math.inf)


def run(arguments: argparse.Namespace) -> int:
    """Send a capture request, and print whether it is accepted,
    if this is known before the timeout.
    """
    job = find_job(arguments.run)
    request = job.ask(_selection(arguments), arguments.steps)
    print(visible(f"request {request}; {job.in_words()}"), flush=True)
    state = job.wait(request, _SOON_S if arguments.wait is None else arguments.wait)
    if state == ACCEPTED:
        where = visible(job.folder.url)
        print(f"{state}: the captures, or the reason why there are none, will be in {where}")
        return EXIT_OK
    print(
        visible(state) or "not accepted yet: the job reads requests when a step begins (see --wait)"
    )
    return EXIT_FINDING if state or arguments.wait is not None else EXIT_OK


def _selection(arguments: argparse.Namespace) -> CaptureSelection:
    if arguments.stages and arguments.mode == "e2e":
        raise ConfigError("--stages", "are recorded in discrete mode, not in e2e")
    return CaptureSelection(
        mode=arguments.mode,
        tools=arguments.tool,
        roles=arguments.roles,
        ranks=_numbers("--ranks", arguments.ranks),
        replicas=_numbers("--replicas", arguments.replicas),
        stages=arguments.stages,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    found = parse_ranks(text, option)
    return tuple(sorted(found)) if found is not None else None


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(","))


@dataclass(frozen=True)
class Job:
    """A run that takes capture requests.

    Attributes:
        folder: The run's folder, local or at a URL.
        info: The run's ``run.json``.
    """

    folder: LocalFolder | RemoteFolder
    info: RunInfo

    def in_words(self) -> str:
        """Return a sentence: whether the job runs, and when its watch logged a step last."""
        process = self.info.process
        text = f"the job runs ({process})"
        if process.alive() is None:
            text = f"this host cannot tell whether the job still runs ({process})"
        with suppress(OSError):
            ago_s = time.time() - Path(self.folder.url, WATCH_LOG).stat().st_mtime
            text += f"; its watch logged a step {max(ago_s, 0.0):.1f} s ago"
        return text

    def ask(self, selection: CaptureSelection, steps: int) -> str:
        """Write a capture request into the run's folder; return its id.

        Raises:
            ConfigError: The job would refuse the request, e.g. because of too many steps or ranks.
            OSError: The folder cannot be written; behind a URL, other errors are possible.
        """
        by = f"{_user()}@{socket.gethostname()}"[:200]
        demand = Demand(
            id=new_request_id(), by=by, asked_ns=time.time_ns(), steps=steps, selection=selection
        )
        data = msgspec.json.encode(demand)
        try:
            msgspec.json.decode(data, type=Demand)  # the job decodes it alike, with the same limits
        except msgspec.ValidationError as error:
            what, _, field = str(error).rpartition(" - at `$.")
            option = field.strip("`").removeprefix("selection.").partition("[")[0]
            option = {"tools": "tool"}.get(option, option)
            raise ConfigError(
                f"--{option}", f"the job refuses it: {what}; give fewer, or none"
            ) from error
        self._requests.create(f"{demand.id}{REQUEST}", data)
        return demand.id

    def wait(self, request: str, seconds: float) -> str:
        """Wait until a request is accepted or refused, or ``seconds`` have passed.

        Returns:
            ``accepted``, or ``refused`` with the reason; empty before the job has read the request.

        Raises:
            ProfilingError: The job has ended without reading the request.
        """
        deadline = time.monotonic() + seconds
        pause_s = _PAUSE_S if isinstance(self.folder, LocalFolder) else _URL_PAUSE_S
        while True:
            over = (
                _run_in(self.folder) or self.info
            ).over  # before the answer: a job may answer and end
            if state := self._state(request):
                break
            if over:
                raise ProfilingError(over)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return ""
            time.sleep(min(pause_s, left_s))
        if state == ACCEPTED:  # its file is gone, and a refusal is written later
            time.sleep(pause_s)
            state = self._state(request)
        return state

    def _state(self, request: str) -> str:
        names = self._requests.names()
        if f"{request}{REFUSED}" in names:
            return f"refused: {self._requests.read(f'{request}{REFUSED}').decode(errors='replace')}"
        return "" if f"{request}{REQUEST}" in names else ACCEPTED

    @property
    def _requests(self) -> LocalFolder | RemoteFolder:
        return self.folder.child(REQUESTS)


def find_job(place: str | Path) -> Job:
    """Return the job that runs in a folder, or at a URL.

    Args:
        place: Folder or URL of the run, or its ``save_path``.

    Raises:
        TraceFormatError: No job, or more than one, takes requests there.
    """
    runs: list[LocalFolder | RemoteFolder]
    if is_url(str(place)):
        root = RemoteFolder(str(place).removesuffix(f"/{RUN_NAME}"))
        names = [] if str(place).endswith(f"/{RUN_NAME}") else sorted(root.names(), key=numbered)
        runs = [root, *(root.child(name) for name in names if name.startswith("run_"))]
    elif not Path(place).exists():
        raise TraceFormatError(place, "no such folder")
    elif is_step(Path(place)):
        raise TraceFormatError(place, f"is a step; give its run, {Path(place).absolute().parent}")
    else:
        runs = [LocalFolder(run) for run in runs_at(Path(place))]
    jobs = [Job(folder, info) for folder in runs if (info := _run_in(folder)) is not None]
    found = [job for job in jobs if job.info.is_watched]
    if not found:
        raise TraceFormatError(place, "has no run that takes requests: they need watch.enable=true")
    running = [job for job in found if not job.info.over]
    if not running:
        raise TraceFormatError(place, f"no job runs here: {found[-1].info.over}")
    if len(running) > 1:
        which = ", ".join(f"{job.folder.url}/{RUN_NAME}" for job in running)
        raise TraceFormatError(place, f"there are several runs, choose one: {which}")
    return running[0]


def _run_in(folder: LocalFolder | RemoteFolder) -> RunInfo | None:
    """Return ``run.json`` of a folder; ``None`` if it is missing or unreadable."""
    try:
        return msgspec.json.decode(folder.read(RUN_NAME), type=RunInfo)
    except (*UNDECODABLE, OSError):
        return None


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a user id without a name
        return str(os.getuid())
