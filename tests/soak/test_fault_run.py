"""A run with a fault in nearly every step does all its steps, and loses what was damaged, nothing else."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.fault_run import KINDS, FaultRun, Outcome, faults
from verl_profiling.engines import recorder

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
    for part in tmp_path.rglob(".*.part"):  # what a killed process was writing stays where it is
        part.unlink()
    for row in rows(outcomes):
        record_property(COLUMNS, row)
    record_property(COLUMNS, f"| (SOAK_SEED={seed}) | {steps} | | | |")
    lost = [o.seen for o in outcomes if not o.completed or o.kept < o.expected or not o.check_is_right]
    assert lost == [], f"SOAK_SEED={seed}"
