"""A run with a fault in nearly every step does all its steps, and loses what was damaged, nothing else."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.fault_run import KINDS, FaultRun, Outcome, faults
from tests.soak.killed_loop import PLACES, finished
from verl_profiling.cli import main
from verl_profiling.engines import recorder
from verl_profiling.report.check import check

COLUMNS = "| fault | times | steps completed | undamaged artifacts kept | exit code of `check` right |"
# Those for which nobody waits for a timeout or a new process, and one of the latter.
QUICK = tuple(kind for kind in KINDS if "hangs" not in kind and "dies in" not in kind)
Record = Callable[[str, object], None]


def rows(outcomes: list[Outcome]) -> list[str]:
    """Return a row for each kind of fault."""
    found = []
    for kind in KINDS:
        of_kind = [outcome for outcome in outcomes if outcome.fault.kind == kind]
        if times := len(of_kind):
            completed = sum(outcome.completed for outcome in of_kind)
            kept = f"{sum(o.kept for o in of_kind)} of {sum(o.expected for o in of_kind)}"
            right = sum(outcome.check_is_right for outcome in of_kind)
            found.append(f"| {kind} | {times} | {completed} of {times} | {kept} | {right} of {times} |")
    return found


def remove_unfinished(folder: Path) -> None:
    """Remove what killed processes were writing, which stays where it is."""
    for part in folder.rglob(".*.part"):
        part.unlink()


@pytest.mark.parametrize(
    ("kinds", "steps", "seed"),
    [
        pytest.param(QUICK, len(QUICK), 12, id="short"),
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
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`make test-soak SOAK_SEED=...` repeats a plan; the seed is printed in any case."""
    print(f"SOAK_SEED={seed}")
    monkeypatch.setattr(recorder, "_DYING_S", 0.2)
    run = FaultRun(tmp_path, faults(seed, kinds, steps), timeout_s=5.0)
    try:
        outcomes = run.train()
    finally:
        run.end()
    remove_unfinished(tmp_path)
    for row in rows(outcomes):
        record_property(COLUMNS, row)
    record_property(COLUMNS, f"| (SOAK_SEED={seed}) | {steps} | | | |")
    lost = [o.seen for o in outcomes if not o.completed or o.kept < o.expected or not o.check_is_right]
    assert lost == [], f"SOAK_SEED={seed}"


@pytest.mark.parametrize(
    "kills", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])], ids=["short", "long"]
)
def test_a_loop_that_is_killed_keeps_every_stage_that_was_over(
    tmp_path: Path, kills: int, record_property: Record
) -> None:
    """It goes on and does all steps; `check` names those that were cut, with what was over by then."""
    seed = int(os.environ.get("SOAK_SEED") or 12)
    print(f"SOAK_SEED={seed}")
    dice, root, run = random.Random(seed), Path(__file__).parents[2], tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(root), str(root / "tests")))}
    places = [dice.choice(PLACES) for _ in range(kills)]
    for number, place in enumerate([*places, ""]):
        doomed = 2 * number + 2
        command = [sys.executable, "-m", "tests.soak.killed_loop", str(tmp_path)]
        command += [str(max(1, 2 * number)), str(doomed), str(doomed), place]
        done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == (-signal.SIGKILL if place else 0), done.stderr
    remove_unfinished(tmp_path)
    kept = 0
    runs = [run, *(run / f"run_{number}" for number in range(2, kills + 1))]
    cut = [one / f"step_{2 * number + 2:06d}" for number, one in enumerate(runs)]
    right = sum(main(["check", str(folder)]) == 1 for folder in cut)
    for folder, place in zip(cut, places, strict=True):
        whole = {entry.path for entry in check(folder).artifacts if entry.status == "ok"}
        kept += sum(any(f".{name}." in path for path in whole) for name in finished(place))
    over = sum(len(finished(place)) for place in places)
    steps, done_steps = 2 * kills + 2, int((tmp_path / "done").read_text())
    record_property(
        COLUMNS,
        f"| the loop is killed, and started again | {kills} | {done_steps} of {steps} | {kept} of {over} | "
        f"{right} of {kills} |",
    )
    assert (done_steps, kept, right) == (steps, over, kills), f"SOAK_SEED={seed}"
