"""The work given to a stage: what is recorded of it, and that wrong facts cost only themselves."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings
from msgspec.structs import replace

from verl_profiling import ProfilingCallback, stage
from verl_profiling.analysis import open_step
from verl_profiling.capture import work as capture_work
from verl_profiling.capture.stage_spans import add_work
from verl_profiling.manifest import Work
from verl_profiling.testing import record_step
from verl_profiling.workers import CaptureMixin

SPANS = settings(tool="spans")
LENGTHS = [3, 5, 2]
OF_LENGTHS = Work(samples=3, tokens=10, tokens_squared=38)


def recorded_work(tmp_path: Path, **facts: Any) -> Work | None:
    with record_step(SPANS, tmp_path) as recorded, stage("update_actor").given(**facts):
        pass
    [span] = recorded.result.stages
    return span.work


def test_work_is_beside_the_span_of_its_run(tmp_path: Path) -> None:
    """Facts by name, or lengths as a list or a tensor; a stage without facts has none."""
    import torch

    assert recorded_work(tmp_path / "1", tokens=7, samples=2) == Work(samples=2, tokens=7)
    assert recorded_work(tmp_path / "2", lengths=LENGTHS) == OF_LENGTHS
    assert recorded_work(tmp_path / "3", lengths=torch.tensor(LENGTHS)) == OF_LENGTHS
    assert recorded_work(tmp_path / "4") is None


def test_work_of_a_part_is_added_to_the_open_stages_around_it(tmp_path: Path) -> None:
    """The plugin of a trainer adds each mini-batch; what one of two lacks is unknown."""
    with record_step(SPANS, tmp_path) as recorded, stage("update_actor"):
        for number in (2, 3):
            with stage("mini_batch"):
                add_work({"micro_batches": number}, LENGTHS)
        with stage("empty"):
            pass
    whole, *parts, empty = [span.work for span in recorded.result.stages]
    assert [part and part.micro_batches for part in parts] == [2, 3]
    assert whole == Work(samples=6, tokens=20, tokens_squared=76, micro_batches=5)
    assert empty is None
    assert whole + OF_LENGTHS == Work(samples=9, tokens=30, tokens_squared=114)


def test_facts_of_user_code_stand_and_the_parts_add_the_others(tmp_path: Path) -> None:
    """A stage with ``given(samples=)`` around the work of a trainer keeps that number."""
    with record_step(SPANS, tmp_path) as recorded, stage("update_actor").given(samples=3):
        for number in (2, 3):
            add_work({"micro_batches": number}, LENGTHS)
    [span] = recorded.result.stages
    assert span.work == Work(samples=3, tokens=20, tokens_squared=76, micro_batches=5)


@pytest.mark.parametrize(
    ("facts", "left", "said"),
    [
        ({"tokens": -1, "samples": 2}, Work(samples=2), "tokens is left out of its work"),
        ({"tokens": math.nan}, None, "tokens is left out"),
        ({"samples": "many"}, None, "samples is left out"),
        ({"tokens_squared": 1e300}, None, "tokens_squared is left out"),
        ({"lengths": [4, -4]}, None, "lengths is left out"),
        ({"lengths": 4}, None, "lengths is left out"),
        ({"lengths": LENGTHS, "samples": 4}, Work(samples=4), "3 samples, and samples=4 was"),
        ({"lengths": LENGTHS, "advantages": [1, 0]}, OF_LENGTHS, "advantages is left out"),
        ({"lengths": LENGTHS, "masks": [1, 0, math.nan]}, OF_LENGTHS, "masks is left out"),
        (
            {"lengths": LENGTHS, "masks": [1, 0, 1], "tasks": ["a"]},
            replace(OF_LENGTHS, lessons={"": {"": 5, "masked": 5}}),
            "tasks is left out",
        ),
        ({"lengths": LENGTHS, "reasons": 3}, OF_LENGTHS, "reasons is left out"),
        ({"samples": 2, "advantages": [1, 0]}, Work(samples=2), "2 of them, and 0 lengths"),
    ],
)
def test_wrong_facts_are_left_out_and_said_once(
    facts: dict[str, Any],
    left: Work | None,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Negative, no number, beyond all bounds, or of another length: user code goes on."""
    monkeypatch.setattr(capture_work, "_logged", set())
    with caplog.at_level(logging.WARNING):
        for number in (1, 2):
            assert recorded_work(tmp_path / str(number), **facts) == left
    [line] = [record.message for record in caplog.records]
    assert line.startswith("stage 'update_actor': ")
    assert said in line


class Worker(CaptureMixin):
    def __init__(self, rank: int) -> None:
        self.init_capture(SPANS, role="actor", rank=rank, world_size=1)


def test_the_report_has_the_work_by_worker_and_stage(tmp_path: Path) -> None:
    """Runs of a stage are summed; the loop's own stages count, too; nothing raises when idle."""
    config = settings(tool="spans", save_path=str(tmp_path), schedule={"steps": [2]})
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", [Worker(0)])
        for step in (1, 2):
            profiling.on_step_begin(step)
            with profiling.stage("reward").given(samples=3):
                pass
            for _ in range(2):
                with stage("update_actor").given(lengths=LENGTHS, micro_batches=2):
                    pass
            profiling.on_step_end()
        folder = profiling.last_folder
    assert folder is not None
    rows = {(row.worker, row.stage): row for row in open_step(folder).report().work}
    assert rows.keys() == {("controller", "reward"), ("actor_rank0", "update_actor")}
    row = rows["actor_rank0", "update_actor"]
    assert (row.runs, row.samples, row.tokens, row.tokens_squared) == (2, 6, 20, 76)
    assert row.micro_batches == 4
    assert rows["controller", "reward"].tokens is None
