"""Six runs as their watch leaves them, drawn from a seed: healthy, one slow rank, a slow reward
service, a growing weight sync, a hang that ended, and a fault that was noticed but not captured.

usage: python -m tests.six_runs FOLDER [SEED]
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import msgspec
from drawn_steps import whole_step
from quiet_steps import MS, RANKS, USUAL, summary, with_stages
from step_folders import rewrite

from verl_profiling.cli import main as cli
from verl_profiling.clock import now_ns
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.judgement import judge
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.files.step_summary import Hang, RankUse, StepSummary
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.collectives import RecorderReading
from verl_profiling.watch.log_writer import WatchLog

STEPS = 60
RUNS = ("healthy", "slow rank", "slow reward", "growing sync", "ended hang", "not captured")


class Drawn(msgspec.Struct):
    """What was drawn of a run: where its fault is, from which step on, and how large."""

    kind: str
    rank: int
    step: int
    size: float
    steps: list[StepSummary] = []


def drawn(kind: str, seed: int) -> Drawn:
    """Draw a run, and its steps as the watch judges them."""
    noise = random.Random(f"{seed} {kind}")
    run = Drawn(kind, noise.randrange(RANKS), noise.randrange(25, 40), noise.uniform(1.8, 3.0))
    begin_ns = now_ns() - STEPS * 2_000 * MS
    for step in range(1, STEPS + 1):
        run.steps.append(_step(run, step, noise, begin_ns))
        begin_ns = run.steps[-1].end_ns
    return run


def _step(run: Drawn, step: int, noise: random.Random, begin_ns: int) -> StepSummary:
    times = {stage: ms * noise.lognormvariate(0, 0.03) for stage, ms in USUAL.items()}
    times |= {stage: 4 * ms for stage, ms in times.items() if step == 1}  # it warms up
    slow = {}
    is_faulty = step >= run.step
    if run.kind in ("slow rank", "not captured") and is_faulty:
        slow = {f"actor_rank{run.rank}": run.size}
    if run.kind == "slow reward" and is_faulty:
        times["reward"] *= 4 * run.size
    if run.kind == "growing sync":
        times["update_weights"] *= 1 + run.size * max(0, step - 10) / 20
    if run.kind == "ended hang" and step == run.step:
        times["rollout"] += 30_000 * run.size
    made = summary(step, times, slow=slow, noise=noise)
    shift_ns = begin_ns - made.begin_ns
    for use in (*made.loop, *made.workers):
        runs: dict[str, list[tuple[int, int]]] = {name: [] for name, *_ in use.each_run()}
        for name, begin, end, _ in use.each_run():
            runs[name].append((begin + shift_ns, end + shift_ns))
        group = made.loop if use in made.loop else made.workers
        group[group.index(use)] = msgspec.structs.replace(
            with_stages(use, runs), peak_bytes=6 << 30
        )
    made.begin_ns += shift_ns
    made.end_ns += shift_ns
    scored = [(begin, end) for name, begin, end, _ in made.loop[0].each_run() if name == "reward"]
    made.workers.append(
        with_stages(RankUse(lane="reward_rank0", role="reward"), {"reward": scored})
    )
    judge([made], has_workers=True)
    made.samples, made.tokens = 256, noise.randrange(90_000, 110_000)
    if run.kind == "ended hang" and step == run.step:
        lane = f"rollout{run.rank}_rank0"
        made.hang = Hang("rollout", 30.4, 0.5, lane, "is in generate with 3 requests, none ends")
    return made


def write(run: Drawn, folder: Path) -> None:
    """Write a run as its job leaves it, with a capture if the watch got one."""
    limit = 0 if run.kind == "not captured" else 3
    anomalies = Anomalies(Anomaly(max_captures=limit), lambda selection: None, RecorderReading())
    folder.mkdir(parents=True)
    settings = {"watch": {"enable": True, "trigger": {"slow_stage": 1.3, "window": 20}}}
    info = RunInfo(
        run_id="run",
        begin_ns=run.steps[0].begin_ns,
        process=ProcessId.current(),
        config=settings,
        versions={},
    )
    write_json_atomically(folder / RUN_NAME, info)
    log = WatchLog(folder)
    for made in run.steps:
        decision = anomalies.asks(made.step, scheduled=False)
        if decision is not None and run.kind == "slow rank":
            made.captured = f"step_{made.step:06d}"
            whole_step(
                folder / made.captured,
                ranks=RANKS,
                replicas=2,
                fault="slow rank",
                slow_rank=run.rank,
            )
            rewrite(folder / made.captured, step=made.step, trigger=decision.trigger)
        anomalies.listen(made)
        log(made)
        anomalies.step_begins(made.step + 1)


def main(folder: Path, seed: int) -> None:
    """Write the six runs with their pages."""
    for kind in RUNS:
        run = drawn(kind, seed)
        place = folder / kind.replace(" ", "_")
        write(run, place)
        cli(["report", str(place), "--save"])
        print(f"{kind}: rank {run.rank}, step {run.step}, size {run.size:.2f}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or ["7"])[0]))
