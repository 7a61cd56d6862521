"""What one of three ranks runs in the tests of the watch in SPMD."""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch.distributed as dist
from fleet import TrainWorker

from verl_profiling import ProfilingCallback, ProfilingConfig, stage
from verl_profiling.capture.protocol import StopReply
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader

RANK = int(os.environ["RANK"])
LATE = 2
TIMES_S = {
    "slow": (0.1, 0.7),
    "inside": (0.6, 0.7),
}  # so long that nothing else on the machine looks slow
USUAL_S, LATE_S = 0.02, 0.2
STEPS = {"slow": 300, "unlike": 16, "inside": 9}
LATE_FROM = {"slow": 15, "hangs": 8}  # the first step in which a rank is late
Meet = Callable[[bool], bool]


class EndsLate(TrainWorker):
    def stop_capture(self, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
        time.sleep(0.5 if RANK else 0.0)
        return super().stop_capture(capture_id, finish_s)


def meeting_in_a_collective() -> Meet:
    """Return what waits for all ranks, and returns what rank 0 says."""
    import torch

    def meet(said: bool) -> bool:
        flag = torch.tensor([float(said and RANK == 0)])
        dist.all_reduce(flag)
        return bool(flag)

    return meet


def meeting_through_files(folder: Path) -> Meet:
    numbers = itertools.count()

    def meet(said: bool) -> bool:
        number, deadline = next(numbers), time.monotonic() + 60
        (folder / f"met_{number}_{RANK}").touch()
        while not all((folder / f"met_{number}_{rank}").exists() for rank in range(3)):
            assert time.monotonic() < deadline, "a rank is gone"
            time.sleep(0.001)
        return False

    return meet


def wait_for_a_hang(run: Path) -> None:
    """Wait until the log of the watch has a hang."""
    deadline = time.monotonic() + 60
    while not any(line.hang for line in WatchLogReader(run).read()) and time.monotonic() < deadline:
        time.sleep(0.05)


def work(scenario: str, late: bool) -> None:
    time.sleep(TIMES_S.get(scenario, (USUAL_S, LATE_S))[late])


def update(profiling: ProfilingCallback, scenario: str, late: bool, meet: Meet) -> bool:
    """Run a step of one stage, at whose end the ranks meet."""
    with profiling.stage("update_actor"):
        if late and scenario == "hangs":
            wait_for_a_hang(Path(profiling.config.save_path))
        work(scenario, late)
        return meet(False)


def roll_out_and_update(
    profiling: ProfilingCallback, scenario: str, late: bool, meet: Meet
) -> bool:
    """Run a step whose rollout is late; return whether the late rank has been captured."""
    with profiling.stage("rollout"):
        work(scenario, late)
    with stage("update_actor"), stage("inside"):
        work(scenario, False)
        return meet(_is_captured(profiling.last_folder))


def train(config: ProfilingConfig, scenario: str, meet: Meet, said: Path) -> None:
    profiling = ProfilingCallback(config)
    worker = EndsLate() if scenario == "added inside" else TrainWorker()
    worker.init_capture(config, role="actor")
    if scenario != "added inside":
        profiling.add_workers("actor", worker)
    for training in range(2 if scenario == "twice" else 1):
        summaries: list[object] = []
        if profiling.watch is not None:
            profiling.watch.listeners.append(summaries.append)
        meet(False)
        with profiling:
            if scenario == "added inside":
                profiling.add_workers("actor", worker)
            for step in range(1, STEPS.get(scenario, 8) + 1):
                profiling.on_step_begin(step)
                late = RANK == LATE and step >= LATE_FROM.get(scenario, 1)
                run_step = update if scenario in ("inside", "hangs") else roll_out_and_update
                ends = run_step(profiling, scenario, late, meet)
                profiling.on_step_end()
                if ends:
                    break
        (said / f"summaries_{RANK}_{training}.json").write_bytes(msgspec.json.encode(summaries))
        if profiling.watch is not None:
            profiling.watch.listeners.clear()


def _is_captured(folder: Path | None) -> bool:
    """Return whether the rank that is late was the suspect of the last capture."""
    return folder is not None and read_manifest(folder).trigger.suspects == [f"actor_rank{LATE}"]


def main() -> None:
    path, scenario, given = sys.argv[1:]
    folder, own = Path(path), json.loads(given)
    settings = {
        "enable": True,
        "tool": "spans",
        "save_path": f"{folder}/run",
        "schedule": {"steps": []},
        "watch": {"enable": True, "every": 3},
        "timeouts": {"start_s": 20, "stop_s": 20, "finish_s": 20},
    }
    os.environ.update(own.get("environment", {}))
    config = ProfilingConfig.from_any({**settings, **own.get("all", {}), **own.get(str(RANK), {})})
    dist.init_process_group("gloo")
    meet = (
        meeting_in_a_collective()
        if scenario in ("slow", "inside", "hangs")
        else meeting_through_files(folder)
    )
    train(config, scenario, meet, folder)


if __name__ == "__main__":
    main()
