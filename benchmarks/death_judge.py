"""Whom ``verl-profiling check`` names as the first to die, in loops that are ended in many ways.

Run: ``make death-judge``. Loops of Ray actors (``ray``), of one program on every rank under
torchrun (``ranks``) and of plain processes (``plain``) run some steps, then one death is planted.
Of the package, only the output of ``check`` is read.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import results

from verl_profiling import ProfilingCallback, stage
from verl_profiling.workers import (
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
    WorkerProcesses,
    join_callback,
)

DEATH, STEP_S, LIMIT, TRIES = 8, 0.5, 3 << 30, 6
CGROUP = Path("/sys/fs/cgroup/memory")
# By loop and death: what it is, who goes first, and its class.
KINDS = {
    "ray raise": ("a rank raises in a stage", "actor_rank1", "exception"),
    "ray unmarked": ("a rank raises in no stage", "actor_rank1", "exception"),
    "ray kill": ("a rank is killed", "actor_rank1", "signal"),
    "ray engine": ("an engine is killed", "rollout1_rank0", "engine gone"),
    "ray memory": ("a rank fills the container's memory", "actor_rank1", "killed for memory"),
    "ray loop": ("the loop is killed", "controller", "signal"),
    "ranks raise": ("a rank raises in a stage", "actor_rank1", "exception"),
    "ranks kill": ("a rank is killed", "actor_rank1", "signal"),
    "ranks late": ("a rank does not enter a collective", "actor_rank1", "collective"),
    "ranks disk": ("no space for a checkpoint", "actor_rank0", "disk full"),
    "plain raise": ("a worker raises in no stage", "actor_rank1", "exception"),
    "plain kill": ("a worker is killed", "actor_rank1", "signal"),
    "ranks all": ("all ranks are killed at once", "", "not known"),
}


def config(folder: str) -> dict[str, Any]:
    watch = {"enable": True, "hang_s": 1.0, "first_hang_s": 60.0}
    return {
        "enable": True,
        "save_path": f"{folder}/run",
        "tool": "spans",
        "schedule": {"steps": []},
        "watch": watch,
    }


def die(how: str) -> None:
    """Carry out a planted death in this process."""
    if how == "raise":
        try:
            dict[str, int]()["reward"]
        except KeyError as error:
            raise ValueError("the batch has no reward") from error
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "disk":
        with open("/dev/full", "wb", buffering=0) as file:  # noqa: PTH123
            file.write(b"weights")
    if how == "memory":
        kept = []
        while True:
            kept.append(b"1" * (64 << 20))
            time.sleep(0.05)
    if how == "late":
        time.sleep(60)


class Trainer(CaptureMixin):
    def __init__(self, folder: str, rank: int) -> None:
        self.init_capture(config(folder), role="actor", rank=rank, world_size=2)

    def update(self, how: str) -> None:
        with stage("update_actor"):
            time.sleep(STEP_S)
            if how != "unmarked":
                die(how)
        if how == "unmarked":
            die("raise")


class Engine(RolloutCaptureMixin):
    def __init__(self, folder: str, replica: int) -> None:
        self.init_capture(config(folder), replica=replica, requests=RequestLog())

    async def generate(self, how: str) -> None:
        with stage("generate"):
            time.sleep(STEP_S)
            die(how)


def ray_loop(folder: str, how: str) -> None:
    import ray

    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    actors = [ray.remote(num_cpus=0)(Trainer).remote(folder, rank) for rank in range(2)]
    engines = [ray.remote(num_cpus=0)(Engine).remote(folder, number) for number in range(2)]
    with ProfilingCallback(config(folder)) as cb:
        cb.add_workers("actor", actors)
        cb.add_rollout(engines)
        for step in range(1, 2 * DEATH):
            now = how if step == DEATH else ""
            cb.on_step_begin(step)
            cb.on_rollout_begin()
            ways = ["", "kill" if now == "engine" else ""]
            ray.get([one.generate.remote(way) for one, way in zip(engines, ways, strict=True)])
            cb.on_rollout_end()
            if now == "loop":
                die("kill")
            way = "" if now == "engine" else now
            with cb.stage("update_actor"):
                ray.get([actors[0].update.remote(""), actors[1].update.remote(way)])
            cb.on_step_end()


def rank_loop(folder: str, how: str) -> None:
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=6))
    rank, gradient = dist.get_rank(), torch.ones(1000)
    actor = Trainer(folder, rank)
    with ProfilingCallback(config(folder)) as cb:
        cb.add_workers("actor", [actor])
        for step in range(1, 2 * DEATH):
            now = how if step == DEATH else ""
            cb.on_step_begin(step)
            if now == "all":
                Path(folder, f"pid{rank}").write_text(str(os.getpid()))
            is_dying = rank == (0 if now == "disk" else 1)
            if now == "disk" and is_dying:
                with cb.stage("save_checkpoint"):
                    die(now)
            actor.update(now if is_dying and now not in ("all", "disk") else "")
            with cb.stage("all_reduce"):
                dist.all_reduce(gradient)
            if now == "all":
                time.sleep(60)
            cb.on_step_end()


def plain_worker(folder: str, address: str, rank: int, tasks: Any) -> None:
    worker = Trainer(folder, rank)
    join_callback(worker, address, rank)
    while True:
        tasks.send(True)
        worker.update(tasks.recv())


def plain_loop(folder: str, how: str) -> None:
    spawn = multiprocessing.get_context("spawn")
    group, pipes = WorkerProcesses(2), []
    with ProfilingCallback(config(folder)) as cb:
        cb.add_workers("actor", group)
        for rank in range(2):
            mine, theirs = spawn.Pipe()
            arguments = (folder, group.address, rank, theirs)
            spawn.Process(target=plain_worker, args=arguments, daemon=True).start()
            theirs.close()
            pipes.append(mine)
        for pipe in pipes:
            pipe.recv()  # it has joined
        for step in range(1, 2 * DEATH):
            now = how if step == DEATH else ""
            cb.on_step_begin(step)
            with cb.stage("update_actor"):
                pipes[0].send("")
                pipes[1].send("unmarked" if now == "raise" else now)
                for pipe in pipes:
                    pipe.recv()
            cb.on_step_end()


def kill_all(folder: Path, process: subprocess.Popen[bytes]) -> None:
    """End all ranks and their launcher, as a scheduler does."""
    files = [folder / f"pid{rank}" for rank in range(2)]
    while not all(file.exists() for file in files) and process.poll() is None:
        time.sleep(0.1)
    time.sleep(2)
    process.kill()
    for file in files:
        os.kill(int(file.read_text()), signal.SIGKILL)


def in_container(pid: int) -> None:
    """Move a process into a cgroup with a limit on memory."""
    group = CGROUP / f"verl_profiling_{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(str(LIMIT))
    (group / "cgroup.procs").write_text(str(pid))


def judge(kind: str) -> dict[str, Any]:
    """Run one loop until it is dead, and return what ``check`` says of it.

    On a busy machine, Ray may not start in its 30 s; then the loop is run again.
    """
    found: dict[str, Any] = {"said": ""}
    for _ in range(TRIES):
        found = run_once(kind)
        if found["said"]:
            break
    return found


def run_once(kind: str) -> dict[str, Any]:
    loop, how = kind.split()
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*(launcher if loop == "ranks" else [sys.executable]), __file__, loop]
    with tempfile.TemporaryDirectory(prefix="death-", ignore_cleanup_errors=True) as folder:
        with Path(folder, "log.txt").open("w") as log:
            process = subprocess.Popen([*command, folder, how], stdout=log, stderr=log)
            if how == "memory":
                in_container(process.pid)
            if how == "all":
                kill_all(Path(folder), process)
            process.wait(240)
        time.sleep(2)  # Ray ends its processes meanwhile
        check = [sys.executable, "-m", "verl_profiling.cli", "check", "--json", f"{folder}/run"]
        output = subprocess.run(check, capture_output=True, text=True).stdout
        entries = json.loads(output or '{"artifacts": []}')["artifacts"]
        said = "".join(entry["reason"] for entry in entries if entry["path"] == "processes")
        if not said:
            print(Path(folder, "log.txt").read_text()[-2000:], output, file=sys.stderr)
        said = said.replace(folder, "").replace(f"{Path(__file__).parent}/", "")
    _, who, what = KINDS[kind]
    begins = f"{who} went first" if who else "who went first is not known"
    is_right = said.startswith(begins) and (f": {what}: " in said or not who)
    # of a process that wrote nothing, the step is that of its last reading, with its age
    is_right = is_right and (f"step {DEATH}" in said or "last seen" in said or not who)
    return {"kind": kind, "right": is_right, "unknown": "not known" in said, "said": said}


def markdown(found: dict[str, Any]) -> str:
    """Return the table, and what it comes to."""
    table = ["| death | loop | right | `check` said |", "|---|---|---|---|"]
    for row in found["rows"]:
        cells = [KINDS[row["kind"]][0], row["kind"].split()[0], "yes" if row["right"] else "no"]
        table.append(f"| {' | '.join([*cells, row['said'].replace('|', ' ')])} |")
    rows = found["rows"]
    wrong = sum(not row["right"] and not row["unknown"] for row in rows)
    right = sum(row["right"] for row in rows)
    table += ["", f"{len(rows)} deaths: who and why right in {right}, wrong in {wrong}."]
    if "measured" in found:
        table += ["", f"{results.where(found['measured'])}."]
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument("--kind", choices=KINDS, help="only this one; keeps no results")
    given = parser.parse_args()
    found: dict[str, Any] = {"rows": []}
    for kind in [given.kind] if given.kind else KINDS:
        if kind == "ray memory" and not os.access(CGROUP / "cgroup.procs", os.W_OK):
            print("ray memory is not run: no memory cgroup can be made here", file=sys.stderr)
            continue
        found["rows"].append(judge(kind))
        print(found["rows"][-1], file=sys.stderr, flush=True)
    with suppress(OSError):
        (CGROUP / f"verl_profiling_{os.getpid()}").rmdir()
    if not given.kind:
        found["measured"] = results.here()
        results.write(Path(__file__).with_suffix(".json"), found)
    print(markdown(found))


if __name__ == "__main__":
    loops = {"ray": ray_loop, "ranks": rank_loop, "plain": plain_loop}
    program = loops.get(" ".join(sys.argv[1:2]))
    program(*sys.argv[2:]) if program is not None else main()
