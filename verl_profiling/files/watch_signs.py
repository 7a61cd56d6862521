"""The signs by which the watch notices an anomaly, e.g. a slow stage, with what follows from each.

A new sign is a row of :data:`SIGNS`, its threshold of the same name in ``watch.trigger``, and the
test that notices it in ``watch/sign_tests.py``. All other modules read the row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from verl_profiling.capture_request import Trigger
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.units import byte_size, duration, listed

SLOW_STEP, SLOW_STAGE, SLOW_SPAN = "slow_step", "slow_stage", "slow_span"
LEADER, MEMORY = "leader", "memory"

HELD = "held"
"""Kind of memory (``Trigger.memory``): what a process's device holds; without one, the process."""

IN_NO_STAGE = "(in no stage)"
"""Name of the time of a step outside all stages."""


def _of_step(_: Trigger, step: StepSummary) -> float | None:
    return step.seconds


def _of_stage(trigger: Trigger, step: StepSummary) -> float | None:
    return step.exposed_s.get(trigger.stage)


def _of_span(trigger: Trigger, step: StepSummary) -> float | None:
    for total in step.spans:
        if total.name == trigger.span and total.runs:
            return total.seconds / total.runs
    return None


def _of_leads(trigger: Trigger, step: StepSummary) -> float | None:
    # A stage without a leader may be even, or end in a collective that hides who was late.
    led = [row for row in step.exposed if row.name == trigger.stage and row.leader]
    if not led or not step.duration_ns:
        return None
    leads_ns = [row.lead_ns for row in led if row.leader in trigger.suspects]
    return sum(leads_ns) / step.duration_ns


def _of_memory(trigger: Trigger, step: StepSummary) -> float | None:
    # A row is of the largest process of its role, so only that one's memory is known.
    for row in step.memory:
        if trigger.memory == HELD and [row.lane] == trigger.suspects:
            return row.held_bytes
        if row.processes == 1 and [row.lane] == trigger.suspects:
            return row.kinds.get(trigger.memory)
    return None


def _unknown(_: Trigger, __: StepSummary) -> float | None:
    return None


def _not_in_the_log(_: Trigger) -> str:
    return "it is not in the log"


def _not_the_largest(trigger: Trigger) -> str:
    if not trigger.suspects or not trigger.memory:  # of a machine, or of an earlier version
        return _not_in_the_log(trigger)
    return "in the last steps, the log has other processes of its role, which hold more"


def _no_leader(trigger: Trigger) -> str:
    return (
        f"in the last steps, the log has no leader of {trigger.stage}. "
        "A capture of its ranks shows who is late: verl-profiling trigger RUN"
    )


def ran_in(trigger: Trigger, step: StepSummary) -> bool:
    """Return whether the stage or the span of a trigger ran in a step."""
    if trigger.span:
        return any(total.name == trigger.span for total in step.spans)
    return not trigger.stage or trigger.stage in step.exposed_s


class Unit(NamedTuple):
    """Unit of the values of a sign.

    Attributes:
        text_of: A value as text.
        verb: Verb between the sign's subject and a value.
        usual: Word before the trigger's median; empty if that is of steps with the anomaly, too.
        seconds: Time (s) that a value costs in a step of a length (s); ``None`` if it costs none.
    """

    text_of: Callable[[float], str]
    verb: str
    usual: str
    seconds: Callable[[float, float], float] | None


SECONDS = Unit(duration, "took", "usually", lambda seconds, _: seconds)
SHARE = Unit(lambda share: f"{share:.1%} of the step", "is", "", lambda share, step: share * step)
BYTES = Unit(byte_size, "is", "before", None)


@dataclass(frozen=True)
class Sign:
    """A kind of anomaly.

    Attributes:
        value_in: The value of a later step that compares with the trigger's; ``None`` if unknown.
        subject: Name of what has the value, e.g. ``the stage rollout``.
        unit: Unit of the values.
        missing: Clause on why the value of later steps is unknown, and how to get it.
        is_of_loop: Whether the loop itself is slow, so that each later step shows if it lasts.
        is_of_process: Whether one process has the value, which the notice's reason names.
        of_stage: Whether only the stages inside the slow stage are captured, not the whole step.
        of_all: Whether all workers of a stage may cause it together: without a suspect, all are
            captured.
        of_ranks: Whether ranks that are late to collectives may cause it, also in no stage.
    """

    value_in: Callable[[Trigger, StepSummary], float | None]
    subject: Callable[[Trigger], str]
    unit: Unit = SECONDS
    missing: Callable[[Trigger], str] = _not_in_the_log
    is_of_loop: bool = False
    is_of_process: bool = False
    of_stage: bool = False
    of_all: bool = False
    of_ranks: bool = False


SIGNS = {
    SLOW_STEP: Sign(_of_step, lambda _: "the step", is_of_loop=True, of_ranks=True),
    SLOW_STAGE: Sign(
        _of_stage,
        lambda trigger: f"the stage {trigger.stage or IN_NO_STAGE}",
        is_of_loop=True,
        of_stage=True,
        of_all=True,
    ),
    SLOW_SPAN: Sign(_of_span, lambda trigger: f"a call of {trigger.span}", of_all=True),
    LEADER: Sign(
        _of_leads,
        lambda trigger: f"the lead of {listed(trigger.suspects)} in {trigger.stage}",
        SHARE,
        _no_leader,
        is_of_process=True,
        of_stage=True,
        of_ranks=True,
    ),
    MEMORY: Sign(_of_memory, lambda _: "memory", BYTES, _not_the_largest, is_of_process=True),
}
"""Signs by their names in ``watch.trigger``, in ``Trigger.sign`` and in messages."""

_NO_SIGN = Sign(_unknown, lambda _: "")


def sign_of(trigger: Trigger) -> Sign:
    """Return the sign of a trigger; one without effects for a schedule, or a newer version."""
    return SIGNS.get(trigger.sign, _NO_SIGN)


def usual_of(trigger: Trigger) -> float:
    """Return the value in the steps before an anomaly; 0 for a unit that has none."""
    return trigger.median if sign_of(trigger).unit.usual else 0.0
