"""``verl-profiling trigger``: sends capture requests to a running job, and follows their state.

A request is a file in the run's folder, which may be a URL.
"""

from __future__ import annotations

import argparse
import getpass
import json
import math
import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from verl_profiling.commands import EXIT_FINDING, EXIT_OK, at_least_0, count
from verl_profiling.errors import ConfigError, ProfilingError, TraceFormatError
from verl_profiling.manifest import MANIFEST_NAME, RUN_NAME, CaptureResult, Manifest, RunInfo
from verl_profiling.remote import LocalFolder, RemoteFolder, is_url
from verl_profiling.run_files import read_manifest
from verl_profiling.timeline.inputs import is_step, runs_at
from verl_profiling.timeline.trace import UNDECODABLE
from verl_profiling.units import visible
from verl_profiling.watch_log import WATCH_LOG

_SOON_S = 0.3
_PAUSE_S = 0.1
_SLOW_PAUSE_S = 5.0
_MOST_FOLDERS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Requests captures from a running job with watch.enable=true: of the next step, or of the step "
        "--at. Options change the settings for these captures only. Prints at once whether a job runs "
        "there. Exits 1 when the request is refused, when a step ended early, when a worker recorded "
        "nothing, and when the time of --wait is over."
    )
    parser.epilog = "example: verl-profiling trigger outputs/run --roles actor --ranks 0,3 --wait"
    parser.add_argument("run", metavar="RUN", help="the run's folder or URL, or its save_path")
    parser.add_argument("--run", dest="run_id", metavar="ID", help="the run, where several share the folder")
    when = parser.add_argument_group("when")
    when.add_argument("--steps", type=count, default=1, metavar="N", help="consecutive steps (default: 1)")
    when.add_argument("--at", type=int, metavar="STEP", help="number of the first step")
    what = parser.add_argument_group("what, other than the settings say")
    what.add_argument("--mode", choices=("e2e", "discrete"))
    what.add_argument("--tool", type=_names, metavar="NAMES", help="e.g. torch or torch,torch_memory")
    what.add_argument("--roles", type=_names, metavar="NAMES", help="e.g. actor,rollout")
    what.add_argument("--ranks", metavar="RANKS", help="e.g. 0,8-15")
    what.add_argument("--replicas", metavar="REPLICAS", help="of the rollout, written like ranks")
    what.add_argument("--stages", type=_names, metavar="NAMES", help="e.g. update_actor; in discrete mode")
    then = parser.add_argument_group("and then")
    then.add_argument(
        "--wait",
        type=at_least_0("a number of seconds"),
        nargs="?",
        const=math.inf,
        metavar="SECONDS",
        help="wait for the captures, at most this time",
    )
    then.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Send a capture request, and print its state until it is done or the time is up."""
    job = find_job(arguments.run, arguments.run_id)
    demand = job.ask(_selection(arguments), arguments.steps, arguments.at)
    if not arguments.json:
        print(visible(f"request {demand.id}; {job.in_words()}"), flush=True)
    answer: Answer | None = None
    said: list[str] = []
    for answer in job.follow(demand, _SOON_S if arguments.wait is None else arguments.wait):
        before, said = said, _in_words(answer, demand, job.folder.url)
        for line in said if said != before and not arguments.json else ():
            print(visible(line), flush=True)
    if arguments.json:
        asked = {"request": demand.id, "run": job.folder.url, "job": job.in_words()}
        print(json.dumps({**asked, "answer": _as_json(answer) if answer is not None else None}))
    elif answer is None:
        print("not accepted yet, which happens at the begin of the next step (see --wait)")
    if answer is None or answer.state == "accepted":
        return EXIT_FINDING if arguments.wait is not None else EXIT_OK
    ok = [worker.status == "ok" for worker in answer.workers]
    return EXIT_OK if answer.state == "done" and answer.complete and ok and all(ok) else EXIT_FINDING


def _as_json(answer: Answer) -> dict[str, object]:
    workers = [{"name": one.name, "status": one.status, "reason": one.reason} for one in answer.workers]
    complete = answer.complete if answer.state == "done" else None
    return {**msgspec.structs.asdict(answer), "complete": complete, "workers": workers}


def _in_words(answer: Answer, demand: Demand, place: str) -> list[str]:
    """Return an answer as lines: the state, then one line per worker with a reason."""
    if answer.state == "refused":
        return [f"refused: {answer.reason}"]
    folders = _folders(place, answer.folders)
    if answer.state == "accepted":
        waits = f"waits for step {demand.at}" if demand.at is not None else "waits for its step"
        return [f"accepted: {folders or waits}"]
    known = [str(version) for version in answer.policy_versions]
    versions = f"{known[0]} to {known[-1]}" if len(known) > _MOST_FOLDERS else ", ".join(known)
    parts = [
        f"done: {folders}",
        f"policy version {versions}" if versions else "",
        "" if answer.complete else "a step was cut short",
        ", ".join(f"{worker.name} {worker.status}" for worker in answer.workers) or "no worker recorded",
    ]
    reasons = [f"  {worker.name}: {worker.reason}" for worker in answer.workers if worker.reason]
    return ["; ".join(filter(None, parts)), *reasons]


def _folders(place: str, names: Sequence[str]) -> str:
    if len(names) > _MOST_FOLDERS:
        return f"{place}/{names[0]} to {names[-1]}, {len(names)} in all"
    return ", ".join(f"{place}/{name}" for name in names)


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


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a capture request.

    Attributes:
        state: ``accepted``, then ``done``; or ``refused``.
        reason: Reason of a refusal.
        folders: The step folders of the request's captures, in order.
        complete: Whether all steps were recorded to their end.
        policy_versions: Policy versions of the captured steps, if the loop reports them.
        workers: Results of the workers in the last capture.
    """

    state: str
    reason: str
    folders: list[str]
    complete: bool
    policy_versions: list[int]
    workers: list[CaptureResult]


