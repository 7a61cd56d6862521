"""``verl-profiling trigger``."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.aim import Aim
from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.commands.arguments import at_least_0, count
from verl_profiling.commands.asking import Job, find_job, find_job_through_ray
from verl_profiling.demand import MOST_STEPS, Answer, Demand
from verl_profiling.errors import ConfigError
from verl_profiling.ranks import parse_ranks
from verl_profiling.remote import is_url
from verl_profiling.visible import visible

__all__ = ["configure", "run"]

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
    parser.add_argument(
        "run", metavar="RUN", help="the run's folder or URL, or its save_path; with --ray, the run's id too"
    )
    parser.add_argument("--run", dest="run_id", metavar="ID", help="the run, where several share the folder")
    reach = parser.add_argument_group("how the job is reached, other than through its folder")
    reach.add_argument(
        "--ray", action="store_true", help="through the Ray cluster of this host; so is a run behind a URL"
    )
    reach.add_argument("--ray-address", metavar="ADDRESS", help="through that cluster, e.g. 10.0.0.1:6379")
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
    instead = parser.add_argument_group("instead").add_mutually_exclusive_group()
    instead.add_argument("--cancel", metavar="ID", help="forget a request")
    instead.add_argument("--list", action="store_true", help="show the requests, and what became of them")


def run(arguments: argparse.Namespace) -> int:
    """Ask, cancel or list."""
    job = _job(arguments)
    if arguments.list:
        return _list(job, arguments.json)
    demand: Demand | None = None
    if arguments.cancel:
        job.cancel(arguments.cancel)
        request: str = arguments.cancel
    else:
        demand = job.ask(_aim(arguments), _steps(arguments.steps), arguments.at)
        request = demand.id
    if not arguments.json:
        verb = "cancelling" if demand is None else "asked as"
        print(visible(f"{verb} {request}; {job.in_words()}"), flush=True)
    answer: Answer | None = None
    said: list[str] = []
    for answer in job.follow(request, _SOON_S if arguments.wait is None else arguments.wait):
        before, said = said, _in_words(answer, job.line.place)
        if not arguments.json and said != before and not (demand is None and answer.state == "accepted"):
            _print(said)
    if arguments.json:
        asked = {"request": request, "run": job.line.place, "job": job.in_words()}
        print(json.dumps({**asked, "answer": msgspec.to_builtins(answer) if answer is not None else None}))
    elif answer is None:
        print("not taken yet: that is done when the next step begins (see --wait, --list)")
    return _exit_code(answer, cancelling=demand is None, waited=arguments.wait is not None)


def _job(arguments: argparse.Namespace) -> Job:
    must_run, run_id, address = not arguments.list, arguments.run_id, arguments.ray_address
    if arguments.ray or address or is_url(arguments.run):
        return find_job_through_ray(arguments.run, address or "auto", run_id, must_run)
    return find_job(Path(arguments.run), run_id, must_run)


def _exit_code(answer: Answer | None, cancelling: bool, waited: bool) -> int:
    if answer is None or answer.state == "accepted":
        return EXIT_FINDING if waited else EXIT_OK
    if cancelling:
        return EXIT_OK if answer.state == "cancelled" else EXIT_FINDING
    ok = [worker.status == "ok" for worker in answer.workers]
    whole = answer.complete and bool(ok) and all(ok)
    return EXIT_OK if answer.state == "done" and whole else EXIT_FINDING


def _list(job: Job, as_json: bool) -> int:
    answers, waiting = job.answers(), job.waiting()
    if as_json:
        about = {"run": job.line.place, "job": job.gone or job.in_words()}
        print(json.dumps({**about, **_builtins(answers, waiting)}))
        return EXIT_OK
    print(visible(job.gone or job.in_words()))
    for answer in answers:
        first, *reasons = _in_words(answer, job.line.place)
        _print([f"{_asked(answer.demand)}  {first}", *reasons])
    for demand in waiting:
        print(visible(f"{_asked(demand)}  not taken yet"))
    return EXIT_OK


def _builtins(answers: list[Answer], waiting: list[Demand]) -> dict[str, Any]:
    return {"answers": msgspec.to_builtins(answers), "waiting": msgspec.to_builtins(waiting)}


def _asked(demand: Demand) -> str:
    return "  ".join(filter(None, (demand.id, demand.by, demand.aim.in_words())))


def _print(lines: list[str]) -> None:
    for line in lines:
        print(visible(line), flush=True)


def _in_words(answer: Answer, place: str) -> list[str]:
    """Return an answer as a line, and a line for each worker that has nothing."""
    if answer.state in ("refused", "cancelled"):
        return [f"{answer.state}: {answer.reason}" if answer.reason else answer.state]
    folders = _folders(place, answer.folders)
    if answer.state == "accepted":
        done = f" ({answer.made} of {len(answer.folders)} made)" if answer.made else ""
        return [f"accepted: {folders}{done}"]
    known = [str(version) for version in answer.policy_versions if version is not None]
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
