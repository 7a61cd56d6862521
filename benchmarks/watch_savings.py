"""What the watch says a change would save, held against loops with that change.

Run: ``python benchmarks/watch_savings.py [--pairs 24]``; three minutes. A pair is two loops that
sleep, of processes' records without the processes: of A the watch predicts the step after a change,
from its watched steps alone; B has the change. Pairs are those of ``what_if_judge.py`` that change
stages, and others drawn from a seed. The table is in ``docs/watch-computation.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import results
from what_if_judge import LOOPS, PAIRS
from what_if_loop import SPREAD, Plan

from verl_profiling import ProfilingCallback
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.watch.process_sums import Begun, StageSums, WatchQuestion, WatchReading
from verl_profiling.watch.savings import times_in
from verl_profiling.watch.step_slices import StepSlices

WARM, STEPS = 2, 8
AT_ONCE = 8
"""Loops that run at once, which sleep most of the time."""


@dataclass(frozen=True)
class Pair:
    """Two loops that differ by one change.

    Attributes:
        before: Plan of A.
        after: Plan of B.
        scale: The factor of each changed stage.
        balance: The stages that are even over their workers.
    """

    before: Plan
    after: Plan
    scale: dict[str, float]
    balance: list[str]


class Records:
    """The records of a worker's stages, which the watch reads as those of a process."""

    def __init__(self, role: str, rank: int) -> None:
        self._identity = WorkerIdentity(role=role, rank=rank, replica=rank)
        number = 10**6 + 1_000 * len(role) + rank
        domain = self._identity.clock_domain
        self._process = ProcessId(host="none", clock_domain=domain, pid=number)
        self._sums = StageSums(1_000)

    def start_capture(self, request: Any) -> None:
        """Do nothing: no step is captured."""

    def work(self, name: str, seconds: float) -> None:
        """Be in a stage for some seconds, which vary."""
        begun = Begun(name, time.time_ns())
        self._sums.open[id(begun)] = begun
        time.sleep(seconds * random.lognormvariate(0, SPREAD))
        self._sums.end(begun, time.time_ns())

    def read_watch(self, question: WatchQuestion) -> WatchReading:
        """Return the stages of a process of its own."""
        reading = self._sums.read(self._identity, question)
        fields = {name: getattr(reading, name) for name in reading.__struct_fields__}
        return WatchReading(**{**fields, "process": self._process})


def judged() -> list[Pair]:
    """Return the pairs of the what-if judge that change stages of loops that sleep."""
    pairs = []
    for name in ("engines", "beside"):
        for pair in PAIRS[name]:
            before = Plan(**{**LOOPS[name].plan, **pair.before, "steps": STEPS})
            after = replace(before, **pair.after)
            scale = pair.change.get("scale", {})
            pairs.append(Pair(before, after, scale, pair.change.get("balance", [])))
    return pairs


def drawn(draw: random.Random) -> Pair:
    """Return a pair with drawn times and a drawn change."""
    plan = Plan(
        engines_s=tuple(draw.uniform(0.15, 0.6) for _ in range(draw.randint(1, 3))),
        ranks_s=tuple(draw.uniform(0.15, 0.6) for _ in range(draw.randint(1, 3))),
        reward_s=draw.uniform(0.05, 0.3),
        sync_s=draw.uniform(0.02, 0.1),
        beside=draw.random() < 0.4,
        steps=STEPS,
    )
    factor = draw.choice([0.25, 0.5, 0.75, 1.5, 2.0])
    stage = draw.choice(["rollout", "update_actor", "reward"])
    if stage == "reward":
        return Pair(plan, replace(plan, reward_s=factor * plan.reward_s), {stage: factor}, [])
    times = plan.engines_s if stage == "rollout" else plan.ranks_s
    is_even = not plan.beside and len(times) > 1 and draw.random() < 0.4
    if is_even:
        times = (statistics.fmean(times),) * len(times)
    else:
        times = tuple(factor * time for time in times)
    after = replace(plan, engines_s=times) if stage == "rollout" else replace(plan, ranks_s=times)
    return Pair(plan, after, {} if is_even else {stage: factor}, [stage] if is_even else [])


