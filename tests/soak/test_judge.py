"""Cells of ``make watch-judge``: real loops with a fault, judged by what they leave."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the loops train with torch")

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.soak, pytest.mark.timeout(500)]  # they compare milliseconds: alone, not in CI


def cells(loop: str, fault: str) -> list[list[str]]:
    """Run cells of the judge; return their rows: noticed, named first, longest, finding, alarms."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / "watch_judge.py"), "--loop", loop, "--fault", fault],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    _, _, *rows = [line for line in done.stdout.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in row.split("|")[3:-1]] for row in rows]


def times_longest(cell: str) -> dict[str, int]:
    """Return in how many steps which process was said to be longest."""
    return {name: int(many) for name, many in re.findall(r"(\w+)\W* (\d+)", cell)}


def test_ranks_that_wait_in_a_collective_are_not_named() -> None:
    """In a loop on every rank with FSDP over gloo, whose rank 1 computes twice as long as rank 0."""
    [[_, named, longest, *_]] = cells("ranks", "stage of its own")
    assert "actor_rank0" not in named
    many = times_longest(longest)
    assert many["actor_rank1"] >= 13, "in most of the 26 steps"
    assert many.get("actor_rank0", 0) <= 3, "a busy machine may hold a rank up now and then"


def test_a_controller_names_neither_who_waits_nor_engines_beside_a_slow_tool() -> None:
    """An all-reduce as a stage of its own; trajectories that no stage of their agent loop encloses."""
    pytest.importorskip("ray", reason="the loop calls Ray actors")
    [[_, waits, longest, *_], [noticed, beside, *_]] = cells(
        "user", "stage of its own|trajectories in no stage"
    )
    assert "actor_rank0" not in waits
    many = times_longest(longest)
    assert many["actor_rank1"] >= 13
    assert many.get("actor_rank0", 0) <= 3
    assert noticed != "never"
    assert beside in ("nobody", "tool:search")
