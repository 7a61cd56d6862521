"""What is decided at a step's begin: row by row what the table of docs/watch.md says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from example_loops import settings
from fleet import TrainWorker

from verl_profiling import ConfigError, ProfilingCallback
from verl_profiling.aim import Aim
from verl_profiling.capture.session import Session
from verl_profiling.controller.decision import Decision
from verl_profiling.manifest import Manifest
from verl_profiling.run_files import read_manifest
from verl_profiling.settings.schedule import Schedule, StepRange
from verl_profiling.trigger import Trigger


class Asking:
    """Asks for one step, once, with an aim."""

    def __init__(self, step: int, aim: Aim | None = None) -> None:
        self.step, self.aim = step, aim
        self.refusals: list[str] = []

    def step_begins(self, step: int) -> None: ...

    def begun(self, trigger: Trigger, folder: str) -> None: ...

    def concluded(self, manifest: Manifest) -> None: ...

    def train_ends(self) -> None: ...

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        if step != self.step:
            return None
        return Decision(StepRange(step, step), Trigger(kind="demand", reason="somebody asked"), self.aim)

    def refused(self, trigger: Trigger, why: str) -> None:
        self.refusals.append(why)


def run(callback: ProfilingCallback, steps: int = 3) -> None:
    """Run a loop without work."""
    callback.on_train_begin()
    for step in range(1, steps + 1):
        callback.on_step_begin(step)
        callback.on_step_end()
    callback.on_train_end()


def asked(tmp_path: Path, asker: Asking, **given: Any) -> ProfilingCallback:
    """Return a callback with a local actor, of which somebody asks something."""
    given = {"schedule": {"steps": []}, "watch": {"enable": True}, "tool": "spans", **given}
    config = settings(save_path=str(tmp_path), **given)
    worker = TrainWorker()
    worker.set_up(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", worker)
    assert callback._controller is not None
    callback._controller.decisions.askers.append(asker)
    return callback


def steps_of(folder: Path) -> list[str]:
    """Return the names of the step folders."""
    return sorted(path.name for path in folder.glob("step_*"))


def test_a_captured_step_says_that_the_schedule_wanted_it(tmp_path: Path, session: Session) -> None:
    """With the words of the settings, whether there is a watch or not."""
    run(asked(tmp_path, Asking(0), schedule={"every": 2}, watch={}))
    trigger = read_manifest(tmp_path / "step_000002").trigger
    assert (trigger.kind, trigger.reason) == ("schedule", "schedule.every=2")


def test_nothing_is_captured_that_nobody_asks_for(tmp_path: Path, session: Session) -> None:
    """An empty list of steps, with the watch on, means that; without the watch it is refused."""
    run(asked(tmp_path, Asking(0)))
    assert steps_of(tmp_path) == []
    with pytest.raises(ConfigError, match="nothing would be captured"):
        settings(schedule={"steps": []})


def test_a_step_that_is_asked_for_is_captured_as_it_is_aimed(tmp_path: Path, session: Session) -> None:
    """The manifest says who asked, and the worker recorded as they wished."""
    run(asked(tmp_path, Asking(2, Aim(mode="discrete"))))
    assert steps_of(tmp_path) == ["step_000002"]
    written = read_manifest(tmp_path / "step_000002")
    assert (written.trigger.kind, written.trigger.reason) == ("demand", "somebody asked")
    assert [worker.mode for worker in written.workers] == ["discrete"]


@pytest.mark.parametrize("strict", [False, True])
def test_a_worker_that_cannot_is_named_and_the_loop_goes_on(
    tmp_path: Path, session: Session, strict: bool
) -> None:
    """Also with strict settings: nobody planned this capture."""
    run(asked(tmp_path, Asking(2, Aim(tools=("nsys",))), strict=strict))
    [worker] = read_manifest(tmp_path / "step_000002").workers
    assert worker.status == "skipped"
    assert worker.reason.startswith("asked for tools=nsys, which this process cannot: ")


def test_the_schedule_comes_first(tmp_path: Path, session: Session) -> None:
    """A step that it records is recorded as the settings say."""
    run(asked(tmp_path, Asking(2, Aim(mode="discrete")), schedule={"steps": [2]}))
    written = read_manifest(tmp_path / "step_000002")
    assert (written.trigger.kind, written.workers[0].mode) == ("schedule", "e2e")
    assert written.trigger.reason == "schedule.steps=(2,); besides somebody asked"


class Waiting(Asking):
    """Asks from a step on, until it gets one."""

    def asks(self, step: int, scheduled: bool) -> Decision | None:
        if step < self.step:
            return None
        self.step = 1000
        return Decision(StepRange(step, step), Trigger(kind="anomaly", reason="it is slow"), self.aim)


def test_a_person_comes_before_the_watch_which_waits(tmp_path: Path, session: Session) -> None:
    """One capture a step: the watch gets the next one."""
    callback = asked(tmp_path, Asking(2))
    assert callback._controller is not None
    callback._controller.decisions.askers.append(Waiting(2, Aim(mode="discrete")))
    run(callback)
    found = [read_manifest(tmp_path / f"step_{step:06d}") for step in (2, 3)]
    assert [one.trigger.kind for one in found] == ["demand", "anomaly"]
    assert [one.workers[0].mode for one in found] == ["e2e", "discrete"]


def test_a_capture_that_goes_on_is_not_interrupted(tmp_path: Path, session: Session) -> None:
    """Who asks meanwhile gets the step after it."""
    callback = asked(tmp_path, Waiting(2), schedule={"steps": [1, 2, 3], "continuous": True})
    run(callback, 4)
    assert steps_of(tmp_path) == ["step_000001", "step_000004"]
    assert read_manifest(tmp_path / "step_000001").steps == [1, 2, 3]


def test_a_warm_up_gives_way(tmp_path: Path, session: Session) -> None:
    """It would be discarded."""
    run(asked(tmp_path, Asking(1), schedule={"warmup": 1, "wait": 0, "active": 1, "repeat": 1}), 2)
    assert steps_of(tmp_path) == ["step_000001", "step_000002"]


def test_limits_hold_for_whoever_asks(tmp_path: Path, session: Session) -> None:
    """Who asked is told that there is no room."""
    asker = Asking(2)
    run(asked(tmp_path, asker, limits={"min_free_bytes": "1000000TB"}))
    assert steps_of(tmp_path) == []
    [why] = asker.refusals
    assert "min_free_bytes" in why


def test_an_empty_schedule_has_words_and_no_end() -> None:
    """A capture may always come."""
    schedule = Schedule(steps=())
    assert schedule.in_words() == "schedule.steps is empty: only what is asked for"
    assert schedule.step_range(3) is None