def loop(plan: Plan, folder: str) -> list[StepSummary]:
    """Run a loop; return the summaries of its steps."""
    watch = {"enable": True}
    profiling = ProfilingCallback(
        {"enable": True, "save_path": folder, "schedule": {"steps": []}, "watch": watch}
    )
    ranks = [Records("actor", rank) for rank in range(len(plan.ranks_s))]
    engines = [Records("rollout", replica) for replica in range(len(plan.engines_s))]
    profiling.add_workers("actor", ranks)
    profiling.add_workers("rollout", engines)
    summaries: list[StepSummary] = []
    assert profiling.watch is not None
    profiling.watch.listeners.append(summaries.append)
    pool, background = ThreadPoolExecutor(16), ThreadPoolExecutor(1)

    def work(workers: Sequence[Records], name: str, times: Sequence[float]) -> None:
        for done in [pool.submit(*each) for each in calls(workers, name, times)]:
            done.result()

    def generate() -> None:
        profiling.on_generation_begin()
        work(engines, "rollout", plan.engines_s)
        profiling.on_generation_end()

    with profiling:
        coming = background.submit(generate) if plan.beside else None
        for step in range(1, plan.steps + 1):
            profiling.on_step_begin(step)
            profiling.on_rollout_begin(in_background=plan.beside)
            if coming is not None:
                with profiling.stage("wait:rollout"):
                    coming.result()
                coming = background.submit(generate)
            else:
                work(engines, "rollout", plan.engines_s)
                profiling.on_rollout_end()
            with profiling.stage("reward"):
                time.sleep(plan.reward_s)
            with profiling.stage("update_actor"):
                work(ranks, "update_actor", plan.ranks_s)
            with profiling.stage("update_weights"):
                time.sleep(plan.sync_s)
            profiling.on_step_end()
        if coming is not None:
            coming.result()
    return summaries


def calls(workers: Sequence[Records], name: str, times: Sequence[float]) -> list[tuple[Any, ...]]:
    """Return the calls of a stage, one for each worker."""
    return [(one.work, name, seconds) for one, seconds in zip(workers, times, strict=True)]


def run(plan: Plan, scale: dict[str, float], balance: list[str]) -> None:
    """Run a loop; print its steps (s), and those that the watch predicts after a change."""
    logging.getLogger("verl_profiling").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        steps = loop(plan, folder)[WARM:]
    chains = [times_in(StepSlices([summary]))[0] for summary in steps]
    predicted = [
        summary.seconds - times.saved_ns(scale, balance) / 1e9
        for summary, times in zip(steps, chains, strict=True)
        if times is not None
    ]
    print(json.dumps({"steps": [one.seconds for one in steps], "predicted": predicted}))


def measured(pair: Pair) -> dict[str, Any]:
    """Run both loops of a pair."""
    outputs = []
    for plan in (pair.before, pair.after):
        given = json.dumps([asdict(plan), pair.scale, pair.balance])
        command = [sys.executable, __file__, "--one", given]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        outputs.append(json.loads(done.stdout.splitlines()[-1]))
    before, after = outputs
    return {
        "in_background": pair.before.beside,
        "change": {**pair.scale, **dict.fromkeys(pair.balance, "even")},
        "before_s": statistics.median(before["steps"]),
        "predicted_s": statistics.median(before["predicted"] or [0.0]),
        "after_s": statistics.median(after["steps"]),
        "spread_s": max(max(one["steps"]) - min(one["steps"]) for one in outputs),
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the errors by kind of loop."""
    lines = [
        "| generation | pairs | without a prediction | median error | 90% of errors "
        "| wrong direction |",
        "|---|---|---|---|---|---|",
    ]
    for kind, in_background in (("a stage of the loop", False), ("in the background", True)):
        of_kind = [one for one in rows if one["in_background"] is in_background]
        known = [one for one in of_kind if one["predicted_s"]]
        errors = sorted(abs(one["predicted_s"] / one["after_s"] - 1) for one in known)
        cells = (
            *(len(of_kind), len(of_kind) - len(known)),
            *(f"{statistics.median(errors):.1%}", f"{errors[int(0.9 * (len(errors) - 1))]:.1%}"),
            sum(map(is_wrong_way, known)),
        )
        lines.append(f"| {kind} | {' | '.join(map(str, cells))} |")
    return "\n".join([*lines, "", f"{results.where(results.here())}."])


def is_wrong_way(one: dict[str, Any]) -> bool:
    """Return whether a step changed against the prediction, by more than the spread of steps."""
    truth, predicted = one["after_s"] - one["before_s"], one["predicted_s"] - one["before_s"]
    return bool(abs(truth) > one["spread_s"] and truth * predicted <= 0)


def main() -> None:
    """Run all pairs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--pairs", type=int, default=24, help="number of drawn pairs")
    parser.add_argument("--seed", type=int, default=7, help="seed of the drawn pairs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        plan, scale, balance = json.loads(given.one)
        run(Plan(**plan), scale, balance)
        return
    draw = random.Random(given.seed)
    pairs = judged() + [drawn(draw) for _ in range(given.pairs)]
    rows = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for row in pool.map(measured, pairs):
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    print(markdown(rows))


if __name__ == "__main__":
    main()
