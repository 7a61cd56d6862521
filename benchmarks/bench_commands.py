"""Commands that a person waits for, against those of an earlier commit, in turn.

Run: ``python benchmarks/bench_commands.py [--rounds 7]``. The step is that of ``verl-profiling
demo``. Imports are most of it, so each command runs in a process of its own.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from results import BASE_COMMIT, ROOT, base_worktree, record, row

RUN = "outputs/grpo_demo"
COMMANDS = ("report {step}", "check {step}", "top {run} --once", "what-if {step}", "merge {step}")


def run(package: Path, folder: Path, command: str) -> float:
    """Return the CPU time of a command (s)."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, "-m", "verl_profiling.cli", *command.split()],
        env={**os.environ, "PYTHONPATH": str(package)},
        cwd=folder,  # of two packages, Python would import the one in its folder
        capture_output=True,
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """Capture the step, run the commands of both commits in turn, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    rounds = range(parser.parse_args().rounds)
    base = base_worktree()
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        run(ROOT, folder, "demo")
        [step] = (folder / RUN).glob("step_*")
        for command in COMMANDS:
            words = command.format(step=step, run=folder / RUN)
            pairs = [(run(base, folder, words), run(ROOT, folder, words)) for _ in rounds]
            old, new = ([pair[side] for pair in pairs] for side in (0, 1))
            what = f"`{command.split()[0]}`"
            against = f"{what}, commit `{BASE_COMMIT}`"
            rows.append(row(against, old, "CPU s"))
            rows.append(row(what, new, "CPU s", against=against, of=old))
    method = f"The step of the demo. {len(rounds)} rounds in turn, in fresh processes."
    record("commands", rows, method=method, peers={})


if __name__ == "__main__":
    main()
