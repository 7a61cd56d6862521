"""What one rank runs in the tests of SPMD: ``spmd_program.py SAVE_PATH SCENARIO``,
started once per rank.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fleet import TrainWorker

from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.testing import shifted_clock

RANK = int(os.environ["RANK"])
LAST = int(os.environ["WORLD_SIZE"]) - 1


def work(scenario: str, step: int, folder: Path) -> None:
    with stage("update_actor"):
        time.sleep(0.01)
    if RANK == LAST and step == 2 and scenario == "exits":
        sys.exit(3)
    if RANK == 1 and step == 2:
        if scenario == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if scenario == "late":
            wait_for(folder / "step_000002" / "manifest.json", '"state": "written"')
        if scenario == "raises":
            raise ValueError("out of memory")


def wait_for(path: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not (path.exists() and text in path.read_text()) and time.monotonic() < deadline:
        time.sleep(0.01)


def with_worker(profiling: Any) -> Any:
    worker = TrainWorker()
    worker.init_capture(profiling.config, role="actor")
    profiling.add_workers("actor", worker)
    return profiling


def loop(config: ProfilingConfig, scenario: str) -> None:
    profiling = with_worker(ProfilingCallback(config))
    with profiling:
        for step in (1, 2, 3, 4):
            profiling.on_step_begin(step)
            with profiling.stage("reward"):
                time.sleep(0.001)
            work(scenario, step, Path(config.save_path))
            profiling.on_step_end({"reward": RANK})
            if scenario == "clock":  # as in a collective
                dist.barrier()


def asked_loop(config: ProfilingConfig) -> None:
    """Run until rank 0 finds a file ``stop``; the ranks meet in every step, as in a collective."""
    folder = Path(config.save_path).parent
    profiling = with_worker(ProfilingCallback(config))
    with profiling:
        for step in itertools.count(1):
            profiling.on_step_begin(step)
            with stage("update_actor"):
                time.sleep(0.05)
            if RANK == 0 and (folder / "stop").exists():
                (folder / f"last_{step}").touch()
            (folder / f"met_{step}_{RANK}").touch()
            while not (folder / f"met_{step}_{1 - RANK}").exists():
                time.sleep(0.001)
            profiling.on_step_end()
            if (folder / f"last_{step}").exists():
                break


def main() -> None:
    save_path, scenario, *given = sys.argv[1:]
    settings = {
        "enable": True,
        "tool": "spans",
        "save_path": save_path,
        "schedule": {"steps": [2, 3]},
        "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
    }
    config = ProfilingConfig.from_any({**settings, **json.loads(given[0] if given else "{}")})
    clock = shifted_clock(5_000_000_000, "elsewhere") if RANK and scenario == "clock" else None
    with clock or contextlib.nullcontext():
        if "MASTER_ADDR" in os.environ and scenario != "environment":
            dist.init_process_group("gloo")
        if scenario == "no callback" and RANK == 1:
            return
        if scenario.startswith("asked"):
            asked_loop(config)
        else:
            with contextlib.suppress(ValueError):
                loop(config, scenario)


if __name__ == "__main__":
    main()
