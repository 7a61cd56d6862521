"""What the watch notices of faults in running loops, and what it notices where there is none.

Run: ``make watch-faults``. Loops of Ray actors with short stages: real callback, mixins, readings
and captures; the work is waiting, for times that vary. In most runs something becomes slow, or
grows, at a step. A capture has to follow, and its manifest says what was noticed and who was
suspected.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import results
from watch_fault_workers import USUAL_MS, AgentLoop, Alarms, Rater, Server, Trainer, run_on_ranks

from verl_profiling import ProfilingCallback
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Manifest

__all__ = ["markdown"]

RESULTS = Path(__file__).with_name("watch_faults.json")
RANKS, REPLICAS, AGENTS = 3, 3, 2
BEGIN, STEPS = 30, 45
ON_RANKS, STEPS_ON_RANKS = "every rank", 85
"""The loop that runs on every rank; there, a capture is announced seconds before it is made."""
WITHIN = 5
"""Goal: a fault is noticed within so many steps."""
_LANES = {
    "actor": "actor_rank{}",
    "server": "rollout{}_rank0",
    "agent": "agent_loop_rank{}",
    "rater": "reward_rank{}",
}


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run.

    Attributes:
        name: It, for the table.
        loop: The loop it happens in.
        who: The worker, e.g. ``actor1``; ``actors`` for all ranks; empty for none.
        what: What is slower there: a stage, ``tool``, or ``memory``.
        by: By which factor; megabytes in a step for memory.
        period: It happens in every so-manieth step only, as the stage ``save_checkpoint``.
        every: ``watch.every``.
        steps: Length of the run.
    """

    name: str
    loop: str
    who: str = ""
    what: str = ""
    by: float = 1.0
    period: int = 0
    every: int = 5
    steps: int = STEPS

    @property
    def stage(self) -> str:
        """The stage of the loop in which it shows; empty if in none."""
        of_the_loop = {"memory": "", "tool": "rollout"}
        if self.loop == "one step off":
            of_the_loop["rollout"] = "wait_rollout"
        return of_the_loop.get(self.what, self.what)

    @property
    def lane(self) -> str:
        """The lane that is to be suspected; empty if no process can be told from the others."""
        kind, number = self.who[:-1], self.who[-1:]
        return _LANES[kind].format(number) if number.isdigit() else ""


