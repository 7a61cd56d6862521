"""A torch recording that would not fit, as an earlier one has shown, is narrowed, and says so."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from example_loops import settings, spans, train

from verl_profiling import stage
from verl_profiling.capture.session import Session
from verl_profiling.manifest import CaptureResult
from verl_profiling.testing import record_step
from verl_profiling.tools.process_memory import give_back, own_bytes
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool

pytestmark = pytest.mark.skipif(own_bytes() is None, reason="only Linux tells the memory of a process")

ONE = torch.ones(1)


@pytest.fixture(autouse=True)
def _heap_of_one_piece() -> None:
    """What earlier tests left is given back, so that it costs no time to look at."""
    give_back()


def work(events: int) -> None:
    """Make so many events."""
    for _ in range(events):
        torch.add(ONE, ONE)


def recorded(folder: Path, session: Session, mini_batches: int, **given: Any) -> CaptureResult:
    """Capture a step of mini-batches of 10,000 events."""
    with record_step(settings(**given), folder) as step:
        for number in range(mini_batches):
            with stage(f"mini_batch_{number}"):
                work(10_000)
            session.step()
    assert step.result is not None
    return step.result


@pytest.mark.filterwarnings("ignore:Profiler won't be using warmup")
def test_fewer_mini_batches_are_recorded_than_the_first_time(tmp_path: Path, session: Session) -> None:
    """The first capture ends between two of them; the next one is whole, of fewer, and has a note."""
    first = recorded(tmp_path / "1", session, 8, limits={"max_events": 50_000})
    assert first.status == "truncated"
    assert first.notes == []
    second = recorded(tmp_path / "2", session, 8, limits={"max_events": 50_000})
    assert (second.status, second.artifacts[0].status) == ("ok", "ok")
    [note] = second.notes
    assert note.startswith("actor_rank0.torch.json.gz: recorded with ")
    assert " of 8 mini-batches: the last one would have had about " in note
    assert "more than limits.max_events=50000" in note
    trace = tmp_path / "2" / "actor_rank0.torch.json.gz"
    kept = [number for number in range(8) if spans(trace, f"mini_batch_{number}")]
    assert kept in ([0], [0, 1], [0, 1, 2, 3])
    assert len(spans(trace, "aten::add")) == len(kept) * 10_000


def test_a_recording_that_fitted_is_recorded_again_as_it_was(tmp_path: Path, session: Session) -> None:
    """Options and mini-batches stay, as long as the limits allow it."""
    for number in (1, 2):
        result = recorded(tmp_path / str(number), session, 2, limits={"max_events": 50_000})
        assert (result.status, result.notes) == ("ok", [])


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_without_mini_batches_shapes_are_left_out(tmp_path: Path, session: Session, mode: str) -> None:
    """Memory that is enough without shapes is enough to record; each stage has a prediction of its own."""
    config = settings(mode=mode, tools={"torch": {"shapes": True}}, limits={"memory_bytes": "80MB"})
    for number in (1, 2):
        with record_step(config, tmp_path / str(number)) as step:
            with stage("long"):
                work(40_000)
                time.sleep(0.4)
            if mode == "discrete":
                with stage("short"):
                    train()
        assert step.result is not None
        notes = step.result.notes
        assert len(notes) == number - 1
    assert "recorded with no shapes" in notes[0]
    assert ": the last one would have had about " in notes[0]
    name = "actor_rank0.torch.json.gz" if mode == "e2e" else "actor_rank0.long.torch.json.gz"
    events = spans(tmp_path / "2" / name, "aten::add")
    assert len(events) == 40_000
    assert "Input Dims" not in events[0]["args"]
    if mode == "discrete":
        assert spans(tmp_path / "2" / "actor_rank0.short.torch.json.gz", "aten::addmm")[0]["args"][
            "Input Dims"
        ]


def test_what_nothing_ended_in_time_is_not_recorded_again(tmp_path: Path, session: Session) -> None:
    """With ``memory`` one long stage goes far beyond the limit: the next one is skipped, with the numbers."""
    config = settings(tools={"torch": {"memory": True}}, limits={"max_events": 10_000})
    for number in (1, 2):
        with record_step(config, tmp_path / str(number)) as step, stage("long"):
            work(20_000)
            time.sleep(0.4)
    assert step.result is not None
    [artifact] = step.result.artifacts
    assert (step.result.status, artifact.status) == ("skipped", "skipped")
    assert artifact.reason.startswith(
        "not recorded, because nothing ended the last one in time: the last one "
    )
    assert "limits.max_events=10000" in artifact.reason
    assert [path.name for path in (tmp_path / "2").iterdir()] == ["actor_rank0.result.json"]


def test_the_order_of_narrowing() -> None:
    """Fewer mini-batches, then no stacks, then no shapes: each step has what the one before had."""
    tool = TorchTool(TorchOptions(stack=True, shapes=True))
    steps = list(tool.narrowed(5))
    assert [words for _, _, words in steps] == [
        "2 of 5 mini-batches",
        "1 of 5 mini-batches",
        "1 of 5 mini-batches, no stacks",
        "1 of 5 mini-batches, no stacks, no shapes",
    ]
    assert [round(share, 3) for _, share, _ in steps] == [0.4, 0.2, 0.067, 0.067]
    last = steps[-1][0].options
    assert (last.stack, last.shapes, last.mini_batches and last.mini_batches.active) == (False, False, 1)
    assert list(TorchTool(TorchOptions()).narrowed(0)) == []
