"""What the verl plugin costs a step that is not profiled: verl's own timers with and without it.

Run with real verl (``make env-verl``): ``.venv-verl/bin/python benchmarks/bench_verl.py``. The
shares are of a step of ``recipes/verl_grpo_cpu``, which is as short as steps get.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from verl_profiling import ProfilingConfig, stage
from verl_profiling.integrations.verl import hook_problems
from verl_profiling.integrations.verl_trainer import TrainerProfiler

ROUNDS, STEPS = 9, 300
STEP_S = 2.5
TIMERS = ("gen", "old_log_prob", "ref", "adv", "update_actor", "update_weights")
WORKER_STAGES = ("old_log_prob", "ref_log_prob", "update_actor", "update_weights")
BATCHES = 2 + 12  # mini-batches and micro-batches


def controller_step(timer: Callable[..., Any]) -> None:
    """Go through the timers of a step."""
    timing: dict[str, float] = {}
    with timer("step", timing):
        for name in TIMERS:
            with timer(name, timing):
                pass


def worker_step() -> None:
    """Go through the stages of a step in a worker; nothing records."""
    for name in WORKER_STAGES:
        with stage(name):
            pass
    for _ in range(BATCHES):
        with stage("micro_batch"):
            pass


def us_per_step(step: Callable[[], None]) -> float:
    """Return the time of a step in microseconds."""
    begin = time.perf_counter_ns()
    for _ in range(STEPS):
        step()
    return (time.perf_counter_ns() - begin) / STEPS / 1000


def main() -> None:
    """Print what each costs: medians of interleaved rounds, and their spread."""
    from verl.utils.profiler import marked_timer  # after the plugin, which waits for it

    if problems := hook_problems():
        raise SystemExit(f"the plugin does not fit this verl: {problems}")
    plain = marked_timer.__wrapped__
    settings = ProfilingConfig(
        enable=True,
        tool="spans",
        schedule={"steps": [0]},
        select={"roles": ["actor"]},
        save_path=tempfile.mkdtemp(),
    )
    profiler = TrainerProfiler(SimpleNamespace(global_steps=1), settings)
    times: dict[str, list[float]] = {"verl alone": [], "plugin, unused": [], "plugin, unprofiled step": []}
    worker: list[float] = []
    for _ in range(ROUNDS):
        times["verl alone"].append(us_per_step(lambda: controller_step(plain)))
        times["plugin, unused"].append(us_per_step(lambda: controller_step(marked_timer)))
        with profiler:
            times["plugin, unprofiled step"].append(us_per_step(lambda: controller_step(marked_timer)))
        worker.append(us_per_step(worker_step))
    alone = statistics.median(times["verl alone"])
    print(f"the controller's timers of one step, {ROUNDS} rounds of {STEPS} steps")
    for name, values in times.items():
        median, spread = statistics.median(values), f"({min(values):.1f} to {max(values):.1f})"
        print(f"  {name:24} {median:7.1f} us  {spread}, {median - alone:+.1f} us")
    in_worker = statistics.median(worker)
    added = statistics.median(times["plugin, unprofiled step"]) - alone + in_worker
    share = added / STEP_S / 1e4
    print(f"stages of a worker that does not record: {in_worker:.1f} us a step")
    print(
        f"added to an unprofiled step, all processes: {added:.0f} us, {share:.4f}% of {STEP_S} s (goal: 0.1%)"
    )


if __name__ == "__main__":
    main()
