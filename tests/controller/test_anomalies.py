"""What the watch asks for by itself: when, aimed at whom, and when it does not."""

from __future__ import annotations

import json
import logging
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import ray
from example_loops import settings
from fleet import Agents, Engine
from quiet_steps import longer, summary
from test_callback import configured

from verl_profiling import ProfilingCallback, ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.capture_request import CaptureSelection, Trigger
from verl_profiling.cli import main
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import read_watch_log
from verl_profiling.identity import ProcessId, WorkerIdentity
from verl_profiling.manifest import Manifest, RunInfo
from verl_profiling.settings.config import Anomaly
from verl_profiling.settings.schedule import Decision, StepRange
from verl_profiling.watch.collectives import RecorderReading
from verl_profiling.watch.log_writer import WatchLog
from verl_profiling.watch.stage_numbers import exposed

SLOW = {"rollout2_rank0": 2.5}
RUN = RunInfo(run_id="r", begin_ns=1, process=ProcessId.current(), config={}, versions={}, end_ns=2)


class Loop:
    """A loop whose watch tells all in time; it notes what is asked of it."""

    def __init__(self, options: Anomaly | None = None, allowed: bool = True) -> None:
        self.allowed = allowed
        self.step = 0
        self.recorders = RecorderReading()
        self.anomalies = Anomalies(options or Anomaly(), self.check, self.recorders)

    def check(self, selection: CaptureSelection) -> None:
        if not self.allowed:
            raise ConfigError("roles", "no workers were added as 'rollout'")

    def goes(self, *summaries: StepSummary, scheduled: bool = False) -> Decision | None:
        """End a step with these summaries; return what is asked for when the next one begins."""
        for each in summaries:
            self.anomalies.listen(each)
            self.step = each.step
        self.anomalies.step_begins(self.step + 1)
        return self.anomalies.asks(self.step + 1, scheduled)

    def quiet(self, steps: int = 30) -> int:
        """Let quiet steps pass; return the number of the next."""
        for step in range(self.step + 1, self.step + 1 + steps):
            assert self.goes(summary(step)) is None
        return self.step + 1

    def is_slow(self, step: int, scheduled: bool = False, **given: Any) -> Decision | None:
        """End two steps that are alike; return what is asked for when the one after them begins."""
        assert self.goes(summary(step, **given)) is None
        return self.goes(summary(step + 1, **given), scheduled=scheduled)

    def captures(self, decision: Decision) -> None:
        step = decision.step_range.first
        self.anomalies.concluded(
            Manifest(
                run_id="r",
                capture_id="c",
                step=step,
                steps=[step],
                controller=WorkerIdentity(role="controller"),
                begin_ns=1,
                end_ns=2,
                trigger=decision.trigger,
            )
        )


