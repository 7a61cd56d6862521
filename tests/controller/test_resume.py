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
from verl_profiling.report.check import Checked, check
from verl_profiling.run_files import read_run


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
    return (entry for entry in check(run).artifacts if entry.status != "ok")


@pytest.mark.timeout(120)
def test_a_run_that_was_killed_and_resumed_explains_itself(
    tmp_path: Path, pool: Pool, capfd: pytest.CaptureFixture[str]
) -> None:
    """The step it died in; the resumed run is one of its own, with its settings and what never came."""
    before = configured(tmp_path, run_id="r", schedule={"steps": [2, 3, 50]})
    after = configured(tmp_path, run_id="r", schedule={"steps": [2, 3, 50]}, tool="spans")
    run, resumed = Path(before.save_path), Path(before.save_path) / "run_2"
    train(before, pool, 1, 4, doomed=3)
    assert next(not_whole(run)).status == "begun"
    assert {Path(entry.path).parent.name for entry in not_whole(run)} == {"step_000003"}
    first = read_run(run)
    assert first is not None
    assert first.end_ns is None

    train(after, pool, 3, 4)
    second = read_run(resumed)
    assert second is not None
    assert [ProfilingConfig.from_any(one.config) for one in (first, second)] == [before, after]
    assert (second.run_id, second.first_step, second.last_step, second.never_came) == ("r", 3, 4, [50])
    assert [folder.name for folder in sorted(resumed.glob("step_*"))] == ["step_000003"]
    [never] = not_whole(resumed)
    assert never.reason == "step 50 of schedule.steps never came; the loop ran from step 3 to step 4"
    assert main(["check", str(run / "step_000003")]) == 1
    assert "killed: its capture began" in capfd.readouterr().out
    assert main(["check", str(resumed / "step_000003")]) == 0