@dataclass(frozen=True)
class Job:
    """A run that takes capture requests.

    Attributes:
        folder: The run's folder, local or at a URL.
        info: The run's ``run.json``.
        before: Step folders that existed before the request.
    """

    folder: LocalFolder | RemoteFolder
    info: RunInfo
    before: set[str] = field(default_factory=set)

    def in_words(self) -> str:
        """Return a sentence on whether the job runs, and on the age of its last logged step."""
        process = self.info.process
        text = f"the job runs ({process})"
        if process.alive() is None:
            text = f"whether the job runs ({process}) is unknown on this host"
        with suppress(OSError):
            ago_s = time.time() - Path(self.folder.url, WATCH_LOG).stat().st_mtime
            text += f"; its watch logged a step {max(ago_s, 0.0):.1f} s ago"
        return text

    def ask(self, selection: CaptureSelection, steps: int, at: int | None) -> Demand:
        """Write a capture request into the run's folder; return the request.

        Raises:
            ConfigError: The job would refuse the request, e.g. because of too many steps or ranks.
            OSError: The folder cannot be written; behind a URL, other errors are possible.
        """
        self.before.update(self.folder.names())
        by = f"{_user()}@{socket.gethostname()}"[:200]
        demand = Demand(
            id=new_request_id(), by=by, asked_ns=time.time_ns(), steps=steps, at=at, selection=selection
        )
        data = msgspec.json.encode(demand)
        try:
            msgspec.json.decode(data, type=Demand)  # as the job will, which has these limits
        except msgspec.ValidationError as error:
            what, _, field = str(error).rpartition(" - at `$.")
            option = field.strip("`").removeprefix("selection.").partition("[")[0]
            option = {"tools": "tool"}.get(option, option)
            raise ConfigError(f"--{option}", f"is refused: {what}; give fewer, or leave it out") from error
        self._requests.create(f"{demand.id}{REQUEST}", data)
        return demand

    def answer(self, demand: Demand) -> Answer | None:
        """Return the state of a request; ``None`` until the job has read the request."""
        names, state, reason = self._requests.names(), "accepted", ""
        captures = {name: made for name in self._new_steps() if (made := self._capture(name, demand.id))}
        found = list(captures.values())
        if f"{demand.id}{REFUSED}" in names:
            state = "refused"
            reason = self._requests.read(f"{demand.id}{REFUSED}").decode(errors="replace")
        elif sum(len(one.steps) for one in found if one.state == "written") >= demand.steps:
            state = "done"
        elif not found and f"{demand.id}{REQUEST}" in names:
            return None
        return Answer(
            state=state,
            reason=reason,
            folders=list(captures),
            complete=all(one.complete for one in found),
            policy_versions=[one.policy_version for one in found if one.policy_version is not None],
            workers=found[-1].workers if found else [],
        )

    def follow(self, demand: Demand, seconds: float) -> Iterator[Answer]:
        """Yield each new state of a request, until the state is ``done`` or ``refused``, or after
        ``seconds``.

        Raises:
            ProfilingError: The job has ended before the captures of the request.
        """
        deadline = time.monotonic() + seconds
        pause_s = _PAUSE_S if isinstance(self.folder, LocalFolder) else _SLOW_PAUSE_S
        seen: Answer | None = None
        while True:
            over = (_run_in(self.folder) or self.info).over  # first: a job may answer and then end
            answer = self.answer(demand)
            if answer is not None and answer != seen:
                yield (seen := answer)
                if answer.state != "accepted":
                    return
            if over:
                raise ProfilingError(over)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return
            time.sleep(min(pause_s, left_s))

    @property
    def _requests(self) -> LocalFolder | RemoteFolder:
        return self.folder.child(REQUESTS)

    def _new_steps(self) -> list[str]:
        return sorted(name for name in self.folder.names() - self.before if name.startswith("step_"))

    def _capture(self, name: str, request: str) -> Manifest | None:
        """Return the manifest of a step folder if its capture belongs to the given request, else ``None``."""
        try:
            if isinstance(self.folder, LocalFolder):
                manifest = read_manifest(self.folder.path / name)
            else:
                manifest = msgspec.json.decode(self.folder.child(name).read(MANIFEST_NAME), type=Manifest)
        except (*UNDECODABLE, TraceFormatError, OSError):  # a new folder may have no manifest yet
            return None
        return manifest if manifest.trigger.request == request else None


