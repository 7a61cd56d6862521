"""What the watch says a change would save, held against loops with that change.

Run: ``python benchmarks/watch_savings.py [--pairs 24]``; six minutes. Loops of Ray actors that
sleep, synchronous and with generation in the background. No step is captured. A pair is two runs:
of A the watch predicts the step after a change, from its watched steps alone; B is run with the
change. Changes, times and numbers of processes are drawn from a seed. The table is in
``docs/watch-computation.md``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import results
from what_if_loop import Engine, Plan, Trainer, work

from verl_profiling import AsyncProfilingCallback
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.watch.savings import times_in
from verl_profiling.watch.step_slices import StepSlices

WARM, STEPS = 2, 8


@dataclass(frozen=True)
class Pair:
    """Two runs that differ by one change.

    Attributes:
        before: Plan of A.
        after: Plan of B.
        scale: The factor of each changed stage.
        balance: The stages that are balanced.
    """

    before: Plan
    after: Plan
    scale: dict[str, float]
    balance: list[str]


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


async def loop(plan: Plan, folder: str, found: list[StepSummary]) -> None:
    """Run a loop, and keep the summaries of its steps."""
    config = {
        "enable": True,
        "save_path": folder,
        "schedule": {"steps": []},
        "watch": {"enable": True},
    }
    ranks = [
        ray.remote(num_cpus=0)(Trainer).remote(plan, config, rank)
        for rank in range(len(plan.ranks_s))
    ]
    engines = [
        ray.remote(num_cpus=0)(Engine).remote(plan, config, replica)
        for replica in range(len(plan.engines_s))
    ]
    ray.get([rank.ready.remote() for rank in ranks] + [engine.load.remote() for engine in engines])

    async with AsyncProfilingCallback(config) as profiling:

        async def generation() -> None:
            profiling.on_generation_begin()
            await asyncio.gather(*(engine.roll_out.remote() for engine in engines))
            profiling.on_generation_end()

        profiling.add_workers("actor", ranks)
        profiling.add_rollout(engines)
        assert profiling.watch is not None
        profiling.watch.listeners.append(found.append)
        coming = asyncio.ensure_future(generation()) if plan.beside else None
        for step in range(1, plan.steps + 1):
            await profiling.on_step_begin(step)
            await profiling.on_rollout_begin(in_background=plan.beside)
            if coming is not None:
                with profiling.stage("wait:rollout"):
                    await coming
                coming = asyncio.ensure_future(generation())
                await asyncio.sleep(0)
            else:
                await asyncio.gather(*(engine.roll_out.remote() for engine in engines))
                await profiling.on_rollout_end()
            with profiling.stage("reward"):
                await asyncio.to_thread(work, plan.reward_s)
            with profiling.stage("update_actor"):
                await asyncio.gather(*(rank.update.remote() for rank in ranks))
            await profiling.on_step_end()
        if coming is not None:
            await coming


def run(plan: Plan, scale: dict[str, float], balance: list[str]) -> None:
    """Run a loop; print its steps (s), and those that the watch predicts after a change."""
    found: list[StepSummary] = []
    logging.getLogger("verl_profiling").setLevel(logging.ERROR)
    ray.init(log_to_driver=False, logging_level="ERROR")
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(loop(plan, folder, found))
    steps = found[WARM:]
    predicted = [
        summary.seconds - times.saved_ns(scale, balance) / 1e9
        for summary in steps
        for times in times_in(StepSlices([summary]))
        if times is not None
    ]
    helps = [f"{one.helps.stage} {one.helps.change}" for one in steps if one.helps is not None]
    print(json.dumps({"steps": [one.seconds for one in steps], "predicted": predicted}), helps[:1])


def measured(pair: Pair) -> dict[str, Any]:
    """Run both loops of a pair."""
    outputs = []
    for plan in (pair.before, pair.after):
        given = json.dumps([asdict(plan), pair.scale, pair.balance])
        done = subprocess.run(
            [sys.executable, __file__, "--one", given], capture_output=True, text=True, check=True
        )
        outputs.append(json.JSONDecoder().raw_decode(done.stdout[done.stdout.index("{") :])[0])
    before, after = outputs
    spread = max(max(one["steps"]) - min(one["steps"]) for one in outputs)
    return {
        "beside": pair.before.beside,
        "change": pair.scale or pair.balance,
        "before_s": statistics.median(before["steps"]),
        "predicted_s": statistics.median(before["predicted"]) if before["predicted"] else None,
        "after_s": statistics.median(after["steps"]),
        "spread_s": spread,
    }


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the errors by kind of loop."""
    lines = [
        "| loop | pairs | predicted | median error | 90% of errors | wrong direction |",
        "|---|---|---|---|---|---|",
    ]
    for kind, beside in (("synchronous", False), ("generation in the background", True)):
        of_kind = [one for one in rows if one["beside"] is beside]
        known = [one for one in of_kind if one["predicted_s"] is not None]
        errors = sorted(abs(one["predicted_s"] / one["after_s"] - 1) for one in known)
        wrong = sum(_is_wrong_way(one) for one in known)
        if errors:
            cells = f"{statistics.median(errors):.1%} | {errors[int(0.9 * (len(errors) - 1))]:.1%}"
            lines.append(f"| {kind} | {len(of_kind)} | {len(known)} | {cells} | {wrong} |")
    return "\n".join([*lines, "", f"{results.where(results.here())}."])


def _is_wrong_way(one: dict[str, Any]) -> bool:
    """Return whether a step changed against the prediction, by more than the spread of steps."""
    truth, predicted = one["after_s"] - one["before_s"], one["predicted_s"] - one["before_s"]
    return bool(abs(truth) > one["spread_s"] and truth * predicted <= 0)


def main() -> None:
    """Run all pairs, and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--pairs", type=int, default=24, help="number of pairs")
    parser.add_argument("--seed", type=int, default=7, help="seed of the pairs")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        plan, scale, balance = json.loads(given.one)
        run(Plan(**plan), scale, balance)
        return
    ray.init("local", num_cpus=4, include_dashboard=False, logging_level="ERROR")
    os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
    draw = random.Random(given.seed)
    pairs = [drawn(draw) for _ in range(given.pairs)]
    with ThreadPoolExecutor(3) as pool:  # a sleeping loop leaves room for others
        rows = []
        for one in pool.map(measured, pairs):
            rows.append(one)
            print(one, file=sys.stderr, flush=True)
    print(markdown(rows))


if __name__ == "__main__":
    main()
