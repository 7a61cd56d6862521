"""Detects anomalies in step summaries: slow steps and stages, slow processes, growing memory.

Three tests: a duration against its own past, a process against its peers, and memory that grows
step by step. The comparison with peers also finds processes that are slow from the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from statistics import median

from msgspec.structs import replace

from verl_profiling.files.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.files.watch_signs import LEADER, SLOW_SPAN, SLOW_STAGE, SLOW_STEP
from verl_profiling.level_shifts import LEAST_S, MATTERS, Series
from verl_profiling.settings.config import Anomaly
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import duration
from verl_profiling.watch.host_uses import HostUses, MemoryGrowth
from verl_profiling.watch.suspicion import (
    NEWS,
    SpanKey,
    SpanPast,
    Suspicion,
    by_role,
    explained,
    with_span,
    worker_role,
)
from verl_profiling.watch.work_past import WorkPast

LONG_S, LONG = 30.0, 3.0
"""Minimum excess of a single slow step over the median, in seconds,
and as a multiple of the median.
"""

# Multiples of the threshold of a lead: the minimum in each of five steps in a row, and the lead
# for which three steps in a row suffice.
_STEADY_LEAD = 0.3
_LARGE_LEAD = 3.0
_BESIDE_THE_WORST = 0.1  # share of the largest excess from which a role is slow too


class Detector:
    """Compares the summary of every step with the summaries before it.

    Captured steps are skipped, because their times include the cost of the capture. Stages that run
    in less than half of the steps, such as a checkpoint, are subtracted from the step. Stages are
    compared only with their own past.

    Args:
        options: Thresholds of each sign, such as ``slow_stage``.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._step = Series(options.window)
        self._stages = defaultdict[str, Series](partial(Series, options.window))
        self._ran: deque[list[str]] = deque()
        self._often = Counter[str]()  # number of the steps in the window in which a stage ran
        self._seldom: set[str] = set()
        self._leads: dict[tuple[str, str], deque[float | None]] = {}
        self._noticed_leads: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._spans = SpanPast(options)
        self._work = WorkPast(options.window)
        self._memory = MemoryGrowth(options)
        self._uses = HostUses()
        self._since_long = options.window

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return the suspicion of a step, if any; the cost is proportional to the window."""
        if summary.captured:
            return None
        slow = self._slow(summary)
        if slow is not None:
            slow = explained(
                slow.with_suspects(summary), summary, self._spans, self._stages.get("")
            )
        totals = by_role(summary)
        slow_spans = self._spans.join(totals, summary)
        if slow is None and slow_spans:
            slow = self._slow_span(slow_spans, totals, summary)
        if slow is not None and not slow.is_over:  # a slowdown of several series is detected once
            for series in (self._step, *self._stages.values(), *self._spans.series.values()):
                series.notice()
        self._work.add(summary)
        self._uses.add(summary)
        self._memory.add(summary)
        suspicion = self._leading(slow, summary) or self._memory.suspicion(summary)
        suspicion = suspicion and self._work.explained(suspicion, summary)
        return suspicion and self._uses.explained(suspicion)

    def is_named(self, suspicion: Suspicion, summary: StepSummary) -> None:
        """Record the suspects that a suspicion got, so that their leads are not detected again."""
        leads = _leads(summary)
        for who in leads.keys() & {(suspicion.stage, lane) for lane in suspicion.suspects}:
            self._noticed_leads[who] = leads[who]

    def _slow(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if the step, or one of its stages, has become slow."""
        options, step, times = self._options, self._step, summary.exposed_s
        self._count(times)
        seldom_s = sum(times[stage] for stage in self._seldom & times.keys())
        amount = step.measure(summary.seconds - seldom_s, options.slow_step, LEAST_S)
        matters_s = max(MATTERS * step.past.usual, LEAST_S)
        stages: dict[str, Series] = {}
        amounts: dict[str, float] = {}
        slow_s: dict[str, float] = {}
        for stage, took_s in times.items():
            series = stages[stage] = self._stages[stage]
            series.past.is_seldom = stage in self._seldom
            amounts[stage] = series.measure(took_s, options.slow_stage, matters_s)
            if amounts[stage] > 0 or series.score:
                slow_s[stage] = series.excess
        among = _slow_roles(summary, slow_s)
        is_slow_step = step.add(amount / among)
        news = [stage for stage, series in stages.items() if series.add(amounts[stage] / among)]
        worst = max(news, key=lambda stage: stages[stage].excess, default=None)
        if worst is not None and not (is_slow_step and stages[worst].excess < step.excess / 2):
            return self._slow_stage(worst, summary)
        if is_slow_step:
            return self._slow_step(times, summary)
        if self._is_long():
            return replace(self._slow_step(times, summary), is_over=True)
        return None

    def _count(self, times: Mapping[str, float]) -> None:
        """Count the stages that run in a step; stages of less than half of the steps are seldom."""
        self._seldom |= {
            stage for stage in times if stage and 2 * self._often[stage] < len(self._ran)
        }
        if len(self._ran) == self._options.window:
            self._often.subtract(self._ran.popleft())
        self._ran.append([*times])
        self._often.update(times.keys())

    def _is_long(self) -> bool:
        """Return whether this single step is much longer; at most one step in a window is."""
        step = self._step
        is_long = step.score > 0 and step.excess >= max(LONG_S, LONG * step.past.usual)
        since, self._since_long = self._since_long, self._since_long + 1
        if is_long:
            self._since_long = 1
        return is_long and since >= self._options.window

    def _slow_stage(self, stage: str, summary: StepSummary) -> Suspicion:
        """Return the suspicion of a slow stage; an empty name is the time in no stage."""
        series = self._stages[stage]
        where = f"stage {stage}" if stage else "the time in no stage"
        took = f"step {summary.step}: {where} took {duration(series.value)} of the step, "
        return self._suspicion(SLOW_STAGE, stage, series, summary, took)

    def _slow_step(self, times: Iterable[str], summary: StepSummary) -> Suspicion:
        """Return the suspicion of a slow step, in the stage that grew most."""
        grown_s = {
            stage: self._stages[stage].excess for stage in times if stage not in self._seldom
        }
        most = max(grown_s, key=grown_s.__getitem__, default="")
        took = f"step {summary.step} took {duration(self._step.value)}"
        if grown_s.get(most, 0.0) > 0:
            where = f"stage {most}" if most else "no stage"
            took += f", of which {duration(grown_s[most])} more than usual in {where}"
        return self._suspicion(SLOW_STEP, most, self._step, summary, f"{took}: ")

    def _suspicion(
        self, sign: str, stage: str, series: Series, summary: StepSummary, took: str
    ) -> Suspicion:
        usual = series.past.usual
        times = "and the median was 0"
        if usual > 0:
            times = f"{series.value / usual:.1f} times the median"
        return Suspicion(
            noticed=summary.step,
            sign=sign,
            stage=stage,
            value=series.value,
            median=usual,
            history=[*series.past.before, series.value],
            reason=f"{took}{times} of {len(series.past.before)} steps before",
        )

    def _leading(self, slow: Suspicion | None, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if a process leads in a stage: its peers keep waiting for it.

        It has to lead in five steps in a row, or in every second one of seven. For a lead of three
        times the threshold, three steps in a row are enough. Few steps between them may have no
        leader, as it is unknown there who was late. A larger lead is detected again. Of several,
        the largest is detected first. Slow stages go before leads, and their suspects count as
        detected.
        """
        least = self._options.leader
        if least is None:
            return slow
        leads = _leads(summary)
        led = {row.name for row in summary.exposed if row.leader}
        leading = None
        for who in sorted({**self._leads, **leads}, key=lambda who: -leads.get(who, 0.0)):
            stage, lane = who
            lead = leads.get(who, 0.0)
            shares = self._leads.setdefault(who, deque(maxlen=self._options.window))
            shares.append(lead if stage in led else None)
            known = _known(shares)
            if max(known, default=0.0) < least:
                self._leads.pop(who)
                self._noticed_leads.pop(who, None)
            elif slow is not None and stage == slow.stage and lane in slow.suspects:
                self._noticed_leads[who] = max(self._noticed_leads[who], lead)
            elif slow is None and leading is None and lead and self._is_news(who, shares, least):
                self._noticed_leads[who] = max(known[-5:])
                leading = _leader(stage, lane, known, summary)
        return slow or leading

    def _is_news(self, who: tuple[str, str], shares: Iterable[float | None], least: float) -> bool:
        return _lasting(shares, least) >= max(least, NEWS * self._noticed_leads[who])

    def _slow_span(
        self, slow: list[SpanKey], totals: Mapping[SpanKey, SpanTotal], summary: StepSummary
    ) -> Suspicion:
        """Return the suspicion of the span whose calls took most of the additional time."""
        every = self._spans.series
        has_trajectories = {role for role, name in totals if name == TRAJECTORY}
        # Agent loops wait for the process that does the work, if it has a span of that name.
        doing = [key for key in slow if key[0] not in has_trajectories] or slow
        key = max(doing, key=lambda key: every[key].excess * totals[key].runs)
        (role, name), series = key, every[key]
        took = f"step {summary.step}: {name} of {role} took {duration(series.value)} a call, "
        suspicion = self._suspicion(SLOW_SPAN, "", series, summary, took)
        workers = [use for use in summary.workers if use.role == worker_role(name)]
        if not workers:
            workers = [use for use in summary.workers if use.role == role and _has(use, name)]
        everyone = [*map(attrgetter("lane"), workers)]
        suspicion = replace(suspicion, span=name, everyone=everyone)
        return with_span(suspicion, summary, role, name)


def _known(shares: Iterable[float | None]) -> list[float]:
    return [share for share in shares if share is not None]


def _lasting(shares: Iterable[float | None], least: float) -> float:
    """Return the largest lead that lasts, as a share of the step.

    A lead lasts in three ways:

    - over five known steps of seven, if none of them has much less than ``least``: their median
    - over every second step of seven: the smallest lead
    - over three known steps of four: a third of the smallest lead
    """
    latest = [*[0.0] * 7, *shares][-7:]
    five, three = _known([0.0, 0.0, *latest])[-5:], _known([0.0, *latest[-4:]])[-3:]
    steady = median(five) if min(five) >= _STEADY_LEAD * least else 0.0
    return max(steady, min(share or 0.0 for share in latest[::2]), min(three) / _LARGE_LEAD)


def _leader(stage: str, lane: str, shares: Sequence[float], summary: StepSummary) -> Suspicion:
    """Return the suspicion of a process; its leads in a stage are ``shares`` of the steps."""
    longer = duration(shares[-1] * summary.duration_ns / 1e9)
    suspicion = Suspicion(
        noticed=summary.step,
        sign=LEADER,
        stage=stage,
        value=shares[-1],
        median=median(shares),
        history=list(shares),
        reason=f"step {summary.step}: {lane} was in stage {stage} {longer} longer than its peers "
        f"({shares[-1]:.0%} of the step), as in most recent steps",
    ).with_suspects(summary)
    reason = "; ".join([suspicion.reason, *suspicion.who])
    return replace(suspicion, reason=reason)


def _has(use: RankUse, span: str) -> bool:
    return any(total.name == span for total in use.spans)


def _slow_roles(summary: StepSummary, slow_s: Mapping[str, float]) -> int:
    """Return how many roles are slow at once, 1 to 3, by which their evidence is divided.

    If several roles are slow, the host may just be busy.

    Args:
        summary: The step.
        slow_s: The excess of each slow stage (s).
    """
    enough_s = _BESIDE_THE_WORST * max(slow_s.values(), default=0.0)
    roles = {row.role for row in summary.exposed if slow_s.get(row.name, -1.0) >= enough_s}
    return min(max(1, len(roles)), 3)


def _leads(summary: StepSummary) -> dict[tuple[str, str], float]:
    """Return the leads of processes over their peers as shares of the step, by stage and lane."""
    return {
        (row.name, row.leader): min(row.lead_ns, row.exposed_ns) / max(summary.duration_ns, 1)
        for row in summary.exposed
        if row.name and row.leader and row.lead_ns
    }
