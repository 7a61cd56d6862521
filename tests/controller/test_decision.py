"""What is decided at a step's begin: row by row what the table of docs/watch.md says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from example_loops import settings
from fleet import TrainWorker

from verl_profiling import ConfigError, ProfilingCallback
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import Aim, Trigger
from verl_profiling.commands.trigger import Answer, find_job
from verl_profiling.controller.requests import Decision
from verl_profiling.manifest import Manifest
from verl_profiling.run_files import read_manifest
from verl_profiling.settings.schedule import Schedule, StepRange
from verl_profiling.step_summary import StepSummary


def asked(
    tmp_path: Path, at: int | None = None, aim: Aim | None = None, steps: int = 3, **given: Any
) -> Answer | None:
    """Run a loop without work that somebody asks for a capture; return what became of that."""
    given = {"schedule": {"steps": []}, "watch": {"enable": True}, "tool": "spans", **given}
    config = settings(save_path=str(tmp_path), **given)
    worker = TrainWorker()
    worker.set_up(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", worker)
    callback.on_train_begin()
    job = find_job(tmp_path) if at is not None else None
    demand = job.ask(aim or Aim(), 1, at) if job is not None else None
    for step in range(1, steps + 1):
        callback.on_step_begin(step)
        callback.on_step_end()
    callback.on_train_end()
    return job.answer(demand) if job is not None and demand is not None else None


def steps_of(folder: Path) -> list[str]:
    """Return the names of the step folders."""
    return sorted(path.name for path in folder.glob("step_*"))


def test_a_captured_step_says_that_the_schedule_wanted_it(tmp_path: Path, session: Session) -> None:
    """With the words of the settings, whether there is a watch or not."""
    asked(tmp_path, schedule={"every": 2}, watch={})
    trigger = read_manifest(tmp_path / "step_000002").trigger
    assert (trigger.kind, trigger.reason) == ("schedule", "schedule.every=2")


def test_nothing_is_captured_that_nobody_asks_for(tmp_path: Path, session: Session) -> None:
    """An empty list of steps, with the watch on, means that; without the watch it is refused."""
    asked(tmp_path)
    assert steps_of(tmp_path) == []
    with pytest.raises(ConfigError, match="nothing would be captured"):
        settings(schedule={"steps": []})


def test_a_step_that_is_asked_for_is_captured_as_it_is_aimed(tmp_path: Path, session: Session) -> None:
    """The manifest says who asked, and the worker recorded as they wished."""
    asked(tmp_path, 2, Aim(mode="discrete"))
    assert steps_of(tmp_path) == ["step_000002"]
    written = read_manifest(tmp_path / "step_000002")
    assert (written.trigger.kind, written.trigger.reason) == ("demand", "mode=discrete")
    assert [worker.mode for worker in written.workers] == ["discrete"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_worker_that_cannot_is_named_and_the_loop_goes_on(
    tmp_path: Path, session: Session, strict: bool
) -> None:
    """Also with strict settings: nobody planned this capture."""
    asked(tmp_path, 2, Aim(tools=("nsys",)), strict=strict)
    [worker] = read_manifest(tmp_path / "step_000002").workers
    assert worker.status == "skipped"
    assert worker.reason.startswith("asked for tools=nsys, which this process cannot: ")


def test_the_schedule_comes_first(tmp_path: Path, session: Session) -> None:
    """A step that it records is recorded as the settings say."""
    asked(tmp_path, 2, Aim(mode="discrete"), schedule={"steps": [2]})
    written = read_manifest(tmp_path / "step_000002")
    assert (written.trigger.kind, written.workers[0].mode) == ("schedule", "e2e")
    assert re.fullmatch(
        r"schedule\.steps=\(2,\); besides asked for by .*: mode=discrete", written.trigger.reason
    )


def test_a_person_comes_before_the_watch_which_waits(tmp_path: Path, session: Session) -> None:
    """One capture a step: the watch gets the next one."""

    class Noticing:
        """Asks for what begins next, once."""

        asked = False

        def step_begins(self, step: int) -> None: ...

        def concluded(self, manifest: Manifest) -> None: ...

        def listen(self, summary: StepSummary) -> None: ...

        def asks(self, step: int, scheduled: bool) -> Decision | None:
            if step < 2 or self.asked:
                return None
            self.asked = True
            trigger = Trigger(kind="anomaly", reason="it is slow")
            return Decision(StepRange(step, step), trigger, Aim(mode="discrete"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("verl_profiling.controller.decision.Anomalies", lambda *_: Noticing())
        asked(tmp_path, 2, watch={"enable": True, "trigger": {}})
    found = [read_manifest(tmp_path / f"step_{step:06d}") for step in (2, 3)]
    assert [one.trigger.kind for one in found] == ["demand", "anomaly"]
    assert [one.workers[0].mode for one in found] == ["e2e", "discrete"]


def test_a_capture_that_goes_on_is_not_interrupted(tmp_path: Path, session: Session) -> None:
    """Who names a step inside of it is refused."""
    answer = asked(tmp_path, 2, steps=4, schedule={"steps": [1, 2, 3], "continuous": True})
    assert steps_of(tmp_path) == ["step_000001"]
    assert read_manifest(tmp_path / "step_000001").steps == [1, 2, 3]
    assert answer is not None
    assert "was part of another capture" in answer.reason


def test_a_warm_up_gives_way(tmp_path: Path, session: Session) -> None:
    """It would be discarded."""
    asked(tmp_path, 1, steps=2, schedule={"warmup": 1, "wait": 0, "active": 1, "repeat": 1})
    assert steps_of(tmp_path) == ["step_000001", "step_000002"]


def test_limits_hold_for_whoever_asks(tmp_path: Path, session: Session) -> None:
    """Who asked is told that there is no room."""
    answer = asked(tmp_path, 2, limits={"min_free_bytes": "1000000TB"})
    assert steps_of(tmp_path) == []
    assert answer is not None
    assert (answer.state, "min_free_bytes" in answer.reason) == ("refused", True)


def test_an_empty_schedule_has_words_and_no_end() -> None:
    """A capture may always come."""
    schedule = Schedule(steps=())
    assert schedule.in_words() == "schedule.steps is empty: only what is asked for"
    assert schedule.step_range(3) is None
