"""What the watch notices of faults in running loops, and what it notices where there is none.

Run: ``make watch-faults``. Loops of Ray actors with short stages: real callback, mixins, rings, readings and
captures; the work is waiting, for times that vary. In most runs something becomes slow, or grows, at a step.
A capture has to follow, and its manifest says what was noticed and who was suspected.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from typing import Any

import ray
import results
from watch_fault_alarms import alarms
from watch_fault_ranks import LOOP, faults_of_ranks, run_on_ranks
from watch_fault_table import RESULTS, markdown
from watch_fault_workers import USUAL_MS, AgentLoop, Rater, Server, Trainer
from watch_noise import simulated

from verl_profiling import ProfilingCallback
from verl_profiling.manifest import Manifest
from verl_profiling.run_files import read_manifest

RANKS, REPLICAS, AGENTS = 3, 3, 2
BEGIN, STEPS = 30, 45
WITHIN = 5
"""Goal: a fault is noticed within so many steps."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong in a run, and what the watch should say of it.

    Attributes:
        name: It, for the table.
        loop: The loop it happens in.
        who: The worker, e.g. ``actor1``; ``actors`` for all ranks; empty for none.
        what: What is slower there: a stage, ``tool``, or ``memory``.
        by: By which factor; megabytes in a step for memory.
        stage: The stage of the loop in which it shows; empty if there is nothing to notice.
        lane: The lane that is to be suspected; empty if no process can be told from the others.
        period: It happens in every so-manieth step only, as the stage ``save_checkpoint``.
        every: ``watch.every``.
        steps: Length of the run.
    """

    name: str
    loop: str
    who: str = ""
    what: str = ""
    by: float = 1.0
    stage: str = ""
    lane: str = ""
    period: int = 0
    every: int = 5
    steps: int = STEPS


def faults(quiet_steps: int) -> Iterator[Fault]:
    """Yield all runs."""
    slow = "one rank slow"
    for rank in range(RANKS):
        for what, by in (("update_actor", 3.0), ("old_log_prob", 4.0)):
            yield Fault(slow, "controller", f"actor{rank}", what, by, what, f"actor_rank{rank}")
    for replica in range(REPLICAS):
        lane = f"rollout{replica}_rank0"
        for loop, stage in (
            ("controller", "rollout"),
            ("one step off", "wait_rollout"),
            ("agents", "rollout"),
        ):
            yield Fault("an engine replica slow", loop, f"server{replica}", "rollout", 4.0, stage, lane)
    for agent in range(AGENTS):
        for by in (4.0, 8.0):
            lane = f"agent_loop_rank{agent}"
            yield Fault(
                "a tool blocks its event loop", "agents", f"agent{agent}", "tool", by, "rollout", lane
            )
    for by in (3.0, 5.0, 8.0, 12.0):
        yield Fault("reward slow", "controller", "rater0", "reward", by, "reward", "reward_rank0")
    for rank, by in ((0, 4.0), (1, 6.0), (2, 9.0)):
        lane = f"actor_rank{rank}"
        yield Fault(
            "weight sync of one rank slow",
            "controller",
            f"actor{rank}",
            "update_weights",
            by,
            "update_weights",
            lane,
        )
    for by in (4.0, 6.0, 9.0):
        yield Fault(
            "weight sync slow on all ranks", "controller", "actors", "update_weights", by, "update_weights"
        )
    for rank in range(RANKS):
        lane = f"actor_rank{rank}"
        yield Fault(
            "one rank behind, no step slow",
            "controller",
            f"actor{rank}",
            "update_actor",
            1.6,
            "update_actor",
            lane,
            every=2,
        )
    for rank in range(RANKS):
        lane = f"actor_rank{rank}"
        yield Fault(
            "memory of one rank grows", "controller", f"actor{rank}", "memory", 6.0, lane=lane, steps=70
        )
    for period in (5, 10, 25):
        yield Fault(
            "a checkpoint now and then", "controller", period=period, steps=max(100, quiet_steps // 4)
        )
    for fields in faults_of_ranks():
        yield Fault(**fields)
    for loop in ("controller", "one step off", "agents", LOOP):
        yield Fault("none", loop, steps=quiet_steps)


class Fleet:
    """The workers of all loops, started once."""

    def __init__(self) -> None:
        def start(cls: type, number: int) -> list[Any]:
            return [
                ray.remote(cls)
                .options(num_cpus=0, max_concurrency=100 if cls in (Server, AgentLoop) else 1)
                .remote()
                for _ in range(number)
            ]

        self.actors = start(Trainer, RANKS)
        self.servers = start(Server, REPLICAS)
        self.agents = start(AgentLoop, AGENTS)
        self.raters = start(Rater, 1)
        self._seeds = count(1)

    def set_up(self, config: dict[str, Any]) -> None:
        """Let all begin a run."""
        groups = (self.actors, self.servers, self.agents, self.raters)
        ray.get(
            [
                worker.set_up.remote(config, number, len(group), next(self._seeds))
                for group in groups
                for number, worker in enumerate(group)
            ]
        )

    def named(self, who: str) -> list[Any]:
        """Return the worker of a name such as ``actor1``, or a whole group such as ``actors``."""
        groups = {"actor": self.actors, "server": self.servers, "agent": self.agents, "rater": self.raters}
        if who.endswith("s"):
            return groups[who[:-1]]
        return [groups[who[:-1]][int(who[-1])]]

    def begin(self, fault: Fault) -> None:
        """Let a fault begin."""
        for worker in self.named(fault.who) if fault.who else ():
            ray.get(
                worker.grow.remote(fault.by)
                if fault.what == "memory"
                else worker.slow.remote(fault.what, fault.by)
            )


class Loop:
    """One training loop, whose steps take about 150 ms."""

    def __init__(self, fleet: Fleet, profiling: ProfilingCallback, kind: str) -> None:
        self.fleet, self.profiling, self.kind = fleet, profiling, kind
        profiling.add_workers("actor", fleet.actors)
        profiling.add_rollout(fleet.servers)
        profiling.add_workers("reward", fleet.raters)
        if kind == "agents":
            profiling.add_workers("agent_loop", fleet.agents)
        self._next = self._generation() if kind == "one step off" else []

    def _generation(self) -> list[Any]:
        return [server.generate.remote(USUAL_MS["rollout"]) for server in self.fleet.servers]

    def step(self, checkpoint: bool) -> None:
        """Run the stages of one step."""
        profiling = self.profiling
        if self.kind == "one step off":
            with profiling.stage("wait_rollout"):
                ray.get(self._next)
            self._next = self._generation()
        else:
            profiling.on_rollout_begin()
            if self.kind == "agents":
                ray.get([agent.run.remote(self.fleet.servers, 2 * REPLICAS) for agent in self.fleet.agents])
            else:
                ray.get(self._generation())
            profiling.on_rollout_end()
        with profiling.stage("reward"):
            ray.get(self.fleet.raters[0].rate.remote())
        for name in ("old_log_prob", "update_actor", "update_weights"):
            with profiling.stage(name):
                ray.get([actor.work.remote(name) for actor in self.fleet.actors])
        if checkpoint:
            with profiling.stage("save_checkpoint"):
                time.sleep(0.4)


def run(fleet: Fleet, fault: Fault, folder: Path) -> dict[str, Any]:
    """Run a loop with a fault; return what became of it."""
    watch = {"enable": True, "every": fault.every, "trigger": {"cooldown": 0, "max_captures": 1000}}
    config = {
        "enable": True,
        "tool": "spans",
        "save_path": str(folder),
        "schedule": {"steps": []},
        "watch": watch,
    }
    if fault.loop == LOOP:
        plan = {**asdict(fault), "config": config, "begin": BEGIN}
        texts = run_on_ranks(plan, folder.with_suffix(".plan"))
        return verdict(fault, captured(folder), texts)
    fleet.set_up(config)
    profiling = ProfilingCallback(config)
    loop = Loop(fleet, profiling, fault.loop)
    with alarms() as said, profiling:
        for step in range(1, fault.steps + 1):
            if step == BEGIN:
                fleet.begin(fault)
            profiling.on_step_begin(step)
            loop.step(bool(fault.period) and step % fault.period == 0)
            profiling.on_step_end()
    return verdict(fault, captured(folder), said.texts)


def captured(folder: Path) -> list[Manifest]:
    """Return the manifests of a run."""
    return [read_manifest(path) for path in sorted(folder.glob("step_*"))]


def verdict(fault: Fault, manifests: list[Manifest], texts: list[str]) -> dict[str, Any]:
    """Return a row of the results."""
    noticeable = bool(fault.stage or fault.what)
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
        "said": texts,
    }
    made = [one for one in manifests if one.trigger.kind == "anomaly" and (one.trigger.noticed or 0) >= begin]
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
        found["miss"] = f"{trigger.reason}; suspects {trigger.suspects}, recorded {sorted(recorded)}"
    return found


def main() -> None:
    """Run all, print the table, and write the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--quiet-steps", type=int, default=1000, help="length of the runs without a fault")
    parser.add_argument(
        "--only", default="", help="only the faults with this in their name and loop; writes nothing"
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
                    f"{fault.name}, {fault.loop}, {fault.who} {fault.what} x{fault.by:g}: {shown}", flush=True
                )
    noises = ((0.05, 0.0), (0.05, 0.01), (0.15, 0.01))
    steps = 100 * given.quiet_steps
    found = {
        "measured": results.here(),
        "runs": runs,
        "simulated": [simulated(steps, spread, tail) for spread, tail in noises],
    }
    if not given.only:
        RESULTS.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    print(markdown(found))


if __name__ == "__main__":
    main()
