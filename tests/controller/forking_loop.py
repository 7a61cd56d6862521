"""Loops whose processes fork at a drawn place: ``python -m
tests.controller.forking_loop FOLDER SEEDS``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

from verl_profiling import AsyncProfilingCallback, ProfilingCallback, stage
from verl_profiling.steps.check import check
from verl_profiling.workers import CaptureMixin

STEPS = 3
PLACES = ("entered", "begun", "rollout", "stage", "between", "ended")
LEAVES = ("exits", "raises", "goes on")


class Loop:
    """A loop that forks once; ``train`` is a coroutine, whose hooks may be awaited or not."""

    def __init__(self, folder: Path, seed: int) -> None:
        draw = random.Random(seed)
        self.is_async, self.leaves = draw.random() < 0.5, draw.choice(LEAVES)
        self.place = (draw.choice(PLACES), draw.randint(1, STEPS))
        self.child: int | None = None
        self.folder, self.config = (
            folder,
            {"enable": True, "save_path": str(folder), "tool": "spans"},
        )
        self.config |= {
            "mode": draw.choice(("e2e", "discrete")),
            "watch": {"enable": draw.random() < 0.5},
        }
        self.worker = CaptureMixin()
        self.worker.init_capture(self.config, role="actor")

    async def train(self, callback: Any) -> None:
        """Train with a callback that was entered."""
        callback.add_workers("actor", self.worker)
        for step in range(1, STEPS + 1):
            self.pass_by("entered", step)
            await _done(callback.on_step_begin(step))
            self.pass_by("begun", step)
            await _done(callback.on_rollout_begin())
            self.pass_by("rollout", step)
            await _done(callback.on_rollout_end({"reward": 1.0}))
            with callback.stage("a"), stage("update_actor"):
                self.pass_by("stage", step)
            self.pass_by("between", step)
            await _done(callback.on_step_end({"loss": 0.5}))
            callback.add_metrics(step, {"late": 2.0})
            self.pass_by("ended", step)

    def pass_by(self, place: str, step: int) -> None:
        """Fork here, if it was drawn; the parent waits for the child."""
        if (place, step) != self.place or self.child is not None:
            return
        self.child = os.fork()
        if self.child:
            begin = time.monotonic()
            assert os.waitpid(self.child, 0)[1] == 0
            assert time.monotonic() - begin < 30, "the child hung"
            run = self.folder / "run.json"
            assert not run.exists() or json.loads(run.read_text())["end_ns"] is None, (
                "the child ended the run"
            )
        elif self.leaves == "exits":
            raise SystemExit(0)
        elif self.leaves == "raises":
            raise ValueError("planned")


async def _done(answer: Any) -> None:
    if inspect.isawaitable(answer):
        await answer


async def _train(loop: Loop) -> None:
    try:
        if loop.is_async:
            async with AsyncProfilingCallback(loop.config) as callback:
                await loop.train(callback)
        else:
            with ProfilingCallback(loop.config, blocks_event_loop=True) as callback:
                await loop.train(callback)
    finally:
        if loop.child == 0:
            os._exit(0)  # asyncio shares its selector with the parent: a child must not close it


def main(folder: str, seeds: str) -> None:
    """Train with each seed, and check the run of the parent."""
    for seed in range(int(seeds)):
        loop = Loop(Path(folder) / str(seed), seed)
        asyncio.run(_train(loop))
        checked = check(loop.folder)
        steps = [
            json.loads(path.read_text())
            for path in sorted(loop.folder.glob("step_*/manifest.json"))
        ]
        seen = (seed, vars(loop), checked)
        assert loop.child, seen
        assert checked.ok, seen
        assert [(step["state"], step["complete"], step["metrics"]) for step in steps] == [
            ("written", True, {"reward": 1.0, "loss": 0.5, "late": 2.0})
        ] * STEPS, seen
        assert not list(Path(folder).glob("*/run_2")), seen


if __name__ == "__main__":
    main(*sys.argv[1:])
