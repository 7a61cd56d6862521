"""Whom the watch names as the holder of memory that grows, in a loop of Ray actors.

Run: ``make memory-judge``. Two training ranks, one of them with a ``DataLoader``, run steps of a
second; from one step on, memory leaks in one place. The loop also runs quiet steps. Of the package,
only ``watch.jsonl`` is read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np
import results

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import CaptureMixin

LEAK, SINCE, STEPS, WITHIN, STEP_S = 24 << 20, 6, 30, 20, 1.0
QUIET, QUIET_S, TRIES = 250, 0.1, 6
# By name: the description, and what the sentence on the right holder has.
KINDS = {
    "worker": ("a list in a worker", "memory of actor_rank1"),
    "loop": ("a list in the loop", "memory of controller"),
    "shared": ("shared memory that a worker maps", "shared memory of actor_rank1"),
    "segments": ("segments in /dev/shm that nobody maps", "shared memory and tmpfs of "),
    "store": ("objects in Ray's store", "Ray's object store on "),
    "dataloader": ("the workers of a DataLoader", "child processes of actor_rank0"),
    "cache": ("none; files are written, so the page cache grows", ""),
    "quiet": ("none", ""),
}


class Items:
    """A data set whose workers keep memory while a leak is on."""

    def __init__(self, folder: str) -> None:
        self.leak, self.kept = Path(folder, "leak"), [np.ones(1)]

    def __len__(self) -> int:
        return 1 << 40

    def __getitem__(self, index: int) -> int:
        if self.leak.exists():
            self.kept.append(np.ones(LEAK // 16))  # of 8 bytes; two of each batch of four are ours
        return index


class Trainer(CaptureMixin):
    def __init__(self, config: dict[str, Any], folder: str, rank: int) -> None:
        import torch

        self.init_capture(config, role="actor", rank=rank, world_size=2)
        self.folder, self.kept = Path(folder), list[Any]()
        load = torch.utils.data.DataLoader
        items: Any = Items(folder)
        many = {"batch_size": 2, "num_workers": 2, "prefetch_factor": 1}
        self.batches = iter(load(items, **many)) if rank == 0 else iter([])

    def update(self, kind: str, seconds: float) -> None:
        with stage("update_actor"):
            time.sleep(seconds)
            np.ones(1 << 20).sum()
            next(self.batches, None)
            if kind == "worker":
                self.kept.append(np.ones(LEAK // 8))
            elif kind in ("shared", "segments"):
                self.kept.append(shared_memory.SharedMemory(create=True, size=LEAK))
                self.kept[-1].buf[:] = bytes(LEAK)
                if kind == "segments":
                    self.kept.pop().close()
            elif kind in ("cache", "quiet"):
                with (self.folder / "rollouts.bin").open("ab") as file:
                    file.write(bytes(LEAK if kind == "cache" else 1))

    def clean(self) -> None:
        for path in Path("/dev/shm").glob("psm_*"):
            if path.stat().st_uid == os.getuid() and path.stat().st_size == LEAK:
                path.unlink()


def loop(folder: str, kind: str) -> None:
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    config = {
        "enable": True,
        "save_path": f"{folder}/run",
        "tool": "spans",
        "schedule": {"steps": []},
        "watch": {"enable": True, "hang_s": 2.0, "trigger": {"max_captures": 0}},
    }
    made = ray.remote(num_cpus=0)(Trainer)
    actors = [made.remote(config, folder, rank) for rank in range(2)]
    kept: list[Any] = []
    is_quiet = kind == "quiet"
    with ProfilingCallback(config) as cb:
        cb.add_workers("actor", actors)
        for step in range(1, (QUIET if is_quiet else STEPS) + 1):
            leaks = kind if step >= SINCE else ""
            if leaks == "dataloader":
                Path(folder, "leak").touch()
            cb.on_step_begin(step)
            with cb.stage("update_actor"):
                seconds = QUIET_S if is_quiet else STEP_S
                ray.get(
                    [actors[0].update.remote("", seconds), actors[1].update.remote(leaks, seconds)]
                )
            batch = ray.put(np.ones(1 << 20))
            kept = [*kept, ray.put(np.ones(LEAK // 8))] if leaks == "store" else [batch]
            if leaks == "loop":
                held.append(np.ones(LEAK // 8))
            cb.on_step_end()
    ray.get(actors[1].clean.remote())


held: list[Any] = []


def verdicts(folder: Path) -> Iterator[tuple[int, str]]:
    """Yield the steps in which memory was noticed, with the holder."""
    for line in (folder / "run" / "watch.jsonl").read_text().splitlines():
        found = json.loads(line)
        if found.get("noticed", {}).get("sign") == "memory":
            yield found["step"], found["noticed"]["reason"].partition(": ")[2]


def judge(kind: str) -> dict[str, Any]:
    """Run one loop, and return what the watch said of it."""
    with tempfile.TemporaryDirectory(prefix="memory-", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, __file__, "loop", folder, kind]
        for _ in range(TRIES):  # on a busy machine, Ray may not start in its 30 s
            with Path(folder, "log.txt").open("w") as log:
                code = subprocess.run(command, stdout=log, stderr=log).returncode
            if not code:
                break
        if code:
            raise RuntimeError(Path(folder, "log.txt").read_text()[-2000:])
        said = [*verdicts(Path(folder))]
        steps = len((Path(folder) / "run" / "watch.jsonl").read_text().splitlines())
    step, holder = (said or [(0, "")])[0]
    is_in_time = 0 < step < SINCE + WITHIN
    right = KINDS[kind][1]
    is_right = is_in_time and right in holder if right else not said
    return {"kind": kind, "step": step, "holder": holder, "right": is_right, "steps": steps}


def markdown(found: dict[str, Any]) -> str:
    """Return the table, and what it comes to."""
    table = [
        "| leak | runs | right holder | steps after the leak's first | said |",
        "|---|---|---|---|---|",
    ]
    rows = found["rows"]
    for kind in KINDS:
        of = [row for row in rows if row["kind"] == kind]
        after = [str(row["step"] - SINCE) for row in of if row["step"]]
        said = next((row["holder"] for row in of if row["holder"]), "").partition(" has grown")[0]
        cells = [KINDS[kind][0], str(len(of)), f"{sum(row['right'] for row in of)} of {len(of)}"]
        table.append(f"| {' | '.join([*cells, ', '.join(after), said])} |")
    leaks = [row for row in rows if KINDS[row["kind"]][1]]
    quiet = [row for row in rows if not KINDS[row["kind"]][1]]
    table += [
        "",
        f"{len(leaks)} leaks of {LEAK >> 20} MiB a step: the right holder within {WITHIN} steps in "
        f"{sum(row['right'] for row in leaks)}. {sum(row['steps'] for row in quiet):,} quiet "
        f"steps, with {sum(not row['right'] for row in quiet)} alarms.",
    ]
    if "measured" in found:
        table += ["", f"{results.where(found['measured'])}."]
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--rounds", type=int, default=2, help="runs of each kind (default: 2)")
    parser.add_argument("--kind", choices=KINDS, help="only this one; keeps no results")
    given = parser.parse_args()
    found: dict[str, Any] = {"rows": []}
    for _ in range(given.rounds):
        for kind in [given.kind] if given.kind else [*KINDS, "quiet"]:
            found["rows"].append(judge(kind))
            print(found["rows"][-1], file=sys.stderr, flush=True)
    if not given.kind:
        found["measured"] = results.here()
        results.write(Path(__file__).with_suffix(".json"), found)
    print(markdown(found))


if __name__ == "__main__":
    loop(*sys.argv[2:]) if sys.argv[1:2] == ["loop"] else main()