def test_the_capture_waits_until_the_flight_recorder_names_the_last_rank(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All ranks leave the slow stage together; then the recorders tell who came last to it."""
    loop = Loop()
    step = loop.quiet()
    loop.recorders.exist = True
    assert loop.is_slow(step, times=longer("update_actor", 2.0)) is None
    assert loop.goes(summary(step + 2, longer("update_actor", 2.0))) is None
    late = {"actor_rank1": 2.0}
    assert loop.goes(summary(step + 3, slow=late)) is None, "once may be by chance"
    decision = loop.goes(summary(step + 4, slow=late))
    assert decision is not None
    assert decision.trigger.suspects == ["actor_rank1"]
    assert decision.selection is not None
    assert decision.selection.ranks == (1, 2)
    assert f"longest there in step {step + 4}: actor_rank1" in caplog.text
    for later in range(step + 5, step + 12):  # it is named already
        loop.goes(summary(later, slow=late))
    assert "actor_rank1 was in stage" not in caplog.text


def test_an_engine_is_recorded_in_its_window_whatever_its_own_stage_is_called() -> None:
    """The servers of verl have one that lasts while they generate."""

    def generating(step: int, slow: dict[str, float] | None = None) -> StepSummary:
        found = summary(step, slow=slow)
        found.workers[:] = [
            msgspec.structs.replace(use, stages=use.stages.replace("rollout", "generate"))
            for use in found.workers
        ]
        return msgspec.structs.replace(found, exposed=exposed(found))

    loop = Loop()
    for step in range(1, 31):
        assert loop.goes(generating(step)) is None
    assert loop.goes(generating(31, SLOW)) is None
    decision = loop.goes(generating(32, SLOW))
    assert decision is not None
    assert decision.selection is not None
    assert decision.selection.stages == ("generate", "rollout")

    assert settings().for_role("rollout", decision.selection).enable


def test_a_loop_that_counts_anew_is_captured_again() -> None:
    """The epoch before ended with a capture: neither that nor its number holds up the next one."""
    loop = Loop()
    decision = loop.is_slow(loop.quiet(), slow=SLOW)
    assert decision is not None
    loop.captures(decision)
    last = loop.step
    loop.step = 0
    for step in range(1, 25):
        slow = SLOW if step > 21 else None
        later = summary(last + step, slow=slow)
        decision = loop.goes(msgspec.structs.replace(later, step=step))
    assert decision is not None
    assert decision.step_range.first == 25


def test_what_is_noticed_soon_after_a_capture_is_captured_when_it_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whoever asked for the capture before; the wait is in the log once, with the setting."""
    loop = Loop(Anomaly(cooldown=10))
    step = loop.quiet()
    decision = loop.is_slow(step, slow=SLOW)
    assert decision is not None
    loop.captures(decision)
    captured = decision.step_range.first
    step = loop.quiet(5)
    with caplog.at_level(logging.WARNING):
        assert loop.is_slow(step, times=longer("reward", 9)) is None
        while (decision := loop.goes(ended := summary(loop.step + 1))) is None:
            assert ended.waits.startswith(
                f"step {captured} was captured, and the watch pauses for 10 steps"
            )
            assert loop.step < captured + 20
    assert caplog.text.count("watch.trigger.cooldown") == 1
    assert (decision.step_range.first, decision.trigger.noticed) == (captured + 11, step + 1)
    assert decision.trigger.stage == "reward"


@pytest.mark.parametrize("seed", range(20))
def test_the_cooldown_is_the_watch_s_own(seed: int) -> None:
    """Neither a person's capture, nor the schedule's,
    nor that of a false alarm silences the watch.
    """
    drawn = random.Random(seed)
    loop = Loop(Anomaly(cooldown=drawn.randint(20, 80)))
    step = loop.quiet(drawn.randint(20, 60))
    kind = drawn.choice(["demand", "schedule", "false alarm", "anomaly"])
    if kind in ("demand", "schedule"):
        loop.captures(Decision(StepRange(step, step), Trigger(kind=kind), None))
    else:
        alarm = loop.is_slow(step, slow=SLOW)
        assert alarm is not None
        loop.captures(alarm)
        was_there = SLOW if kind == "anomaly" else None
        step = alarm.step_range.first
        assert loop.goes(summary(step, slow=was_there, captured=f"step_{step:06d}")) is None
    first = loop.quiet(drawn.randint(1, 15))
    slow = longer(drawn.choice(["rollout", "update_actor"]), 4)
    decisions = [loop.goes(summary(step, slow)) for step in range(first, first + 4)]
    assert any(decisions) == (kind != "anomaly")


def test_what_was_noticed_is_in_the_log_with_the_reason_against_a_capture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And in top and on the page of the run;
    one that was captured is not said to be not captured.
    """
    loop, log = Loop(Anomaly(max_captures=1)), WatchLog(tmp_path)
    decision = loop.is_slow(loop.quiet(), slow=SLOW)
    assert decision is not None
    loop.captures(decision)
    loop.quiet()
    for step in range(loop.step + 1, loop.step + 9):
        loop.goes(ended := summary(step, longer("reward", 9)))
        log(ended)
    [noticed] = [line for line in read_watch_log(tmp_path) if line.noticed]
    assert noticed.noticed.sign == "slow_stage"
    assert noticed.noticed.noticed == noticed.step
    assert noticed.waits == "the watch has requested 1 captures (watch.trigger.max_captures)"
    write_json_atomically(tmp_path / "run.json", RUN)
    assert main(["top", str(tmp_path), "--once"]) == main(["report", str(tmp_path), "--save"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert (
        shown.count(f"noticed, not captured: {noticed.noticed.reason} (waits: the watch has") == 2
    )
    page = (tmp_path / "index.html").read_text()
    assert noticed.noticed.reason.capitalize() in page
    assert f"not captured: {noticed.waits}" in page


def test_of_several_that_wait_the_last_is_captured(caplog: pytest.LogCaptureFixture) -> None:
    """The log says of the other that it is not."""
    loop = Loop(Anomaly(cooldown=60))
    decision = loop.is_slow(loop.quiet(), slow=SLOW)
    assert decision is not None
    loop.captures(decision)
    first = loop.quiet(5)
    assert loop.is_slow(first, times=longer("reward", 9)) is None
    second = loop.quiet()
    with caplog.at_level(logging.WARNING):
        assert loop.is_slow(second, times=longer("update_actor", 9)) is None
    assert f"watch: it takes the place of the anomaly of step {first + 1}" in caplog.messages
    while (decision := loop.goes(summary(loop.step + 1))) is None:
        assert loop.step < second + 60
    assert decision.trigger.stage == "update_actor"


def test_the_watch_asks_for_so_many_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """``max_captures`` counts what was made of what it asked for."""
    loop = Loop(Anomaly(cooldown=0, max_captures=2))
    step = loop.quiet()
    for name, made in (("rollout", True), ("reward", True), ("update_actor", False)):
        decision = loop.is_slow(step, times=longer(name, 9))
        assert (decision is not None) == made
        if decision is not None:
            loop.captures(decision)
        step = loop.quiet()
    assert "watch.trigger.max_captures" in caplog.text


def test_a_scheduled_capture_says_what_the_watch_noticed() -> None:
    """It is made as the schedule has it, even right after another one."""
    loop = Loop()
    step = loop.quiet()
    decision = loop.is_slow(step, slow=SLOW, scheduled=True)
    assert decision is not None
    assert (decision.selection, decision.trigger.sign) == (None, "slow_stage")


def test_an_aim_that_cannot_be_had_costs_no_capture() -> None:
    """A step that is slow everywhere is captured whole, too."""
    loop = Loop(allowed=False)
    step = loop.quiet()
    decision = loop.is_slow(step, slow=SLOW)
    assert decision is not None
    assert decision.selection is None
    loop = Loop()
    step = loop.quiet()
    times = {"rollout": 850.0, "reward": 180.0, "update_actor": 570.0, "update_weights": 190.0}
    decision = loop.goes(*(summary(at, times) for at in range(step, step + 8)))
    assert decision is not None
    assert (decision.trigger.sign, decision.selection) == ("slow_step", None)


def watched(folder: Path, **trigger: Any) -> ProfilingConfig:
    """Return settings whose watch asks for captures by one sign, and that have no schedule."""
    signs = {"window": 6, "slow_step": None, "leader": None, "memory": None, **trigger}
    return configured(
        folder,
        schedule={"steps": []},
        watch={"enable": True, "every": 3, "trigger": signs},
        tool="spans",
    )


def captured(profiling: ProfilingCallback, step_of: Callable[[bool], None]) -> Path:
    """Run steps, slow ones from the tenth on, until one was captured; return its folder."""
    with profiling:
        for step in range(1, 60):
            profiling.on_step_begin(step)
            step_of(step >= 10)
            profiling.on_step_end()
            if profiling.last_folder is not None:
                return profiling.last_folder
    raise AssertionError("no step was captured")


def test_a_replica_that_is_suspected_is_captured_with_its_peer(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the process that runs the trajectories, which waits for it:
    the report compares the engines.
    """
    config = watched(tmp_path, slow_stage=3.0)
    engines = [ray.remote(num_cpus=0)(Engine).remote() for _ in range(2)]
    agents = ray.remote(num_cpus=0)(Agents).remote()
    ray.get(
        [agents.set_up.remote(config), *(e.set_up.remote(config, i) for i, e in enumerate(engines))]
    )
    profiling = ProfilingCallback(config)
    profiling.add_rollout(engines)
    profiling.add_workers("agent_loop", [agents])

    def run_step(slow: bool) -> None:
        profiling.on_rollout_begin()
        ray.get(agents.run.remote(engines, [0.06, 1.0 if slow else 0.06]))
        profiling.on_rollout_end()

    folder = captured(profiling, run_step)
    for actor in (*engines, agents):
        ray.kill(actor)
    manifest = read_manifest(folder)
    assert manifest.trigger.suspects == ["rollout1_rank0", "agent_loop_rank0"]
    assert manifest.trigger.peers == ["rollout0_rank0"]
    recorded = {worker.name for worker in manifest.workers if worker.status == "ok"}
    assert recorded == {"agent_loop_rank0", "rollout0", "rollout1"}
    assert main(["report", str(folder), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["suspects"]
    more = {
        row["suspect"]: row["value"] - row["peer_value"] for row in rows if row["kind"] == "stage"
    }
    assert list(more) == ["rollout1_rank0"]
    assert more["rollout1_rank0"] > 0.3


@pytest.mark.parametrize("trigger", [None, {"slow_step": None, "slow_stage": None}])
def test_nothing_is_captured_where_the_watch_may_not_ask(
    tmp_path: Path, session: Session, trigger: dict[str, None] | None
) -> None:
    """Without ``watch.trigger``, or with its signs switched off,
    there is only what people ask for.
    """
    watch = {"enable": True, "trigger": trigger}
    profiling = ProfilingCallback(
        settings(save_path=str(tmp_path), schedule={"steps": []}, watch=watch)
    )
    with profiling:
        for step in range(1, 16):
            profiling.on_step_begin(step)
            with profiling.stage("update"):
                time.sleep(0.02 if step > 12 else 0.001)
            profiling.on_step_end()
    assert not list(tmp_path.glob("step_*"))
