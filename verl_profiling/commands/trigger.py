"""``verl-profiling trigger``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from typing import Any

from verl_profiling.capture_request import MOST_STEPS, Aim, Demand
from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.commands.arguments import at_least_0, count
from verl_profiling.commands.asking import Answer, find_job
from verl_profiling.errors import ConfigError
from verl_profiling.ranks import parse_ranks
from verl_profiling.visible import visible

_SOON_S = 0.3
_MOST_RANKS = 4096
_MOST_FOLDERS = 3


def configure(parser: argparse.ArgumentParser) -> None:
    """Describe the command."""
    parser.description = (
        "Asks a running job, whose watch is on (watch.enable=true), to capture steps: the next one unless "
        "--at names one. Without options it is captured as the settings say; the options hold for these "
        "captures alone. Says at once whether a job runs there. Exits 1 when the request is refused, when a "
        "step was cut short or a worker has nothing, and when the time of --wait is up."
    )
    parser.epilog = "example: verl-profiling trigger outputs/run --roles actor --ranks 0,3 --wait"
    parser.add_argument("run", metavar="RUN", help="the run's folder or URL, or its save_path")
    parser.add_argument("--run", dest="run_id", metavar="ID", help="the run, where several share the folder")
    when = parser.add_argument_group("when")
    when.add_argument("--steps", type=count, default=1, metavar="N", help="consecutive steps (default: 1)")
    when.add_argument("--at", type=_step, metavar="STEP", help="number of the first one")
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
        help="until the captures are there, or for so long",
    )
    then.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask, and follow what becomes of it."""
    job = find_job(arguments.run, arguments.run_id)
    demand = job.ask(_aim(arguments), _steps(arguments.steps), arguments.at)
    if not arguments.json:
        print(visible(f"asked as {demand.id}; {job.in_words()}"), flush=True)
    answer: Answer | None = None
    said: list[str] = []
    for answer in job.follow(demand, _SOON_S if arguments.wait is None else arguments.wait):
        before, said = said, _in_words(answer, demand, job.place)
        if not arguments.json and said != before:
            _print(said)
    if arguments.json:
        asked = {"request": demand.id, "run": job.place, "job": job.in_words()}
        print(json.dumps({**asked, "answer": _as_json(answer) if answer is not None else None}))
    elif answer is None:
        print("not taken yet: that is done when the next step begins (see --wait)")
    if answer is None or answer.state == "accepted":
        return EXIT_FINDING if arguments.wait is not None else EXIT_OK
    ok = [worker.status == "ok" for worker in answer.workers]
    return EXIT_OK if answer.state == "done" and answer.complete and ok and all(ok) else EXIT_FINDING


def _as_json(answer: Answer) -> dict[str, Any]:
    workers = [{"name": one.name, "status": one.status, "reason": one.reason} for one in answer.workers]
    return {
        "state": answer.state,
        "reason": answer.reason,
        "folders": answer.folders,
        "complete": answer.complete if answer.state == "done" else None,
        "policy_versions": answer.policy_versions,
        "workers": workers,
    }


def _print(lines: list[str]) -> None:
    for line in lines:
        print(visible(line), flush=True)


def _in_words(answer: Answer, demand: Demand, place: str) -> list[str]:
    """Return an answer as a line, and a line for each worker that has nothing."""
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


def _aim(arguments: argparse.Namespace) -> Aim:
    if arguments.stages and arguments.mode == "e2e":
        raise ConfigError("--stages", "are recorded in discrete mode, not in e2e")
    return Aim(
        mode=arguments.mode,
        tools=arguments.tool,
        roles=arguments.roles,
        ranks=_numbers("--ranks", arguments.ranks),
        replicas=_numbers("--replicas", arguments.replicas),
        stages=arguments.stages,
    )


def _steps(number: int) -> int:
    if number > MOST_STEPS:
        raise ConfigError("--steps", f"asks for {number} steps; at most {MOST_STEPS} at a time")
    return number


def _numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    found = parse_ranks(text, option)
    if found is not None and len(found) > _MOST_RANKS:
        raise ConfigError(option, f"names {len(found):,}; at most {_MOST_RANKS:,}, or leave it out")
    return tuple(sorted(found)) if found is not None else None


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as actor,rollout")
    return names


def _step(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not the number of a step")
    return int(text)
