"""A run that is killed in a step and started again, by a loop on Ray: what its folder says afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray
from conftest import Pool
from fleet import Loop
from test_callback import configured

from verl_profiling import ProfilingConfig
from verl_profiling.cli import main
from verl_profiling.manifest import MANIFEST_NAME
from verl_profiling.report.check import Checked, check
from verl_profiling.run_files import read_manifest, read_starts


def train(config: ProfilingConfig, pool: Pool, first: int, last: int, doomed: int = 0) -> None:
    """Run one start of the loop in an actor of its own, with the workers as new processes have them."""
    ray.get([worker.set_up.remote(config, "actor", rank) for rank, worker in enumerate(pool.sync)])
    loop = ray.remote(num_cpus=0)(Loop).remote()
    try:
        ray.get(loop.train.remote(config, pool.sync, first, last, doomed))
    except ray.exceptions.RayActorError:
        assert doomed


def not_whole(run: Path) -> Iterator[Checked]:
    """Yield what the check says is not as it should be."""
    return (entry for entry in check(run).artifacts if entry.fate != "ok")


@pytest.mark.timeout(120)
def test_a_run_that_was_killed_and_resumed_explains_itself(
    tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step it died in, the start that it resumed with, its settings, and the steps that never came."""
    before = configured(tmp_path, run_id="r", schedule={"steps": [2, 3, 50]})
    after = configured(tmp_path, run_id="r", schedule={"steps": [2, 3, 50]}, tool="spans")
    run = Path(before.save_path)
    train(before, pool, 1, 4, doomed=3)
    killed = f"step_000003/{MANIFEST_NAME}"
    assert next(not_whole(run)).fate == "begun"
    assert {Path(entry.path).parent.name for entry in not_whole(run)} == {"step_000003"}
    assert read_starts(run)[0].end_ns is None

    train(after, pool, 3, 4)
    first, second = read_starts(run)
    assert [ProfilingConfig.from_any(start.config) for start in (first, second)] == [before, after]
    assert [later.config for later in first.later_starts] == [second.config]
    assert (second.first_step, second.last_step, second.never_came) == (3, 4, [50])
    assert [read_manifest(folder).start for folder in sorted(run.glob("step_*"))] == [1, 1, 2]
    never, left, *_ = not_whole(run)
    assert never.reason == (
        "step 50 of schedule.steps never came; start 2 of the run ran from step 3 to step 4"
    )
    assert (never.path, left.path, left.fate) == ("run.2.json", killed, "begun")

    assert main(["recover", str(run / "step_000003")]) == 0
    assert main(["check", str(run)]) == 1
    assert f"cut         {killed}  the step was cut short: its process ended" in capfd.readouterr().out
    assert main(["check", str(run / "step_000003.2")]) == 0
