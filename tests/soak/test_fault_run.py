"""A run with a fault in nearly every step does all its steps, and loses what was damaged,
nothing else.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.fault_run import KINDS, FaultRun, faults
from tests.soak.killed_loop import STAGES
from verl_profiling.cli import main
from verl_profiling.engines import recorder
from verl_profiling.steps.check import check

# Those for which nobody waits for a timeout or a new process, and one of the latter.
QUICK = tuple(kind for kind in KINDS if "hangs" not in kind and "dies in" not in kind)


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing, which stays where it is."""
    for part in folder.rglob(".*.part"):
        part.unlink()


@pytest.mark.parametrize(
    ("kinds", "steps", "seed"),
    [
        pytest.param(QUICK, len(QUICK), 10, id="short"),
        pytest.param(
            KINDS,
            10 * len(KINDS),
            int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**32)),
            id="long",
            marks=[pytest.mark.soak, pytest.mark.timeout(3600)],
        ),
    ],
)
def test_every_step_is_done_and_what_was_not_damaged_is_whole(
    tmp_path: Path,
    ray_cluster: None,
    kinds: tuple[str, ...],
    steps: int,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recorder, "_DYING_S", 0.2)
    run = FaultRun(tmp_path, timeout_s=5.0)
    try:
        wrong = run.train(faults(seed, kinds, steps))
    finally:
        run.end()
    remove_unfinished(tmp_path)
    assert wrong == [], f"SOAK_SEED={seed}"


@pytest.mark.parametrize("over", [0, 2])
def test_a_loop_that_is_killed_keeps_every_stage_that_was_over(tmp_path: Path, over: int) -> None:
    """`check` names the step that was cut, with its whole stages;
    the loop that is started again does all.
    """
    root, run = Path(__file__).parents[2], tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests")))}
    for place, code in ((STAGES[over], -signal.SIGKILL), ("", 0)):
        command = [sys.executable, "-m", "tests.soak.killed_loop", str(run), place]
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == code, done.stderr
    remove_unfinished(tmp_path)
    cut = run / "step_000002"
    whole = [entry.path for entry in check(cut).artifacts if entry.status == "ok"]
    assert sorted(path.split(".")[1] for path in whole) == sorted(STAGES[:over])
    assert main(["check", str(cut)]) == 1
    assert main(["check", str(run / "run_2")]) == 0
    assert len(list((run / "run_2").glob("step_*"))) == 3
