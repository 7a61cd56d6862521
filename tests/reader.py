"""A reader, who types the commands of the documentation one after the other into a folder
that was empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[1]
ASSIGNMENT = re.compile(r"[A-Z_]+=")
RUNNABLE = {
    "python": [sys.executable],
    "verl-profiling": [sys.executable, "-m", "verl_profiling.cli"],
}
PROFILED = ("profiling=e2e", "profiling.schedule.steps=[2,3]")
TRAIN = ("python", "-m", "recipes.grpo_tiny.train")
BY_STAGE = (
    "profiling=discrete",
    "profiling.schedule.every=10",
    "steps=20",
    "output_dir=outputs/every_10",
)
# Commands of the pages, by mode and engine: what they leave is looked at by the tests of the
# recipe, too.
SHARED = {
    ("e2e", "transformers"): (*TRAIN, *PROFILED),
    ("discrete", "transformers"): (*TRAIN, *BY_STAGE),
    ("e2e", "vllm"): (
        *TRAIN,
        "rollout.engine=vllm",
        "steps=10",
        *PROFILED,
        "output_dir=outputs/vllm",
    ),
    ("e2e", "sglang"): (
        f"PYTHONPATH={ROOT}:{ROOT}/recipes/sglang_cpu",
        *(*TRAIN, "rollout.engine=sglang", "steps=10", *PROFILED, "output_dir=outputs/sglang"),
    ),
}


def assignments(words: Sequence[str]) -> dict[str, str]:
    """Return the variables that are set in front of a command's program."""
    return dict(word.split("=", 1) for word in takewhile(ASSIGNMENT.match, words))


class Reader:
    """Runs each command once, whoever asks for it."""

    def __init__(self, folder: Path) -> None:
        self._page = folder / "page"
        self._kept = folder / "kept"
        self._done: dict[tuple[str, ...], subprocess.CompletedProcess[str]] = {}
        self._wrote: dict[tuple[str, ...], list[Path]] = {}
        self._page.mkdir()

    def type(self, words: Sequence[str]) -> subprocess.CompletedProcess[str]:
        words = tuple(words)
        if words not in self._done:
            begin = time.time()
            self._done[words] = self._run(words)
            files = (path for path in self._page.rglob("*") if path.is_file())
            self._wrote[words] = [path for path in files if path.stat().st_mtime >= begin - 0.1]
        return self._done[words]

    def written_by(self, words: Sequence[str]) -> list[Path]:
        done = self.type(words)
        assert done.returncode == 0, done.stdout + done.stderr
        return self._wrote[tuple(words)]

    def output_of(self, mode: str, engine: str) -> Path:
        """Return a copy of the output folder of the recipe as the pages' command of
        that kind left it.
        """
        self.written_by(SHARED[mode, engine])
        return self._kept / f"{mode}-{engine}"

    def _run(self, words: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
        program, *arguments = words[len(assignments(words)) :]
        done = subprocess.run(
            [*RUNNABLE[program], *arguments],
            cwd=self._page,
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                **assignments(words),
            },
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        for kind, shared in SHARED.items():
            if words == shared and done.returncode == 0:
                output = words[-1].partition("output_dir=")[2] or "outputs/grpo_tiny"
                shutil.copytree(self._page / output, self._kept / "-".join(kind))
        return done


def run_module(*arguments: object) -> str:
    """Run ``python -m`` with these arguments, where SGLang finds its stand-ins;
    return what it printed.
    """
    path = os.pathsep.join([str(ROOT / "recipes" / "sglang_cpu"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
