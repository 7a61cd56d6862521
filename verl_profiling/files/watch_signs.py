"""The signs by which the watch notices an anomaly, e.g. a slow stage, with what follows from each.

A new sign is a row of :data:`SIGNS`, its threshold of the same name in ``watch.trigger``, and the
test that notices it in ``watch/sign_tests.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from verl_profiling.capture_request import Trigger
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.units import byte_size, duration

SLOW_STEP, SLOW_STAGE, SLOW_SPAN = "slow_step", "slow_stage", "slow_span"
LEADER, MEMORY = "leader", "memory"

HELD = "held"
"""Kind of memory (``Trigger.memory``): what a process's device holds; without one, the process."""


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


@dataclass(frozen=True)
class Sign:
    """A kind of anomaly.

    Attributes:
        value_in: The value of a later step that compares with the trigger's; ``None`` if unknown.
        text_of: A value as text, with its unit.
        missing: Clause on why the value of later steps is unknown, and how to get it.
        is_of_loop: Whether the loop itself is slow, so that each later step shows if it lasts.
        of_stage: Whether only the stages inside the slow stage are captured, not the whole step.
        of_all: Whether all workers of a stage may cause it together: without a suspect, all are
            captured.
        of_ranks: Whether ranks that are late to collectives may cause it, also in no stage.
        has_median: Whether the trigger's median is of the steps before the anomaly.
    """

    value_in: Callable[[Trigger, StepSummary], float | None]
    text_of: Callable[[float], str] = duration
    missing: Callable[[Trigger], str] = _not_in_the_log
    is_of_loop: bool = False
    of_stage: bool = False
    of_all: bool = False
    of_ranks: bool = False
    has_median: bool = True


SIGNS = {
    SLOW_STEP: Sign(_of_step, is_of_loop=True, of_ranks=True),
    SLOW_STAGE: Sign(_of_stage, is_of_loop=True, of_stage=True, of_all=True),
    SLOW_SPAN: Sign(_of_span, of_all=True),
    LEADER: Sign(
        _of_leads,
        lambda share: f"{share:.1%} of the step",
        _no_leader,
        of_stage=True,
        of_ranks=True,
        has_median=False,
    ),
    MEMORY: Sign(_of_memory, byte_size, _not_the_largest),
}
"""Signs by their names in ``watch.trigger``, in ``Trigger.sign`` and in messages."""

_NO_SIGN = Sign(_unknown)


def sign_of(trigger: Trigger) -> Sign:
    """Return the sign of a trigger; one without effects for a schedule, or a newer version."""
    return SIGNS.get(trigger.sign, _NO_SIGN)
