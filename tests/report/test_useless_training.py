"""The seconds of training that taught nothing: advantages and masks, against a stopwatch."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from drawn_steps import Worker, drawn_inputs
from example_loops import settings
from msgspec.structs import replace
from step_folders import rewrite_worker

from verl_profiling import ProfilingCallback, stage
from verl_profiling.analysis import open_step
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Work
from verl_profiling.report.model import Report
from verl_profiling.workers import CaptureMixin

# Of each micro-batch: lengths, advantages, tokens that count, and tokens by what they taught
PLANTED = [
    ([300, 100], [0.5, -0.5], [200, 50], {}),
    ([300, 100], [0.0, 0.0], [200, 50], {"equal rewards": 400}),
    ([100, 300], [0.5, -0.5], [0, 50], {"masked": 100}),
    ([100, 300], [0.0, 0.0], [0, 50], {"masked": 100, "equal rewards": 300}),
    ([200, 200], None, None, {}),
]


class Actor(CaptureMixin):
    """A worker that takes 1 ms a token."""

    stopwatch: Counter[str]

    def update(self) -> None:
        self.stopwatch = Counter()
        with stage("update_actor"):
            for lengths, advantages, masks, nothing in 2 * PLANTED:
                batch = stage("micro_batch").given(
                    lengths=lengths, advantages=advantages, masks=masks
                )
                begun_s = time.monotonic()
                with batch:
                    time.sleep(sum(lengths) / 1e3)
                took_s = time.monotonic() - begun_s
                for cause, tokens in nothing.items():
                    self.stopwatch[cause] += took_s * tokens / sum(lengths)


def trained(folder: Path) -> tuple[Report, Actor]:
    config = settings(save_path=str(folder), tool="spans", schedule={"steps": [1]})
    actor = Actor()
    actor.init_capture(config, role="actor", rank=0)
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", [actor])
        profiling.on_step_begin(1)
        actor.update()
        profiling.on_step_end()
    [step] = folder.glob("step_*")
    return open_step(step).report(), actor


def test_the_training_that_taught_nothing_agrees_with_a_stopwatch(tmp_path: Path) -> None:
    """Within 2%; runs without advantages claim nothing, and have no part in the shares."""
    report, actor = trained(tmp_path)
    rows = {row.cause: row for row in report.useless_training}
    assert {cause: row.seconds for cause, row in rows.items()} == pytest.approx(
        dict(actor.stopwatch), rel=0.02
    )
    assert {cause: row.tokens for cause, row in rows.items()} == {
        "equal rewards": 1400,
        "masked": 400,
    }
    assert rows["masked"].stage == "update_actor"
    [finding] = [one for one in report.findings if one.rule == "training_for_nothing"]
    assert finding.share == pytest.approx(1800 / 3200, rel=0.1)
    assert finding.text.startswith(f"{finding.share:.0%} of update_actor (")
    shares = [f"{rows[cause].share:.0%} {cause}" for cause in ("equal rewards", "masked")]
    assert finding.text.endswith(f" taught nothing: {', '.join(shares)}.")


def test_runs_without_a_duration_taught_nothing_in_no_time(tmp_path: Path) -> None:
    """A run may be shorter than the clock's steps."""
    stages = [("update_actor", 2, 4), ("micro_batch", 3, 3, 1)]
    drawn_inputs(tmp_path, [("update_actor", 2, 4)], [Worker("actor", stages=stages)], 4)
    work = Work(samples=2, tokens=8, tokens_squared=40, lessons={"": {"equal rewards": 8}})
    [actor] = read_manifest(tmp_path).workers
    outer, inner = actor.stages
    rewrite_worker(tmp_path, "actor_rank0", stages=[outer, replace(inner, work=work)])
    [row] = open_step(tmp_path).report().useless_training
    assert (row.tokens, row.seconds, row.share) == (8, 0.0, 0.0)
