"""Holds what ``diff`` says of a missing speed-up against loops in which the reasons are planted.

Run: ``python benchmarks/scaling_judge.py [--steps N]``. A loop runs with some lanes, then with
twice as many: 1 and 2 ranks, which meet in a collective of gloo, and 2 and 4 replicas of an engine.
All work sleeps, as there are fewer cores than lanes. Planted are a fixed part of the loop, a serial
weight sync, a tail (one rank has more, one response is long), smaller batches, work that each lane
repeats, each alone, and all together.

Truth is by stopwatches in loop and lanes, as sleeps are longer on a busy machine. Explained is the
share of the planted parts' time that ``diff`` gives to them, each counted up to its truth.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean
from typing import Any

from verl_profiling import ProfilingCallback, stage
from verl_profiling.analysis import load_reports
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.report.diff import compare
from verl_profiling.workers import (
    CaptureMixin,
    RolloutCaptureMixin,
    WorkerProcesses,
    join_callback,
)

WORK_S = 0.48  # of a step, divided among the lanes
FIXED_S, SYNC_S, TAIL_S, REPEATED_S, EACH_S = 0.1, 0.05, 0.08, 0.06, 0.01
BATCH = 8  # samples of a micro-batch; a lane has fewer of them with more lanes
SAMPLES = 16
LENGTH = 100
PLANTS = ("nothing", "fixed part", "sync", "tail", "smaller batches", "does not scale", "all")
NAMES = {"ranks": "update_actor", "replicas": "rollout"}


def has(plant: str, what: str) -> bool:
    """Return whether something is planted."""
    return plant in (what, "all")


def work_s(plant: str, lanes: int, lane: int) -> float:
    """Return how long a lane works in a step."""
    seconds = WORK_S / lanes
    if has(plant, "tail") and lane == lanes - 1 and lanes > 1:
        seconds += TAIL_S
    if has(plant, "smaller batches"):
        seconds += EACH_S * (SAMPLES // BATCH)  # a cost for each micro-batch, whatever its size
    return seconds


def slept(name: str, plant: str, lanes: int, lane: int) -> float:
    """Sleep for the work of a stage; return how long that took (s)."""
    begun_s = time.perf_counter()
    alike = {"update_weights": SYNC_S, "old_log_prob": REPEATED_S}
    time.sleep(alike.get(name) or work_s(plant, lanes, lane))
    return time.perf_counter() - begun_s


def rank(settings: dict[str, Any], address: str, tasks: Connection, *where: Any) -> None:
    """Train in a process of its own."""
    import torch
    import torch.distributed as dist

    lane, lanes, plant, port = where
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=lane, world_size=lanes
    )
    worker = CaptureMixin()
    worker.init_capture(settings, role="actor", rank=lane, world_size=lanes)
    join_callback(worker, address, lane)
    while (name := tasks.recv()) is not None:
        shared = 1 if name == "old_log_prob" else lanes  # which each lane repeats
        lengths = [LENGTH] * (SAMPLES // shared)
        with stage(name).given(lengths=lengths, micro_batches=SAMPLES // BATCH):
            took_s = slept(name, plant, lanes, lane)
            if name == NAMES["ranks"]:
                dist.all_reduce(torch.ones(1))
        tasks.send(took_s)


def replica(settings: dict[str, Any], address: str, tasks: Connection, *where: Any) -> None:
    """Serve requests in a process of its own."""
    lane, lanes, plant, _ = where
    worker, log = RolloutCaptureMixin(), RequestLog()
    worker.init_capture(settings, replica=lane, requests=log)
    join_callback(worker, address, lane)
    while (name := tasks.recv()) is not None:
        many = SAMPLES // lanes if name == NAMES["replicas"] else 0
        requests = [log.open(prompt_tokens=1, id=f"{lane}.{i}") for i in range(many)]
        for request in requests:
            request.__enter__().response_tokens = LENGTH
        with stage(name):
            took_s = slept(name, plant, lanes, lane)
        for request in requests:
            request.__exit__(None, None, None)
        tasks.send(took_s)


def run_loop(kind: str, lanes: int, plant: str, steps: int, folder: Path) -> dict[str, float]:
    """Run a loop with some lanes, and capture each step but the first.

    Return the means over the captured steps of what stopwatches say, by part (s).
    """
    schedule = {"steps": list(range(2, steps + 2))}
    tool = "torch" if kind == "ranks" else "spans"
    settings = {"enable": True, "save_path": str(folder), "tool": tool, "schedule": schedule}
    group = WorkerProcesses(lanes)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    spawn, pipes = multiprocessing.get_context("spawn"), []
    body = rank if kind == "ranks" else replica
    for lane in range(lanes):
        pipe, tasks = spawn.Pipe()
        where = (settings, group.address, tasks, lane, lanes, plant, port)
        spawn.Process(target=body, args=where, daemon=True).start()
        pipes.append(pipe)
    with ProfilingCallback(settings) as profiling:
        if kind == "ranks":
            profiling.add_workers("actor", group)
        else:
            profiling.add_rollout(group)
        call_all(pipes, "update_weights")  # all have joined
        facts = []
        for step in range(1, steps + 2):
            profiling.on_step_begin(step)
            facts.append(run_step(profiling, pipes, kind, plant))
            profiling.on_step_end()
    for pipe in pipes:
        pipe.send(None)
    return {part: fmean(fact[part] for fact in facts[1:]) for part in facts[0]}


def run_step(
    profiling: ProfilingCallback, pipes: list[Connection], kind: str, plant: str
) -> dict[str, float]:
    """Run a step; return what stopwatches say of its parts (s)."""
    repeated_s, times_s, main = [0.0], [], NAMES[kind]
    with profiling.stage(main):
        own_s = call_all(pipes, main)
    if has(plant, "does not scale"):
        with profiling.stage("old_log_prob"):
            repeated_s = call_all(pipes, "old_log_prob")
    times_s.append(time.perf_counter())
    if has(plant, "fixed part"):
        with profiling.stage("advantage"):
            time.sleep(FIXED_S)
    times_s.append(time.perf_counter())
    if has(plant, "sync"):
        with profiling.stage("update_weights"):
            for pipe in pipes:
                call_all([pipe], "update_weights")
    times_s.append(time.perf_counter())
    return {
        f"tail of {main}": max(own_s) - fmean(own_s),
        f"smaller batches in {main}": fmean(own_s),
        "old_log_prob does not scale": fmean(repeated_s),
        "fixed part of advantage": times_s[1] - times_s[0],
        "sync of update_weights": times_s[2] - times_s[1],
    }


def call_all(pipes: list[Connection], name: str) -> list[float]:
    """Let processes run a stage at once, and wait for all; return how long each slept (s)."""
    for pipe in pipes:
        pipe.send(name)
    return [pipe.recv() for pipe in pipes]


def judged(kind: str, plant: str, lanes: int, steps: int) -> None:
    """Run both loops, and print the row of the table."""
    counts = (lanes // 2, lanes)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        both = [run_loop(kind, many, plant, steps, folder / str(many)) for many in counts]
        before, after = (load_reports(folder / str(many)) for many in counts)
    scaling = compare(before, after).scaling
    assert scaling is not None
    planted = [part for part in both[0] if has(plant, kind_of(part))]
    truth = {part: both[1][part] - both[0][part] / 2 for part in planted}
    found = sum(min(max(scaling.parts_s.get(part, 0.0), 0.0), s) for part, s in truth.items())
    whole = sum(truth.values())
    share = f"{found / whole:.0%}" if whole else "-"
    unexplained_s = list(scaling.parts_s.values())[-1]
    numbers = (f"{round(1e3 * s)} ms" for s in (whole, scaling.missing_s, unexplained_s))
    row = (f"{lanes // 2} and {lanes} {kind}", plant, *numbers, share)
    print("|", " | ".join(row), "|", flush=True)
    print(scaling.sentence, truth, scaling.parts_s, file=sys.stderr)


def kind_of(part: str) -> str:
    """Return the plant that makes a part longer."""
    return next(plant for plant in PLANTS if plant in part)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--only", choices=PLANTS)
    arguments = parser.parse_args()
    print("| lanes | planted | planted time | missing | unexplained | explained |", flush=True)
    print("|---|---|---|---|---|---|")
    for kind, lanes in (("ranks", 2), ("replicas", 4)):
        for plant in PLANTS:
            if arguments.only in (None, plant):
                judged(kind, plant, lanes, arguments.steps)


if __name__ == "__main__":
    main()