def faults(quiet_steps: int) -> Iterator[Fault]:
    """Yield all runs."""
    for rank in range(RANKS):
        for what, by in (("update_actor", 3.0), ("old_log_prob", 4.0)):
            yield Fault("one rank slow", "controller", f"actor{rank}", what, by)
    for replica in range(REPLICAS):
        for loop in ("controller", "one step off", "agents"):
            yield Fault("an engine replica slow", loop, f"server{replica}", "rollout", 4.0)
    for agent in range(AGENTS):
        for by in (4.0, 8.0):
            yield Fault("a tool blocks its event loop", "agents", f"agent{agent}", "tool", by)
    for by in (3.0, 5.0, 8.0, 12.0):
        yield Fault("reward slow", "controller", "rater0", "reward", by)
    for rank, by in enumerate((4.0, 6.0, 9.0)):
        yield Fault(
            "weight sync of one rank slow", "controller", f"actor{rank}", "update_weights", by
        )
    for by in (4.0, 6.0, 9.0):
        yield Fault("weight sync slow on all ranks", "controller", "actors", "update_weights", by)
    behind, grows = "one rank behind, no step slow", "memory of one rank grows"
    for rank in range(RANKS):
        yield Fault(behind, "controller", f"actor{rank}", "update_actor", 1.6, every=2)
    for rank in range(RANKS):
        yield Fault(grows, "controller", f"actor{rank}", "memory", 6.0, steps=70)
    for period in (5, 10, 25):
        steps = max(100, quiet_steps // 4)
        yield Fault("a checkpoint now and then", "controller", period=period, steps=steps)
    for rank, (what, by) in enumerate((("rollout", 3.0), ("old_log_prob", 6.0), ("reward", 10.0))):
        yield Fault("one rank slow", ON_RANKS, f"actor{rank}", what, by, steps=STEPS_ON_RANKS)
    for what, by in (("update_actor", 3.0), ("rollout", 4.0)):
        yield Fault("slow on all ranks", ON_RANKS, "actors", what, by, steps=STEPS_ON_RANKS)
    for rank in (1, 2):
        yield Fault(behind, ON_RANKS, f"actor{rank}", "rollout", 1.6, every=2, steps=STEPS_ON_RANKS)
    for rank in (0, 2):
        yield Fault(grows, ON_RANKS, f"actor{rank}", "memory", 6.0, steps=110)
    for loop in ("controller", "one step off", "agents", ON_RANKS):
        yield Fault("none", loop, steps=quiet_steps)


class Fleet:
    """The workers of all loops, started once."""

    def __init__(self) -> None:
        import ray

        self._get = ray.get

        def start(cls: type, number: int) -> list[Any]:
            at_once = 100 if cls in (Server, AgentLoop) else 1
            made = ray.remote(cls).options(num_cpus=0, max_concurrency=at_once)
            return [made.remote() for _ in range(number)]

        self.workers = {
            "actor": start(Trainer, RANKS),
            "server": start(Server, REPLICAS),
            "agent": start(AgentLoop, AGENTS),
            "rater": start(Rater, 1),
        }
        self._seeds = count(1)

    def set_up(self, config: dict[str, Any]) -> None:
        """Let all begin a run."""
        self._get(
            [
                worker.set_up.remote(config, number, len(group), next(self._seeds))
                for group in self.workers.values()
                for number, worker in enumerate(group)
            ]
        )

    def begin(self, fault: Fault) -> None:
        """Let a fault begin."""
        for kind, group in self.workers.items():
            for number, worker in enumerate(group):
                if fault.who in (f"{kind}{number}", f"{kind}s"):
                    self._get(worker.become.remote(fault.what, fault.by))

    def step(
        self, fault: Fault, profiling: ProfilingCallback, step: int, batch: list[Any]
    ) -> list[Any]:
        """Run the stages of one step, of about 150 ms; return what generates the next batch."""
        if fault.loop == "one step off":
            with profiling.stage("wait_rollout"):
                self._get(batch)
            batch = self.generation()
        else:
            profiling.on_rollout_begin()
            if fault.loop == "agents":
                agents, servers = self.workers["agent"], self.workers["server"]
                self._get([agent.run.remote(servers, 2 * REPLICAS) for agent in agents])
            else:
                self._get(self.generation())
            profiling.on_rollout_end()
        with profiling.stage("reward"):
            self._get(self.workers["rater"][0].rate.remote())
        for name in ("old_log_prob", "update_actor", "update_weights"):
            with profiling.stage(name):
                self._get([actor.work.remote(name) for actor in self.workers["actor"]])
        if fault.period and step % fault.period == 0:
            with profiling.stage("save_checkpoint"):
                time.sleep(0.4)
        return batch

    def generation(self) -> list[Any]:
        """Return what generates a batch."""
        return [server.generate.remote(USUAL_MS["rollout"]) for server in self.workers["server"]]


def run(fleet: Fleet, fault: Fault, folder: Path) -> dict[str, Any]:
    """Run a loop with a fault; return what became of it."""
    config = {
        "enable": True,
        "tool": "spans",
        "save_path": str(folder),
        "schedule": {"steps": []},
        "watch": {
            "enable": True,
            "every": fault.every,
            "trigger": {"cooldown": 0, "max_captures": 1000},
        },
    }
    if fault.loop == ON_RANKS:
        plan = {**asdict(fault), "config": config, "begin": BEGIN}
        texts = run_on_ranks(plan, RANKS, folder.with_suffix(".plan"))
        return verdict(fault, captured(folder), texts)
    fleet.set_up(config)
    profiling = ProfilingCallback(config)
    profiling.add_workers("actor", fleet.workers["actor"])
    profiling.add_rollout(fleet.workers["server"])
    profiling.add_workers("reward", fleet.workers["rater"])
    if fault.loop == "agents":
        profiling.add_workers("agent_loop", fleet.workers["agent"])
    batch = fleet.generation() if fault.loop == "one step off" else []
    with Alarms() as alarms, profiling:
        for step in range(1, fault.steps + 1):
            if step == BEGIN:
                fleet.begin(fault)
            profiling.on_step_begin(step)
            batch = fleet.step(fault, profiling, step, batch)
            profiling.on_step_end()
    return verdict(fault, captured(folder), alarms.texts)


def captured(folder: Path) -> list[Manifest]:
    """Return the manifests of a run."""
    return [read_manifest(path) for path in sorted(folder.glob("step_*"))]


def verdict(fault: Fault, manifests: list[Manifest], texts: list[str]) -> dict[str, Any]:
    """Return a row of the results."""
    noticeable = bool(fault.what)
    begin = BEGIN if noticeable else fault.steps + 1
    steps = sorted({int(text.split("step ", 1)[1].split()[0].rstrip(":")) for text in texts})
    found = {
        "fault": fault.name,
        "loop": fault.loop,
        "what": fault.what,
        "by": fault.by,
        "noticeable": noticeable,
        "quiet_steps": begin - 1,
        "false_alarms": sum(step < begin for step in steps),
        "after": None,
        "allowed": WITHIN if fault.what != "memory" else 20 + WITHIN,
        "sign": "",
        "stage_right": None,
        "rank_right": None,
        "captured": None,
        "miss": "",
    }
    made = [
        one
        for one in manifests
        if one.trigger.kind == "anomaly" and (one.trigger.noticed or 0) >= begin
    ]
    if fault.what == "memory":  # what else a longer run may have shown is not what was put into it
        made = [one for one in made if one.trigger.sign == "memory"]
    if not noticeable or not made:
        found["miss"] = "not noticed" if noticeable else ""
        return found
    first = made[0]
    trigger = first.trigger
    recorded = {worker.name for worker in first.workers if worker.status == "ok"}
    named = fault.lane.removesuffix("_rank0") if fault.lane.startswith("rollout") else fault.lane
    found |= {
        "after": (trigger.noticed or 0) - begin + 1,
        "sign": trigger.sign,
        "stage_right": trigger.stage == fault.stage,
        "rank_right": fault.lane in trigger.suspects[:2] if fault.lane else None,
        "captured": named in recorded if fault.lane else first.complete,
    }
    if not (found["stage_right"] and found["rank_right"] is not False and found["captured"]):
        found["miss"] = (
            f"{trigger.reason}; suspects {trigger.suspects}, recorded {sorted(recorded)}"
        )
    return found


def markdown(found: dict[str, Any]) -> str:
    """Return the table of all runs by fault, what they come to, and where they ran."""
    lines = [
        "| fault | loop | runs | noticed | after steps | sign | stage right | rank in first "
        "two | captured |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    faulty = [run for run in found["runs"] if run["noticeable"]]
    for fault, loop in dict.fromkeys((run["fault"], run["loop"]) for run in faulty):
        runs = [run for run in faulty if (run["fault"], run["loop"]) == (fault, loop)]
        noticed = [run for run in runs if run["after"] is not None]
        after = sorted({run["after"] for run in noticed})
        span = f"{after[0]} to {after[-1]}" if len(after) > 1 else "".join(map(str, after))
        signs = ", ".join(f"`{sign}`" for sign in dict.fromkeys(run["sign"] for run in noticed))
        lines.append(
            f"| {fault} | {loop} | {len(runs)} | {len(noticed)} | {span} | {signs} "
            + "".join(
                f"| {_share(noticed, right)} "
                for right in ("stage_right", "rank_right", "captured")
            )
            + "|"
        )
    quiet = sum(run["quiet_steps"] for run in found["runs"])
    false = sum(run["false_alarms"] for run in found["runs"])
    soon = [run for run in faulty if run["after"] is not None and run["after"] <= run["allowed"]]
    lines += [
        "",
        f"{len(faulty)} runs with a fault, {len(soon)} of them noticed in time "
        f"({len(soon) / max(1, len(faulty)):.0%}): within 5 steps; where memory grows, "
        "within 5 after the "
        "window. "
        f"{quiet:,} quiet steps, of all runs before their fault and of those without one, "
        f"with {false} false alarms: {1000 * false / max(1, quiet):.2f} per 1,000.",
        "",
        *(
            f"- Missed: {run['fault']}, {run['loop']}: {run['miss']}"
            for run in found["runs"]
            if run["miss"]
        ),
    ]
    lines += [
        "",
        "| simulated quiet steps | stages vary by | longer by a tail | false alarms per 1,000 |",
        "|---|---|---|---|",
        *(
            f"| {one['steps']:,} | {one['spread']:.0%} | {one['tail']:.0%} "
            f"| {1000 * one['noticed'] / one['steps']:.3f} |"
            for one in found["simulated"]
        ),
    ]
    lines += ["", f"{results.where(found['measured'])}."]
    return "\n".join(lines)


def _share(runs: Iterable[dict[str, Any]], right: str) -> str:
    told = [run[right] for run in runs if run[right] is not None]
    return f"{sum(told)} of {len(told)}" if told else ""


def main() -> None:
    """Run all, print the table, and write the results."""
    import ray
    from watch_noise import simulated

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument(
        "--quiet-steps", type=int, default=1000, help="length of the runs without a fault"
    )
    parser.add_argument(
        "--only",
        default="",
        help="only the faults with this in their name and loop; writes nothing",
    )
    given = parser.parse_args()
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    fleet = Fleet()
    runs = []
    with tempfile.TemporaryDirectory(prefix="watch-faults-") as folder:
        for number, fault in enumerate(faults(given.quiet_steps)):
            if given.only in f"{fault.name}, {fault.loop}":
                runs.append(run(fleet, fault, Path(folder, str(number))))
                shown = {key: runs[-1][key] for key in ("after", "sign", "false_alarms", "miss")}
                print(
                    f"{fault.name}, {fault.loop}, {fault.who} {fault.what} x{fault.by:g}: {shown}",
                    flush=True,
                )
    steps = 100 * given.quiet_steps
    found = {
        "measured": results.here(),
        "runs": runs,
        "simulated": [
            simulated(steps, *noise) for noise in ((0.05, 0.0), (0.05, 0.01), (0.15, 0.01))
        ],
    }
    if not given.only:
        results.write(RESULTS, found)
    print(markdown(found))


if __name__ == "__main__":
    main()