def find_job(place: str | Path, run_id: str | None = None) -> Job:
    """Return the job that runs in a folder, or at a URL.

    Args:
        place: Folder or URL of the run, or its ``save_path``.
        run_id: Id of the run, if several share the folder.

    Raises:
        TraceFormatError: No job, or more than one, takes requests there.
    """
    runs: list[LocalFolder | RemoteFolder]
    if is_url(str(place)):
        root = RemoteFolder(str(place))
        runs = [root, *(root.child(name) for name in sorted(root.names()) if name.startswith("run_"))]
    elif not Path(place).is_dir():
        raise TraceFormatError(place, "no such folder")
    elif is_step(Path(place)):
        raise TraceFormatError(place, f"is a step; name its run, {Path(place).absolute().parent}")
    else:
        runs = [LocalFolder(run) for run in runs_at(Path(place))]
    jobs = [Job(folder, info) for folder in runs if (info := _run_in(folder)) is not None]
    found = [job for job in jobs if job.info.is_watched and run_id in (None, job.info.run_id)]
    if not found:
        named = f" {run_id!r}" if run_id is not None else ""
        raise TraceFormatError(place, f"has no run{named} that takes requests, which need watch.enable=true")
    running = [job for job in found if not job.info.over]
    if not running:
        raise TraceFormatError(place, f"no job runs here: {found[-1].info.over}")
    if len(running) > 1:
        which = ", ".join(f"{job.folder.url} (run {job.info.run_id})" for job in running)
        raise TraceFormatError(place, f"there are several runs, choose one with --run: {which}")
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
