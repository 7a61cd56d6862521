"""What the watch asks for by itself: when, aimed at whom, and when it does not."""

from __future__ import annotations

import logging

import pytest
from quiet_steps import account, longer

from verl_profiling.aim import Aim
from verl_profiling.controller.anomalies import Anomalies
from verl_profiling.controller.decision import Decision
from verl_profiling.errors import ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import Manifest
from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_account import StepAccount

SLOW = {"rollout2_rank0": 2.5}


class Loop:
    """A loop whose watch tells all in time; it notes what is asked of it."""

    def __init__(self, options: Anomaly | None = None, allowed: bool = True) -> None:
        self.reads = 0
        self.allowed = allowed
        self.step = 0
        self.anomalies = Anomalies(options or Anomaly(), self.read_soon, self.check)

    def read_soon(self) -> None:
        """Count."""
        self.reads += 1

    def check(self, aim: Aim) -> None:
        """Refuse it, if told to."""
        if not self.allowed:
            raise ConfigError("roles", "no workers were added as 'rollout'")

    def goes(self, *accounts: StepAccount, scheduled: bool = False) -> Decision | None:
        """End a step with these accounts; return what is asked for when the next one begins."""
        for each in accounts:
            self.anomalies.listen(each)
            self.step = each.step
        self.anomalies.step_begins(self.step + 1)
        return self.anomalies.asks(self.step + 1, scheduled)

    def quiet(self, steps: int = 30) -> int:
        """Let quiet steps pass; return the number of the next."""
        for step in range(self.step + 1, self.step + 1 + steps):
            assert self.goes(account(step)) is None
        return self.step + 1

    def captures(self, decision: Decision) -> None:
        """Make the capture that is asked for."""
        step = decision.step_range.first
        self.anomalies.begun(decision.trigger, f"step_{step:06d}")
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


def test_the_next_step_is_captured_of_the_suspect_and_its_peer() -> None:
    """By stage, where it is a stage that is slow; the trigger says all that was noticed."""
    loop = Loop()
    step = loop.quiet()
    decision = loop.goes(account(step, slow=SLOW))
    assert decision is not None
    assert (decision.step_range.first, decision.step_range.last) == (step + 1, step + 1)
    assert decision.aim == Aim(mode="discrete", roles=("rollout",), ranks=(2, 1), stages=("rollout",))
    assert (decision.trigger.kind, decision.trigger.noticed) == ("anomaly", step)
    assert decision.trigger.suspects == ["rollout2_rank0"]
    assert loop.goes(account(step + 1)) is None


def test_a_step_that_is_slow_is_captured_whole() -> None:
    """Nobody stands out, so it is captured as the settings say."""
    loop = Loop()
    step = loop.quiet()
    decision = loop.goes(account(step, {stage: 1.8 * usual for stage, usual in longer("rollout", 1).items()}))
    assert decision is not None
    assert (decision.trigger.sign, decision.aim) == ("slow_step", None)


def test_workers_are_read_at_once_and_waited_for_one_step() -> None:
    """The capture is of the step after their answer; without an answer it is made all the same, not aimed."""
    for answered in (True, False):
        loop = Loop()
        for step in range(1, 31):
            assert loop.goes(account(step, read=False)) is None
        assert loop.reads == 0
        assert loop.goes(account(31, slow=SLOW, read=False)) is None
        assert loop.reads == 1
        late = [account(31, slow=SLOW)] if answered else []
        decision = loop.goes(account(32, slow=SLOW, read=False), *late)
        assert decision is not None
        assert (decision.aim is not None) == answered
        assert decision.trigger.noticed == 31


def test_after_a_capture_the_watch_asks_for_none(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever asked for that one; the refusal is in the log, with the setting."""
    loop = Loop(Anomaly(cooldown=10))
    step = loop.quiet()
    decision = loop.goes(account(step, slow=SLOW))
    assert decision is not None
    loop.captures(decision)
    step = loop.quiet(5)
    with caplog.at_level(logging.WARNING):
        assert loop.goes(account(step, longer("reward", 9))) is None
    assert "watch.trigger.cooldown" in caplog.text
    step = loop.quiet(10)
    assert loop.goes(account(step, longer("update_actor", 9))) is not None


def test_the_watch_asks_for_so_many_and_no_more(caplog: pytest.LogCaptureFixture) -> None:
    """``max_captures`` counts what was made of what it asked for."""
    loop = Loop(Anomaly(cooldown=0, max_captures=2))
    step = loop.quiet()
    for stage, made in (("rollout", True), ("reward", True), ("update_actor", False)):
        decision = loop.goes(account(step, longer(stage, 9)))
        assert (decision is not None) == made
        if decision is not None:
            loop.captures(decision)
        step = loop.quiet()
    assert "watch.trigger.max_captures" in caplog.text


def test_a_scheduled_capture_says_what_the_watch_noticed() -> None:
    """It is made as the schedule has it, even right after another one."""
    loop = Loop()
    step = loop.quiet()
    decision = loop.goes(account(step, slow=SLOW), scheduled=True)
    assert decision is not None
    assert (decision.aim, decision.trigger.sign) == (None, "slow_stage")


def test_an_aim_that_cannot_be_had_costs_no_capture() -> None:
    """It is made as the settings say."""
    loop = Loop(allowed=False)
    step = loop.quiet()
    decision = loop.goes(account(step, slow=SLOW))
    assert decision is not None
    assert decision.aim is None
