"""Detects anomalies in step summaries: slow steps and stages, leading processes, growing memory.

Three tests: a duration against its own past, a process against its peers, and memory that grows
step by step. The comparison with peers also finds processes that are slow from the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping
from functools import partial
from statistics import median

import msgspec

from verl_profiling.capture_request import Sign
from verl_profiling.files.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.settings.watch import Anomaly
from verl_profiling.shifts import LEAST_S, MATTERS, Series
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import byte_size, duration
from verl_profiling.watch.exposed import alone_ns, standings
from verl_profiling.watch.span_past import GENERATE, NEWS, SpanKey, SpanPast, by_role, worker_role
from verl_profiling.watch.suspicion import Suspicion, healthiest

LONG_S, LONG = 30.0, 3.0
"""Minimum excess of a single slow step over the median, in seconds,
and as a multiple of the median.
"""

_STEADY = 0.5
"""Minimum growth in the second half of the window, as a share of the first half's;
less is a warm-up.
"""

_STEADY_LEAD, _LARGE_LEAD = 0.3, 3.0
_BESIDE_THE_WORST = 0.1
_MOST_SPANS_NAMED = 2


class Detector:
    """Compares the summary of every step with the summaries before it.

    Captured steps are skipped, because their times include the cost of the capture. Stages that run
    in less than half of the steps, such as a checkpoint, are subtracted from the step. Stages are
    compared only with their own past.

    Args:
        options: Thresholds of each sign.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._step = Series(options.window)
        self._stages = defaultdict[str, Series](partial(Series, options.window))
        self._ran: deque[list[str]] = deque()
        self._often = Counter[str]()  # number of the steps in the window in which a stage ran
        self._seldom: set[str] = set()
        self._leads: dict[tuple[str, str], deque[float]] = {}
        self._noticed_leads: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._spans = SpanPast(options)
        self._held: dict[str, deque[int]] = {}
        self._since_long = options.window

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return the suspicion of a step, if any; the cost is proportional to the window."""
        if summary.captured:
            return None
        slow = self._slow(summary)
        totals = by_role(summary)
        slow_spans = self._spans.join(totals, summary)
        if slow is None and slow_spans:
            slow = self._slow_span(slow_spans, totals, summary)
        if slow is not None and not slow.is_over:  # a slowdown of several series is detected once
            for series in (self._step, *self._stages.values(), *self._spans.series.values()):
                series.notice()
        return self._leading(slow, summary) or self._growing(summary)

    def is_named(self, found: Suspicion, summary: StepSummary) -> None:
        """Record the suspects of a suspicion, so that their leads are not detected again."""
        leads = _leads(summary)
        for who in leads.keys() & {(found.stage, lane) for lane in found.suspects}:
            self._noticed_leads[who] = leads[who]

    def _slow(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if the step, or one of its stages, has become slow."""
        options, times = self._options, summary.exposed_s
        self._count(times)
        step, took = (
            self._step,
            summary.seconds - sum(times.get(stage, 0.0) for stage in self._seldom),
        )
        amount = step.measure(took, options.slow_step, LEAST_S)
        matters_s = max(MATTERS * step.past.usual, LEAST_S)
        every = {stage: self._stages[stage] for stage in times}
        amounts = {
            stage: one.measure(times[stage], options.slow_stage, matters_s)
            for stage, one in every.items()
        }
        # Several roles that are slow at once may be a busy host.
        slow_s = {
            stage: one.excess for stage, one in every.items() if amounts[stage] > 0 or one.score
        }
        enough_s = _BESIDE_THE_WORST * max(slow_s.values(), default=0.0)
        roles = {row.role for row in summary.exposed if slow_s.get(row.name, -1.0) >= enough_s}
        among = min(max(1, len(roles)), 3)
        is_slow_step = step.add(amount / among)
        news = [stage for stage, one in every.items() if one.add(amounts[stage] / among)]
        usual_stages = {stage: one for stage, one in every.items() if stage not in self._seldom}
        if not news and not is_slow_step:
            if not self._is_long():
                return None
            return msgspec.structs.replace(self._slow_step(usual_stages, summary), is_over=True)
        worst = max(news, key=lambda stage: every[stage].excess, default=None)
        if worst is not None and not (is_slow_step and every[worst].excess < step.excess / 2):
            where = f"stage {worst}" if worst else "the time in no stage"
            took_what = (
                f"step {summary.step}: {where} took {duration(every[worst].value)} of the step, "
            )
            return self._suspicion("slow_stage", worst, every[worst], summary, took_what)
        return self._slow_step(usual_stages, summary)

    def _count(self, times: Mapping[str, float]) -> None:
        """Count the stages that run in a step; those of less than half of the steps are seldom."""
        self._seldom |= {
            stage for stage in times if stage and 2 * self._often[stage] < len(self._ran)
        }
        if len(self._ran) == self._options.window:
            self._often.subtract(self._ran.popleft())
        self._ran.append([*times])
        self._often.update(times.keys())

    def _is_long(self) -> bool:
        """Return whether the step alone is much longer, as the first one in a window."""
        step = self._step
        is_long = step.score > 0 and step.excess >= max(LONG_S, LONG * step.past.usual)
        since, self._since_long = self._since_long, 1 if is_long else self._since_long + 1
        return is_long and since >= self._options.window

    def _slow_step(self, stages: Mapping[str, Series], summary: StepSummary) -> Suspicion:
        """Return the suspicion of a slow step, in the stage that grew most."""
        step = self._step
        most = max(stages, key=lambda stage: stages[stage].excess, default="")
        where = f"stage {most}" if most else "no stage"
        grown_s = stages[most].excess if stages else 0.0
        grew = f", by {duration(grown_s)} in {where}" if grown_s > 0 else ""
        took_what = f"step {summary.step} took {duration(step.value)}{grew}: "
        return self._suspicion("slow_step", most, step, summary, took_what)

    def _suspicion(
        self, sign: Sign, stage: str, series: Series, summary: StepSummary, took: str
    ) -> Suspicion:
        usual = series.past.usual
        times = (
            f"{series.value / usual:.1f} times the median" if usual > 0 else "and the median was 0"
        )
        found = Suspicion(
            noticed=summary.step,
            sign=sign,
            stage=stage,
            value=series.value,
            median=usual,
            history=[*series.past.before, series.value],
            reason=f"{took}{times} of {len(series.past.before)} steps before",
        )
        return (
            found if sign == "slow_span" else self._explained(found.with_suspects(summary), summary)
        )

    def _leading(self, slow: Suspicion | None, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if a process leads in a stage in five steps in a row, or in every
        second one.

        For a lead of three times the threshold, three steps in a row are enough. A larger lead is
        detected again. Slow stages go first, and their suspects count as detected.
        """
        least, found = self._options.leader, slow
        if least is None:
            return slow
        leads = _leads(summary)
        for who in {*self._leads, *leads}:
            stage, lane = who
            shares = self._leads.setdefault(who, deque(maxlen=self._options.window))
            shares.append(leads.get(who, 0.0))
            latest = [*[0.0] * 7, *shares]
            steady = median(latest[-5:]) if min(latest[-5:]) >= _STEADY_LEAD * least else 0.0
            lasting = max(steady, min(latest[-7::2]), min(latest[-3:]) / _LARGE_LEAD)
            if max(shares) < least:
                self._leads.pop(who)
                self._noticed_leads.pop(who, None)
            elif slow is not None and stage == slow.stage and lane in slow.suspects:
                self._noticed_leads[who] = max(self._noticed_leads[who], shares[-1])
            elif found is None and lasting >= max(least, NEWS * self._noticed_leads[who]):
                self._noticed_leads[who] = max(latest[-5:])
                longer = duration(shares[-1] * summary.duration_ns / 1e9)
                found = Suspicion(
                    noticed=summary.step,
                    sign="leader",
                    stage=stage,
                    value=shares[-1],
                    median=median(shares),
                    history=list(shares),
                    reason=f"step {summary.step}: {lane} was in stage {stage} "
                    f"{longer} longer than its "
                    f"peers ({shares[-1]:.0%} of the step), as in most recent steps",
                ).with_suspects(summary)
                found = msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who]))
        return found

    def _explained(self, found: Suspicion, summary: StepSummary) -> Suspicion:
        """Return the suspicion, with the spans in its reason that grew along with its stage,
        or the loop.
        """
        totals = by_role(summary)
        grown = self._grown(found, totals, summary)
        named = [*grown.values()][:_MOST_SPANS_NAMED]
        if grown:
            named += self._spans.longer(totals)
            found = _by_growth(found, summary, [*grown], totals)
        own = self._stages.get("")
        if (
            own
            and not (found.stage or named)
            and 2e-9 * alone_ns(summary) >= own.value + own.past.usual
        ):
            named = ["meanwhile no process was in a stage, so the loop's own code took the time"]
            found = msgspec.structs.replace(found, suspects=[one.lane for one in summary.loop][:1])
        return msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who, *named]))

    def _grown(
        self, found: Suspicion, totals: dict[SpanKey, SpanTotal], summary: StepSummary
    ) -> dict[SpanKey, str]:
        """Return the spans that grew by at least half of the excess, of roles that worked in the
        stage.

        Roles without stages count if only engines, the loop or other roles with spans worked. A
        trajectory is returned only if none of its spans is. In a weight sync, a generation counts
        only if it ran there.
        """
        excess_ns = (found.value - found.median) * 1e9
        working = standings(summary).get(found.stage, [])
        at_work = {lane for standing in working for lane in standing.lanes}
        ran = {name for standing in working for name in standing.ran}
        busy = [use for use in summary.processes if use.lane in at_work]
        waits = all(
            use.has_spans or use in summary.loop or use.role == ROLLOUT_ROLE for use in busy
        )
        roles = {use.role for use in (summary.processes if waits else busy)}
        grown = {
            (role, name): sentence
            for (role, name), sentence in self._spans.grown(totals, excess_ns / 2).items()
            if role in roles
            and (found.stage != WEIGHT_SYNC or name in ran or name.startswith(WEIGHT_SYNC))
        }
        return {key: grown[key] for key in grown if key[1] != TRAJECTORY} or grown

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
        found = self._suspicion("slow_span", "", series, summary, took)
        lanes = [use.lane for use in summary.workers if use.role == worker_role(name)] or [
            use.lane
            for use in summary.workers
            if use.role == role and any(total.name == name for total in use.spans)
        ]
        return _with_span(
            msgspec.structs.replace(found, span=name, everyone=lanes), summary, role, name
        )

    def _growing(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if memory grew at every reading of a window and does not level off.

        Memory is not read in every quick step; a quarter of the steps must have a reading. Growth
        in several processes of a role is one suspicion, because they run the same code.
        """
        least, window = self._options.memory, self._options.window
        grown: list[tuple[float, RankUse]] = []
        for use in summary.processes:
            held = self._held.setdefault(use.lane, deque(maxlen=window + 1))
            size = use.held_bytes or (held[-1] if held else 0)
            if use.held_bytes and held and size <= held[-1]:
                held.clear()
            held.append(size)
            first, half = held[0], held[len(held) // 2]
            if (
                least is None
                or not first
                or len(held) <= window
                or len({*held}) <= max(2, window // 4)
            ):
                continue
            if size / first - 1 >= least and size - half >= _STEADY * (half - first):
                grown.append((size / first - 1, use))
        if not grown:
            return None
        share, most = max(grown, key=lambda each: each[0])
        history = [*dict.fromkeys(self._held[most.lane])]
        alike = [use.lane for use in summary.processes if use.role == most.role]
        growth = {lane: self._held[lane][-1] - self._held[lane][0] for lane in alike}
        for lane in alike:
            self._held[lane].clear()
        return Suspicion(
            noticed=summary.step,
            sign="memory",
            suspects=[most.lane],
            peers=healthiest(growth, [most.lane]),
            value=history[-1],
            median=median(history[:-1]),
            history=list(map(float, history)),
            reason=f"step {summary.step}: {most.lane} has {byte_size(history[-1])}, "
            f"{share:.0%} more than "
            f"{window} steps before, and grew at each of the {len(history) - 1} readings since",
        )


def _by_growth(
    found: Suspicion,
    summary: StepSummary,
    grown: list[SpanKey],
    totals: Mapping[SpanKey, SpanTotal],
) -> Suspicion:
    """Return the suspicion with the processes that do the work of the grown spans as first
    suspects.

    Agent loops wait for the process that does the work of a span, if it has one of that name.
    """
    name = GENERATE if grown[0][1] == TRAJECTORY else grown[0][1]
    doing = [key for key in grown if key[1] == name and (key[0], TRAJECTORY) not in totals]
    first = {use.lane for use in summary.workers if use.role == worker_role(name)}
    suspects = sorted(found.suspects, key=lambda lane: lane not in first)
    found = msgspec.structs.replace(found, suspects=suspects)
    if doing or {*suspects} <= {use.lane for use in summary.loop}:
        return _with_span(found, summary, *[*doing, *grown][0])
    return found


def _with_span(found: Suspicion, summary: StepSummary, role: str, span: str) -> Suspicion:
    """Return the suspicion with the process of a grown span as first suspect, without the loop if
    it waits.

    Calls take longer in that process than in other processes of the role. An agent loop's
    ``generate`` and whole trajectories do not count, because an agent loop waits in them.
    """
    took = {
        one.lane: total.duration_ns / max(total.runs, 1)
        for one in summary.workers
        if one.role == role
        for total in one.spans
        if total.name == span
    }
    first, *others = sorted(took, key=took.__getitem__, reverse=True) or [""]
    is_known = first and (not others or took[first] >= NEWS * median(took[lane] for lane in others))
    is_wait = span == TRAJECTORY or (span == GENERATE and role != ROLLOUT_ROLE)
    named = [first] if is_known and not is_wait else []
    known = {*named, *(one.lane for one in summary.loop if one.role != role)}
    return msgspec.structs.replace(
        found,
        suspects=[*named, *(lane for lane in found.suspects if lane not in known)],
        peers=[*(healthiest(took, named) if named else []), *found.peers],
        ran=found.ran if any(one.stages for one in summary.workers if one.lane in named) else [],
    )


def _leads(summary: StepSummary) -> dict[tuple[str, str], float]:
    """Return the leads of processes in stages as shares of the step, by stage and lane."""
    return {
        (row.name, row.leader): min(row.lead_ns, row.exposed_ns) / max(summary.duration_ns, 1)
        for row in summary.exposed
        if row.name and row.leader and row.lead_ns
    }
