"""Requests captures of the next steps from a running job with watch.enable=true.

Options change the settings for these captures only. A request is a file in the run's folder, which
may be a URL. Prints at once whether a job runs there. Exits 1 when the request is refused, and when
it is not accepted within the time of --wait.

example: verl-profiling trigger outputs/run --roles actor --ranks 0,3 --wait
"""

from __future__ import annotations

import argparse
import getpass
import math
import os
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from verl_profiling.capture_request import (
    REFUSED,
    REQUEST,
    REQUESTS,
    CaptureRequest,
    CaptureSelection,
    new_request_id,
    parse_ranks,
)
from verl_profiling.commands.common import add_json, at_least_0, count, names, option, show
from verl_profiling.errors import ConfigError, ProfilingError, TraceFormatError
from verl_profiling.files.opener import UNDECODABLE, LocalFolder
from verl_profiling.files.remote import RemoteFolder, is_url
from verl_profiling.files.watch_log import WATCH_LOG
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.steps.inputs import is_step, numbered, runs_at
from verl_profiling.units import visible

ACCEPTED, PENDING = "accepted", "pending"
_SOON_S = 0.3  # how long an answer is awaited without --wait
_PAUSE_S = 0.1  # between two looks for the answer
_URL_PAUSE_S = 12.0
"""Longer than a job takes to list a folder behind a URL again."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument("run", metavar="RUN", help="the run's folder or URL, or its save_path")
    option(parser, "--steps N", "number of consecutive steps (default: 1)", count, default=1)
    add_json(parser)
    changes = parser.add_argument_group("changes of the settings for these captures")
    changes.add_argument("--mode", choices=("e2e", "discrete"))
    option(changes, "--tools A,B", "e.g. torch or torch,torch_memory", names, many=True)
    option(changes, "--roles A,B", "e.g. actor,rollout", names, many=True)
    option(changes, "--ranks RANKS", "e.g. 0,8-15")
    option(changes, "--replicas REPLICAS", "replicas of the rollout, e.g. 0,2-3")
    option(changes, "--stages A,B", "e.g. update_actor; in discrete mode", names, many=True)
    help = "wait until the request is accepted or refused, at most this time"
    option(parser, "--wait [SECONDS]", help, at_least_0("a number of seconds"), const=math.inf)


def run(arguments: argparse.Namespace) -> bool:
    """Send a capture request, and print whether it is accepted, if this is known before the
    timeout.

    Return whether it is accepted; without ``--wait``, an open request is well, too.
    """
    job = find_job(arguments.run)
    request = job.ask(_selection(arguments), arguments.steps)
    words = job.in_words()
    if not arguments.json:
        print(visible(f"request {request}; {words}"), flush=True)
    state, reason = job.wait(request, _SOON_S if arguments.wait is None else arguments.wait)
    folder = job.folder.url
    sentences = {
        ACCEPTED: f"accepted: the captures, or the reason why there are none, will be in {folder}",
        PENDING: "not accepted yet: the job reads requests when a step begins (see --wait)",
    }
    document = {"request": request, "job": words, "state": state, "reason": reason}
    show(arguments, {**document, "folder": folder}, [sentences.get(state, f"{state}: {reason}")])
    return state == ACCEPTED or (state == PENDING and arguments.wait is None)


def _selection(arguments: argparse.Namespace) -> CaptureSelection:
    if arguments.stages and arguments.mode == "e2e":
        raise ConfigError("--stages", "are recorded in discrete mode, not in e2e")
    return CaptureSelection(
        mode=arguments.mode,
        tools=tuple(arguments.tools) or None,
        roles=tuple(arguments.roles) or None,
        ranks=_numbers("--ranks", arguments.ranks),
        replicas=_numbers("--replicas", arguments.replicas),
        stages=tuple(arguments.stages) or None,
    )


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    numbers = parse_ranks(text, option)
    return tuple(sorted(numbers)) if numbers is not None else None


@dataclass(frozen=True)
class Job:
    """A run whose job reads capture requests from the run's folder.

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
        demand = CaptureRequest(
            id=new_request_id(), by=by, request_ns=time.time_ns(), steps=steps, selection=selection
        )
        data = msgspec.json.encode(demand)
        try:
            # The job decodes it alike, with the same limits.
            msgspec.json.decode(data, type=CaptureRequest)
        except msgspec.ValidationError as error:
            what, _, field = str(error).rpartition(" - at `$.")
            option = field.strip("`").removeprefix("selection.").partition("[")[0]
            raise ConfigError(
                f"--{option}", f"the job refuses it: {what}; give fewer, or none"
            ) from error
        self._requests.create(f"{demand.id}{REQUEST}", data)
        return demand.id

    def wait(self, request: str, seconds: float) -> tuple[str, str]:
        """Wait until a request is accepted or refused, or ``seconds`` have passed.

        Returns:
            ``accepted``, ``refused`` with the reason, or ``pending`` before the job has read the
            request.

        Raises:
            ProfilingError: The job has ended without reading the request.
        """
        deadline = time.monotonic() + seconds
        pause_s = _PAUSE_S if isinstance(self.folder, LocalFolder) else _URL_PAUSE_S
        while True:
            # Read before the answer, because a job may answer and then end.
            over = (_run_in(self.folder) or self.info).over
            answer = self._answer(request)
            if answer[0] != PENDING:
                break
            if over:
                raise ProfilingError(over)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return answer
            time.sleep(min(pause_s, left_s))
        if answer[0] == ACCEPTED:  # the request's file is gone; a refusal may still be written
            time.sleep(pause_s)
            answer = self._answer(request)
        return answer

    def _answer(self, request: str) -> tuple[str, str]:
        names = self._requests.names()
        refusal = f"{request}{REFUSED}"
        if refusal in names:
            return "refused", self._requests.read(refusal).decode(errors="replace")
        return PENDING if f"{request}{REQUEST}" in names else ACCEPTED, ""

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
    jobs = []
    for folder in _run_folders(place):
        info = _run_in(folder)
        if info is not None and info.is_watched:
            jobs.append(Job(folder, info))
    if not jobs:
        raise TraceFormatError(
            place, "no run here takes requests of captures; set watch.enable=true"
        )
    running = [job for job in jobs if not job.info.over]
    if not running:
        raise TraceFormatError(place, f"no job runs here: {jobs[-1].info.over}")
    if len(running) > 1:
        which = ", ".join(f"{job.folder.url}/{RUN_NAME}" for job in running)
        raise TraceFormatError(place, f"there are several runs, choose one: {which}")
    return running[0]


def _run_folders(place: str | Path) -> Sequence[LocalFolder | RemoteFolder]:
    """Return the folders at a place that may be run folders, in order: itself, ``run_2``, ..."""
    if is_url(str(place)):
        return _run_folders_behind(str(place))
    folder = Path(place)
    if not folder.exists():
        raise TraceFormatError(place, "no such folder")
    if is_step(folder):
        raise TraceFormatError(place, f"is a step; give its run, {folder.absolute().parent}")
    return [LocalFolder(run) for run in runs_at(folder)]


def _run_folders_behind(url: str) -> list[RemoteFolder]:
    if url.endswith(f"/{RUN_NAME}"):
        return [RemoteFolder(url.removesuffix(f"/{RUN_NAME}"))]
    root = RemoteFolder(url)
    names = sorted(root.names(), key=numbered)
    return [root, *(root.child(name) for name in names if name.startswith("run_"))]


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
