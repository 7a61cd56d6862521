"""What the watch says of hangs that are put into real loops: when, and whom it names.

Run: ``make hang-judge``. A loop of Ray actors (two training ranks, two engines, an agent loop, a
reward worker) and one that runs on every rank go on while pieces of them hang, one after another.
Of the package, only ``watch.jsonl`` is read. ``--rounds`` says how often, and ``--kind`` chooses
hangs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import results
from ranks import environments

from verl_profiling import ProfilingCallback, span, stage, trajectory
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    RequestLog,
    RolloutCaptureMixin,
)

HANG_S, FIRST_S, MORE_S, QUIET = 2.0, 4.0, 5.0, 12
# By what the judge tells a loop: name of the hang, the right process, and a pattern of the right
# reason.
KINDS = {
    "ray tool": ("a tool that never returns", "agent_loop_rank0", "tool:search of trajectory"),
    "ray slots": (
        "a tool, while others wait for its slot",
        "agent_loop_rank0",
        "tool:search .*sample [23]",
    ),
    "ray service": (
        "a call of a service that serves one at a time",
        "agent_loop_rank0",
        "environment:step .*sample 2",
    ),
    "ray block": (
        "a tool that blocks its event loop",
        "agent_loop_rank0",
        "blocks its event loop .*tool:search .*sample 3",
    ),
    "ray engine1": ("an engine whose requests do not end", "rollout1_rank0", "requests"),
    "ray stop rollout1": ("an engine that is stopped", "rollout1_rank0", "stopped"),
    "ray reward": ("a reward worker that sleeps", "reward_rank0", "is in reward"),
    "ray compute1": (
        "a rank that has not entered the collective",
        "actor_rank1",
        "has not entered",
    ),
    "ray unmarked1": ("a rank in code that it does not mark", "actor_rank1", "answers no call"),
    "ray stop actor1": ("a rank that is stopped", "actor_rank1", "stopped"),
    "ray weights0": ("an engine in a weight update", "rollout0_rank0", "update_weights"),
    "ray loader": ("the loop's data loader", "controller", "own code"),
    "ray checkpoint": ("the loop's checkpoint", "controller", "own code"),
    "ray unscheduled": ("a task that Ray cannot schedule", "controller", "scheduled"),
    "ray kill agent_loop0": ("a worker that is dead", "agent_loop_rank0", "dead"),
    "off tool": ("a tool, in the next rollout", "agent_loop_rank0", "tool:search of trajectory"),
    "off slots": (
        "a tool with a slot, in the next rollout",
        "agent_loop_rank0",
        "tool:search .*sample [23]",
    ),
    "off engine1": ("an engine, in the next rollout", "rollout1_rank0", "requests"),
    "ranks compute1": (
        "a rank that has not entered the collective",
        "actor_rank1",
        "has not entered",
    ),
    "ranks compute0": ("rank 0 itself", "actor_rank0", "has not entered"),
    "ranks loader1": ("a rank in its own code", "actor_rank1", "own code"),
    "ranks tool1": ("a tool of one rank", "actor_rank1", "tool:search"),
    "ranks stop actor1": ("a rank that is stopped", "actor_rank1", "stopped"),
}


class Piece:
    """A piece of a process that hangs while the judge says so; ``long``: it takes long,
    and progresses.
    """

    def __init__(self, folder: str, who: str = "") -> None:
        self.folder = Path(folder)
        if who:
            (self.folder / who).write_text(str(os.getpid()))
        watch = {"enable": True, "hang_s": HANG_S, "first_hang_s": FIRST_S}
        given = {"tool": ["spans", "trajectories"], "schedule": {"steps": []}, "watch": watch}
        self.config: dict[str, Any] = {"enable": True, "save_path": f"{folder}/run", **given}

    def hangs(self, name: str) -> bool:
        found = (self.folder / "fault").read_text() == name
        if found:
            (self.folder / "begun").touch()
        return found

    def work(self, name: str, seconds: float = 0.005) -> None:
        time.sleep(seconds)
        while self.hangs(name):
            time.sleep(0.05)


class Engine(RolloutCaptureMixin, Piece):
    def __init__(self, folder: str, replica: int) -> None:
        super().__init__(folder, f"rollout{replica}")
        self.replica, self.requests = replica, RequestLog()
        self.init_capture(self.config, replica=replica, requests=self.requests)

    async def generate(self, request_id: str) -> None:
        with self.requests.open(prompt_tokens=8, id=request_id):
            await asyncio.sleep(0.005)
            while self.hangs(f"engine{self.replica}"):
                await asyncio.sleep(0.05)

    async def update_weights(self) -> None:
        with stage("update_weights"):
            self.work(f"weights{self.replica}")


class Agents(AgentLoopCaptureMixin, Piece):
    def __init__(
        self, folder: str, engines: list[Any], number: int = 0, tool: str = "tool"
    ) -> None:
        super().__init__(folder, f"agent_loop{number}")
        self.engines, self.tool = engines, tool

    async def roll_out(self, step: int) -> None:
        slots, service = asyncio.Semaphore(2), asyncio.Semaphore(1)
        await asyncio.gather(*(self.play(step, sample, slots, service) for sample in range(6)))

    async def play(
        self, step: int, sample: int, slots: asyncio.Semaphore, service: asyncio.Semaphore
    ) -> None:
        async with trajectory(group=f"p{step}", sample=sample):
            async with span("wait:slot"):
                await slots.acquire()
            try:
                for turn in range(24 if self.hangs("long") else 2):
                    await self.take_turn(step, sample, turn, service)
            finally:
                slots.release()

    async def take_turn(
        self, step: int, sample: int, turn: int, service: asyncio.Semaphore
    ) -> None:
        async with span("generate", turn=turn):
            for engine in self.engines[sample % 2 : sample % 2 + 1]:
                await engine.generate.remote(f"{step}.{sample}.{turn}")
        async with span("tool:search", turn=turn):
            if sample == 3:
                self.work("block", 0.0)
            while (sample == 3 and self.hangs(self.tool)) or (
                sample in (2, 3) and self.hangs("slots")
            ):
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.3 if self.hangs("long") else 0.005)
        async with span("wait:service"):
            await service.acquire()
        try:
            async with span("environment:step", turn=turn):
                await asyncio.sleep(0.001)
                while sample == 2 and self.hangs("service"):
                    await asyncio.sleep(0.05)
        finally:
            service.release()


class Reward(AgentLoopCaptureMixin, Piece):
    capture_role = "reward"

    def score(self) -> None:
        with stage("reward"):
            self.work("reward")


class Trainer(CaptureMixin, Piece):
    def __init__(self, folder: str, rank: int, address: str = "env://") -> None:
        import torch
        import torch.distributed as dist

        super().__init__(folder, f"actor{rank}")
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        self.rank, self.gradient, self.reduce = rank, torch.ones(1000), dist.all_reduce
        self.init_capture(self.config, role="actor", rank=rank, world_size=2)

    def update(self) -> None:
        for _ in range(8 if self.hangs("long") else 1):
            with stage("update_actor"):
                self.work(f"compute{self.rank}", 0.4 if self.hangs("long") else 0.01)
                self.reduce(self.gradient)
        self.work(f"unmarked{self.rank}")


def ray_loop(folder: str, is_one_step_off: bool = False) -> None:
    import ray

    ray.init("local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    made, piece = ray.remote(num_cpus=0), Piece(folder)
    actors = [
        made(Trainer).remote(folder, rank, f"file://{folder}/rendezvous") for rank in range(2)
    ]
    engines = [made(Engine).remote(folder, replica) for replica in range(2)]
    agents, reward = made(Agents).remote(folder, engines), made(Reward).remote(folder)
    ray.get([agents.init_capture.remote(piece.config), reward.init_capture.remote(piece.config)])
    ray.get(
        [*(one.update.remote() for one in actors), agents.roll_out.remote(0), reward.score.remote()]
    )

    coming = [agents.roll_out.remote(1)] if is_one_step_off else []

    def run_step(cb: ProfilingCallback, step: int) -> None:
        piece.work("loader")
        if is_one_step_off:
            with cb.stage("wait:rollout"):
                ray.get(coming.pop())
            coming.append(agents.roll_out.remote(step + 1))
        else:
            with cb.stage("rollout"):
                ray.get(agents.roll_out.remote(step)) if not piece.hangs(
                    "kill agent_loop0"
                ) else time.sleep(60)
        with cb.stage("reward"):
            ray.get(reward.score.remote())
        with cb.stage("update_actor"):
            ray.get([actor.update.remote() for actor in actors])
        with cb.stage("update_weights"):
            ray.get([engine.update_weights.remote() for engine in engines])
        with cb.stage("save_checkpoint"):
            piece.work("checkpoint")
        with cb.stage("validate"):
            waits = (
                ray.remote(lambda: 0).options(num_gpus=9).remote()
                if piece.hangs("unscheduled")
                else None
            )
            while piece.hangs("unscheduled"):
                ray.wait([waits], timeout=0.5)

    loop(
        folder,
        run_step,
        {"actor": actors, "rollout": engines, "agent_loop": [agents], "reward": [reward]},
    )


def rank_loop(folder: str) -> None:
    rank = int(os.environ["RANK"])
    actor, agents = Trainer(folder, rank), Agents(folder, [], rank, f"tool{rank}")

    def run_step(cb: ProfilingCallback, step: int) -> None:
        actor.work(f"loader{rank}")
        with cb.stage("rollout"):
            asyncio.run(agents.roll_out(step))
        actor.update()

    loop(folder, run_step, {"actor": [actor]})


def loop(
    folder: str, run_step: Callable[[ProfilingCallback, int], None], workers: dict[str, Any]
) -> None:
    with ProfilingCallback(Piece(folder).config) as cb:
        for role, of_role in workers.items():
            cb.add_workers(role, of_role)
        for step in range(1, 1_000_000):
            cb.on_step_begin(step)
            run_step(cb, step)
            cb.on_step_end()


def lines(folder: Path) -> list[dict[str, Any]]:
    log = folder / "run" / "watch.jsonl"
    whole = (
        log.read_text().rpartition("\n")[0] if log.exists() else ""
    )  # the last line may be in writing
    return [json.loads(line) for line in whole.splitlines()]


def hangs_in(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["hang"] for one in found if "hang" in one and "end_ns" not in one]


def until(seconds: float, holds: Callable[[], object]) -> bool:
    """Return whether something holds before the time is up."""
    until_s = time.monotonic() + seconds
    while not holds() and time.monotonic() < until_s:
        time.sleep(0.02)
    return bool(holds())


def inject(folder: Path, kind: str, who: str, how: str) -> dict[str, Any]:
    """Let a piece hang until the watch has said so, or the time is up; return the verdict."""
    before, (signalled, _, process) = len(lines(folder)), kind.partition(" ")
    (folder / "begun").unlink(missing_ok=True)
    (folder / "fault").write_text(kind)
    if signalled != "stop":
        until(20, (folder / "begun").exists)
    pid = int((folder / process).read_text()) if process else 0
    if pid:
        os.kill(pid, signal.SIGSTOP if signalled == "stop" else signal.SIGKILL)
    begun_s = time.monotonic()
    until(FIRST_S + MORE_S, lambda: hangs_in(lines(folder)[before:]))
    took_s = time.monotonic() - begun_s
    (folder / "fault").write_text("")
    if signalled == "stop":
        os.kill(pid, signal.SIGCONT)
    hang = next(iter(hangs_in(lines(folder)[before:])), {"lane": "", "reason": ""})
    right, told = hang["lane"] == who, re.search(how, hang["reason"]) is not None
    verdict = {"noticed": bool(hang["lane"]), "right": right, "told": right and told}
    reason = hang["reason"].replace(f"{Path(__file__).parent}/", "")
    return {**verdict, "took_s": took_s, "lane": hang["lane"], "reason": reason}


def judge(loop_name: str, kinds: list[str], folder: Path, found: dict[str, Any]) -> None:
    """Run one loop with some kinds of hangs, and add what was found."""
    folder.mkdir(parents=True)
    (folder / "fault").write_text("")
    command, processes = [sys.executable, __file__, loop_name, str(folder)], []
    for rank, given in enumerate(environments(2) if loop_name == "ranks" else [None]):
        with (folder / f"log{rank}.txt").open("w") as log:
            processes.append(subprocess.Popen(command, env=given, stdout=log, stderr=log))

    def quiet(steps: int) -> int:
        """Let the loop go on for some steps; return how many there were."""
        before = len(lines(folder))
        enough = until(240, lambda: len(lines(folder)) >= before + steps or processes[0].poll())
        if not enough or processes[0].poll():
            raise RuntimeError(
                f"the loop does not go on: {(folder / 'log0.txt').read_text()[-3000:]}"
            )
        new = lines(folder)[before:]
        found["steps"] += (ran := sum("end_ns" in one for one in new))
        found["alarms"] += len(hangs_in(new))
        return ran

    try:
        quiet(3 * QUIET)
        (folder / "fault").write_text("long")
        found["long"] += quiet(QUIET // 2)
        (folder / "fault").write_text("")
        for kind in kinds:
            quiet(QUIET)
            name, who, how = KINDS[f"{loop_name} {kind}"]
            found["rows"].append(
                {"loop": loop_name, "kind": name, **inject(folder, kind, who, how)}
            )
            print(found["rows"][-1], file=sys.stderr, flush=True)
    finally:
        for process in processes:
            process.kill()


def markdown(found: dict[str, Any]) -> str:
    """Return the table, what it comes to, and where it was measured."""
    head, rows = (
        "| hang | loop | runs | noticed | within | right process | right reason |",
        found["rows"],
    )
    table = [head, "|---|---|---|---|---|---|---|"]
    for loop_name, kind in dict.fromkeys((row["loop"], row["kind"]) for row in rows):
        of = [row for row in rows if (row["loop"], row["kind"]) == (loop_name, kind)]
        within = max([row["took_s"] for row in of if row["noticed"]], default=0.0)
        cells = [
            f"{sum(row[name] for row in of)} of {len(of)}" for name in ("noticed", "right", "told")
        ]
        cells = [kind, loop_name, str(len(of)), cells[0], f"{within:.1f} s", *cells[1:]]
        table.append(f"| {' | '.join(cells)} |")
    noticed, right, told = (sum(row[name] for row in rows) for name in ("noticed", "right", "told"))
    table += [
        "",
        f"{len(rows)} hangs with `hang_s` {HANG_S:g}: {noticed} noticed, the right process "
        f"named in {right}, "
        f"for the right reason in {told}. {found['steps']:,} quiet steps, {found['long']} of "
        "them longer "
        f"than `hang_s`, with {found['alarms']} alarms.",
        *(["", f"{results.where(found['measured'])}."] if "measured" in found else []),
    ]
    return "\n".join(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition(".")[0])
    parser.add_argument(
        "--rounds", type=int, default=6, help="runs of each loop (default: %(default)d)"
    )
    parser.add_argument(
        "--kind", default="", help="only hangs that this pattern matches; keeps no results"
    )
    given = parser.parse_args()
    found: dict[str, Any] = {"rows": [], "steps": 0, "long": 0, "alarms": 0}
    with tempfile.TemporaryDirectory(prefix="hang-judge-", ignore_cleanup_errors=True) as temporary:
        for number in range(given.rounds):
            for loop_name in ("ray", "off", "ranks"):
                of_loop = [kind for kind in KINDS if kind.split()[0] == loop_name]
                kinds = [kind.partition(" ")[2] for kind in of_loop if re.search(given.kind, kind)]
                try:
                    judge(loop_name, kinds, Path(temporary, f"{loop_name}{number}"), found)
                except RuntimeError as error:  # on a busy machine, Ray may not start in its 30 s
                    print(error, file=sys.stderr)
    if not given.kind:
        found["measured"] = results.here()
        results.write(Path(__file__).with_suffix(".json"), found)
    print(markdown(found))


if __name__ == "__main__":
    loops: dict[str, Callable[[str], None]] = {"ray": ray_loop, "ranks": rank_loop}
    loops["off"] = partial(ray_loop, is_one_step_off=True)
    program = loops.get(" ".join(sys.argv[1:2]))
    program(sys.argv[2]) if program is not None else main()
