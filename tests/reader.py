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
# The first command of the first page: what it leaves is looked at by the tests of the recipe, too.
FIRST = ("python", "-m", "recipes.grpo_tiny.train", "profiling=e2e", "profiling.schedule.steps=[2,3]")


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
        self._first = folder / "first"
        self._done: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = {}
        self._page.mkdir()

    def type(self, words: list[str]) -> subprocess.CompletedProcess[str]:
        """Return how a command ended."""
        if tuple(words) not in self._done:
            self._done[tuple(words)] = self._run(words)
        return self._done[tuple(words)]

    def output_of_the_first_command(self) -> Path:
        """Return the output folder of the recipe as the first command left it."""
        if not self._first.exists():
            assert set(self._done) <= {FIRST}, "other commands have written there"
            done = self.type(list(FIRST))
            assert done.returncode == 0, done.stdout + done.stderr
        return self._first

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
        if tuple(words) == FIRST and done.returncode == 0:
            shutil.copytree(self._page / "outputs" / "grpo_tiny", self._first)
        return done
