"""Sentences and sparklines of watched steps, without a numerical library: ``top`` is quick."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from statistics import median
from typing import TYPE_CHECKING, Any

from verl_profiling.files.host_use import SHORT_OF_CPU
from verl_profiling.files.step_summary import ROLLOUT, TRAINING, Idle, Saving, StepSummary
from verl_profiling.level_shifts import MATTERS
from verl_profiling.manifest import WEIGHT_SYNC, UselessPart, useless_parts
from verl_profiling.units import duration

if TYPE_CHECKING:  # a hundred classes
    from verl_profiling.numbers.report_columns import HelpRow, NothingRow, UselessRow

_NO_TRAINING = (ROLLOUT, "reward", "validate", WEIGHT_SYNC)
_LEAST_WAIT = 0.01
_FLOWS = {
    "generation made": {"samples_per_s": "samples", "tokens_per_s": "tokens"},
    "training took": {"samples_taken_per_s": "samples", "tokens_taken_per_s": "tokens"},
}
_READINGS, _READ_IN = 5, 20  # readings of the last steps, as one is of a second only
_BARS = "▁▂▃▄▅▆▇█"
_BEYOND = "▲"
_FAR = 2.0  # multiple of the 90th percentile beyond which a value is off the axis


def most_helpful(saving: Saving, summary: StepSummary) -> str:
    """Return a sentence on the change that would help most."""
    change = "in half of its time" if saving.change == "half" else "even over its processes"
    saves, share = duration(saving.saves_ns / 1e9), saving.saves_ns / summary.duration_ns
    return f"most would help: {saving.stage} {change}, {saves} ({share:.0%}) less a step"


def waits(summary: StepSummary | None, helps: Sequence[HelpRow] = ()) -> Iterator[str]:
    """Yield sentences on the idle shares of training and rollout, their causes, the change that
    would help most, and samples per second.

    Args:
        summary: The watch's summary of a step.
        helps: Changes that a table beside the sentences shows: then they name none.
    """
    if summary is None:
        return
    rates = summary.rates
    made = rates.get("samples_per_s", 0.0)
    taken = rates.get("samples_taken_per_s") or made
    made_text, taken_text = f"{number(made)} samples/s", f"{number(taken)} samples/s"
    if taken < made:  # e.g. as groups with equal rewards are dropped
        made_text += f", {number(taken)} of them taken"
        taken_text = f"{number(taken)} of {number(made)} samples/s"
    flow = f"generation makes {made_text}, training could take"
    yield from _idle_side("trainer", summary.trainer_idle, ROLLOUT, flow, made and taken)
    flow = f"training takes {taken_text}, generation could make"
    yield from _idle_side("rollout", summary.rollout_idle, TRAINING, flow, made)
    if summary.helps is not None and not helps:
        yield most_helpful(summary.helps, summary)
    yield from _work(summary)
    if summary.tokens or summary.taken or summary.taken_tokens or summary.counts:
        parts = []
        for flow, names in _FLOWS.items():
            known = [
                f"{number(rates[name])} {what}/s" for name, what in names.items() if name in rates
            ]
            if known:
                parts.append(f"{flow} {', '.join(known)}")
        parts += [f"{name} {number(value)}" for name, value in summary.counts.items()]
        yield "; ".join(parts)


def _work(summary: StepSummary) -> Iterator[str]:
    """Yield a sentence on the tokens of the stages, and one on each stage of which a share matters
    that taught nothing.
    """
    given = [f"{stage} {work.tokens:,}" for stage, work in summary.work.items() if work.tokens]
    if given:
        yield f"tokens: {', '.join(given)}"
    for stage, lessons in summary.lessons.items():
        parts = useless_parts(lessons)
        share = sum(map(_share, parts))
        if share >= MATTERS:
            yield f"{share:.0%} of {stage} taught nothing: {by_reason(parts)}"


def by_reason(parts: Sequence[UselessPart | NothingRow | UselessRow]) -> str:
    """Return the shares of the reasons why nothing was learned, and of several tasks their own."""
    shown = []
    for cause, of_cause in _largest_first(parts, "cause")[:4]:
        many = sum(getattr(part, "trajectories", 0) for part in of_cause)
        count = f" ({many})" if many else ""
        shown.append(f"{sum(map(_share, of_cause)):.0%} {cause}{count}")
    tasks = _largest_first(parts, "task")
    text = ", ".join(shown)
    if len(tasks) < 2:
        return text
    shares = [
        f"{sum(part.share_of_task for part in of_task):.0%} of {task or 'other tasks'}"
        for task, of_task in tasks[:3]
    ]
    return f"{text}; {', '.join(shares)}"


def _largest_first(parts: Iterable[Any], column: str) -> list[tuple[str, list[Any]]]:
    """Return parts by the value of a column, the largest share first."""
    by_value: dict[str, list[Any]] = {}
    for part in parts:
        by_value.setdefault(getattr(part, column), []).append(part)
    return sorted(by_value.items(), key=lambda of_value: -sum(map(_share, of_value[1])))


def short_of_cpu(steps: Sequence[StepSummary]) -> str:
    """Return a sentence on the role that gets no CPU most, by the median of its last readings;
    empty if none lacks CPU.

    Args:
        steps: The steps in the log of the watch, in order.
    """
    shares: dict[str, list[float]] = {}
    for step in steps[-_READ_IN:]:
        for row in step.memory:
            if row.no_cpu is not None:
                shares.setdefault(row.role, []).append(row.no_cpu)
    medians = {role: median(of_role[-_READINGS:]) for role, of_role in shares.items()}
    role = max(medians, key=medians.__getitem__, default="")
    if not role or medians[role] < SHORT_OF_CPU:
        return ""
    many = counted(len(shares[role][-_READINGS:]), "reading")
    return (
        f"short of CPU: a process of {role} was ready to run and got no CPU for "
        f"{medians[role]:.0%} of the time (median of the last {many})"
    )


def _idle_side(side: str, idle: Idle | None, other: str, flow: str, rate: float) -> Iterator[str]:
    """Yield a sentence on the idle share of training or rollout, if it is not small.

    Args:
        side: ``trainer`` or ``rollout``.
        idle: The idle share and its cause.
        other: The cause, if the side waits for the other one.
        flow: What the other side does and this one could do, before the number.
        rate: Samples per second of this side; 0 if unknown.
    """
    if idle is None or idle.share < _LEAST_WAIT:
        return
    cause = idle.cause or "in no stage"
    if side == "trainer" and idle.cause and idle.cause not in _NO_TRAINING:
        cause += " of other processes"  # a trainer in it does not wait
    sentence = f"{side} waits {idle.share:.0%}, mostly: {cause}"
    if idle.cause == other and rate:
        done, _, could = flow.rpartition(", ")
        sentence = f"{side} waits {idle.share:.0%}: {done}"
        if idle.share < 1:
            sentence += f", {could} {number(rate / (1 - idle.share))}"
    yield sentence


def number(value: float) -> str:
    """Return a rate or a count as text, with three digits or more."""
    if value >= 999.5:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def counted(count: int, what: str) -> str:
    """Return ``1 lane`` or ``2 lanes``, ``1 trajectory`` or ``2 trajectories``."""
    if count != 1:
        what = f"{what[:-1]}ies" if what.endswith("y") else f"{what}s"
    return f"{count:,} {what}"


def axis_top(values: Sequence[float]) -> float:
    """Return the largest value without outliers, such as a first step with warm-up.

    Of three values or more, an outlier is above twice the 90th percentile.
    """
    usual = 0.0
    if len(values) > 2:
        usual = sorted(values)[int(0.9 * (len(values) - 1))]
    return max((value for value in values if value <= _FAR * usual or usual <= 0), default=0.0)


def sparkline(values: Sequence[float], most: int) -> str:
    """Return a bar chart of the last values as text: one character per value, a sign for an
    outlier.

    Args:
        values: Numbers of at least 0.
        most: Maximum number of shown values.
    """
    shown = values[-most:]
    top = axis_top(shown)
    return "".join(
        _BEYOND if value > top else _BARS[round(max(value, 0.0) / (top or 1.0) * (len(_BARS) - 1))]
        for value in shown
    )


_share = attrgetter("share")
