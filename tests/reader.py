"""A reader, who types the commands of the documentation one after the other into a folder that was empty."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSIGNMENT = re.compile(r"[A-Z_]+=")
RUNNABLE = {"python": [sys.executable], "verl-profiling": [sys.executable, "-m", "verl_profiling.cli"]}
PROFILED = ("profiling=e2e", "profiling.schedule.steps=[2,3]")
TRAIN = ("python", "-m", "recipes.grpo_tiny.train")
# One command of the pages for each engine: what it leaves is looked at by the tests of the recipe, too.
SHARED = {
    "transformers": (*TRAIN, *PROFILED),
    "vllm": (*TRAIN, "rollout.engine=vllm", "steps=10", *PROFILED, "output_dir=outputs/vllm"),
    "sglang": (
        f"PYTHONPATH={ROOT}:{ROOT}/recipes/sglang_cpu",
        *(*TRAIN, "rollout.engine=sglang", "steps=10", *PROFILED, "output_dir=outputs/sglang"),
    ),
}


def assignments(words: list[str]) -> dict[str, str]:
    """Return the variables that are set in front of a command's program."""
    return dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))


class Reader:
    """Runs each command once, whoever asks for it.

    Args:
        folder: An empty folder; the commands run in ``page`` below it.
    """

    def __init__(self, folder: Path) -> None:
        self._page = folder / "page"
        self._kept = folder / "kept"
        self._done: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = {}
        self._page.mkdir()

    def type(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Return how a command ended."""
        if tuple(words) not in self._done:
            self._done[tuple(words)] = self._run(words)
        return self._done[tuple(words)]

    def output_of_the_run_with(self, engine: str) -> Path:
        """Return a copy of the output folder of the recipe as the pages' command for an engine left it."""
        done = self.type(list(SHARED[engine]))
        assert done.returncode == 0, done.stdout + done.stderr
        return self._kept / engine

    def _run(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        program, *arguments = words[len(assignments(words)) :]
        done = subprocess.run(
            [*RUNNABLE[program], *arguments],
            cwd=self._page,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **assignments(words)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        for engine, shared in SHARED.items():
            if tuple(words) == shared and done.returncode == 0:
                output = words[-1].partition("output_dir=")[2] or "outputs/grpo_tiny"
                shutil.copytree(self._page / output, self._kept / engine)
        return done
