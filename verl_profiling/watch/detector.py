"""Detects anomalies in step summaries: slow steps and stages, leading processes, growing memory.

Two tests: a duration against its own past, and a process against its peers, which also finds processes that
are slow from the first step. And a trend: memory that grows step by step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from verl_profiling.capture_request import Sign
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.settings.watch import Anomaly
from verl_profiling.shifts import LEAST_S, LONG_PAST, evidence, shift, spread_of
from verl_profiling.step_summary import RankUse, SpanTotal, StepSummary
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import byte_size, duration
from verl_profiling.watch.exposed import alone_ns, standings
from verl_profiling.watch.suspicion import Suspicion, healthiest

MATTERS = 0.05
"""A slow stage exceeds its median by at least this share of the median step."""

LONG_S, LONG = 30.0, 3.0
"""A single step is logged if it exceeds the median by these seconds, and by this multiple of the median."""

NEWS = 1.25
"""A lead is detected again if it exceeds the lead at its last detection by this ratio."""

_STEADY = 0.5
"""Minimum growth in the second half of the window, as a share of the first half's; less is a warm-up."""

_LEAST_OF_A_STEP, _MOST_OF_A_STEP = 0.1, 0.5
_LONGEST = 10
_OF_A_QUIET_STEP = 0.12
_OF_A_LEAD = 0.4
_BESIDE_THE_WORST = 0.1
_MOST_SPANS_NAMED = 2
_GENERATE = "generate"


class _Evidence:
    """A score of evidence for a change; the change is detected if the score reaches 1 within ten steps.

    A step adds at most 0.5, so one outlier is no change. A quiet step subtracts a little, and four in a row
    reset the score. A change that goes on is detected once. After a quiet step, and within a window of such
    steps, it is detected again only if it lasts longer than before.
    """

    def __init__(self, window: int, until_over: int = 4) -> None:
        self.steps = 0
        self._window, self._until_over = window, until_over
        self._score = 0.0
        self.is_noticed = False
        self._age = self._quiet = self._run = self._lasted = 0

    def add(self, amount: float) -> bool:
        """Add the evidence of a step; return whether it completes a new detection."""
        is_slow = amount > _LEAST_OF_A_STEP
        goes_on = self.is_noticed and is_slow and self._run == self.steps
        self._age += 1
        self._quiet = 0 if amount > 0 else self._quiet + 1
        self._run = self._run + 1 if is_slow else 0
        if self._quiet >= self._window:
            self._lasted = 0
        self._score += max(-_OF_A_QUIET_STEP, min(amount, _MOST_OF_A_STEP))
        is_late = self._age > _LONGEST and not self.is_noticed
        if self._quiet >= self._until_over or self._score <= 0 or is_late:
            self._score, self.steps, self._age, self.is_noticed = 0.0, 0, 0, False
            return False
        self.steps += is_slow
        lasts = self._run if self.is_noticed else self.steps
        is_news = self._score >= 1 and lasts > self._lasted and not goes_on
        if is_news or goes_on:
            self.notice()
        return is_news

    def notice(self) -> None:
        """Mark the change as detected, if the score is positive."""
        if self._score > 0:
            self.steps = (self.is_noticed and self._run) or self.steps
            self.is_noticed, self._lasted = True, max(self._lasted, self.steps)

    @property
    def waits(self) -> bool:
        """Whether there is evidence for a change that is not detected yet."""
        return self._score > 0 and not self.is_noticed


class _Series:
    """A duration (s), step by step, compared with its own past.

    Values of a possible change join the past only when the change is detected or ruled out.
    """

    def __init__(self, window: int) -> None:
        self._enough = max(3, window // 2)
        self._past: deque[float] = deque(maxlen=window)
        self._shifts: deque[float] = deque(maxlen=LONG_PAST * window)
        self._waiting: list[tuple[float, float]] = []
        self.evidence = _Evidence(window)
        self.value = self.before = 0.0
        self.is_news = False
        self.seen: deque[tuple[StepSummary, StepSummary | None]] = deque(maxlen=2)

    @property
    def history(self) -> list[float]:
        """The durations in the window before the change (s)."""
        return list(self._past)

    @property
    def usual(self) -> float:
        """Their median (s)."""
        return median(self._past) if self._past else 0.0

    @property
    def excess(self) -> float:
        """The current duration minus the median (s)."""
        return self.value - self.usual

    def measure(self, value: float, ratio: float | None, matters: float) -> float:
        """Add the duration of a step (s); return its evidence for a change, negative if there is none."""
        if not self.evidence.waits:  # no change, or a detected one: its values join the past
            self._past += [before for before, _ in self._waiting]
            if not self.evidence.is_noticed:
                self._shifts += [before for _, before in self._waiting]
            self._waiting.clear()
        self.value = value
        is_settled = len(self._past) > 2  # after the first steps, which may be a warm-up
        shifted = shift(value, self.usual) if is_settled else 0.0
        self._waiting.append((value, shifted))
        if ratio is None or len(self._past) < self._enough or self.excess < matters:
            return -1.0
        return evidence(shifted, ratio, spread_of(self._shifts))

    def judge(self, amount: float, of: tuple[StepSummary, StepSummary | None]) -> None:
        """Add the evidence of the step."""
        self.is_news = self.evidence.add(amount)
        if amount > 0:
            self.seen.append(of)
            self.before = max(self.excess, self.before)
        elif not self.evidence.waits:
            self.before = 0.0
            self.seen.clear()


class Detector:
    """Compares the summary of every step with the summaries before it.

    Captured steps are skipped, because their times include the cost of the capture. Stages that run in less
    than half of the steps, such as a checkpoint, are subtracted from the step. They are compared only with
    their own past.

    Args:
        options: Thresholds of each sign.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._step = _Series(options.window)
        self._stages: dict[str, _Series] = {}
        self._ran: deque[set[str]] = deque(maxlen=options.window)
        self._seldom: set[str] = set()
        self._leads: dict[tuple[str, str], _Lead] = {}
        self._spans: dict[tuple[str, str], deque[SpanTotal]] = {}
        self._growth = _Growth(options)
        self._before: StepSummary | None = None
        self._since_long = options.window

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return the suspicion that a step raises, if any; the cost is proportional to the window."""
        before, self._before = self._before, summary
        if summary.captured:
            return None
        found = self._slow(summary, before)
        self._follow_spans(summary)
        leads = {
            (row.name, row.leader): min(row.lead_ns, row.exposed_ns) / max(summary.duration_ns, 1)
            for row in summary.exposed
            if row.name and row.leader and row.lead_ns
        }
        if found is None:
            return self._leading(leads, summary, before) or self._growth.observe(summary)
        for who in leads.keys() & {(found.stage, lane) for lane in found.suspects}:  # detected with the stage
            lead = self._leads.setdefault(who, _Lead(self._options.window))
            lead.noticed_share = max(lead.noticed_share, leads[who])
        return found

    def _slow(self, summary: StepSummary, before: StepSummary | None) -> Suspicion | None:
        """Return a suspicion if the step, or one of its stages, has become slow."""
        options, of = self._options, (summary, before)
        stages: dict[str, float] = {}
        for row in summary.exposed:
            stages[row.name] = stages.get(row.name, 0.0) + row.exposed_ns / 1e9
        ran = Counter(stage for those in self._ran for stage in those)
        self._seldom |= {stage for stage in stages if stage and 2 * ran[stage] < len(self._ran)}
        seldom = self._seldom & stages.keys()
        self._ran.append({*stages})
        took = summary.duration_ns / 1e9 - sum(stages[stage] for stage in seldom)
        step, amount = self._step, self._step.measure(took, options.slow_step, LEAST_S)
        matters = max(MATTERS * step.usual, LEAST_S)
        every = {stage: self._stages.setdefault(stage, _Series(options.window)) for stage in stages}
        amounts = {
            stage: series.measure(stages[stage], options.slow_stage, matters)
            for stage, series in every.items()
        }
        slow = {
            stage: max(series.excess, series.before) if amounts[stage] > 0 else series.before
            for stage, series in every.items()
            if amounts[stage] > 0 or series.evidence.waits
        }
        enough = _BESIDE_THE_WORST * max(slow.values(), default=0.0)
        roles = {row.role for row in summary.exposed if slow.get(row.name, -1.0) >= enough}
        at_most = _MOST_OF_A_STEP / min(max(1, len(roles)), 3)
        step.judge(min(amount, at_most), of)
        for stage, series in every.items():
            series.judge(min(amounts[stage], at_most), of)
        news = {stage: series.excess for stage, series in every.items() if series.is_news}
        usual_stages = {stage: one for stage, one in every.items() if stage not in seldom}
        if not news and not step.is_news:
            return self._long_step(usual_stages, summary)
        known = [series.excess for series in every.values() if series.evidence.is_noticed]
        for series in (step, *every.values()):  # a slowdown of several series is detected once
            series.evidence.notice()
        worst = max(news, key=news.__getitem__, default=None)
        if worst is not None and not (step.is_news and news[worst] < step.excess / 2):
            series = every[worst]
            where = f"stage {worst}" if worst else "what lies in no stage"
            took_what = f"step {summary.step}: {where} took {duration(series.value)} of the step, "
            before_it = f"in the {len(series.history)} times before"
            return self._suspicion(summary, "slow_stage", worst, series, took_what, before_it)
        if worst is None and max(known, default=0.0) >= step.excess / 2:
            return None
        return self._slow_step(usual_stages, summary)

    def _long_step(self, stages: Mapping[str, _Series], summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if the step took by far longer than all in a window before it."""
        step = self._step
        is_long = step.evidence.waits and step.excess >= max(LONG_S, LONG * step.usual)
        is_news, self._since_long = is_long and self._since_long >= self._options.window, self._since_long + 1
        if is_long:
            self._since_long = 0
        if not is_news:
            return None
        while len(step.seen) > 1:  # its suspects need not be those of a slow step before
            step.seen.popleft()
        return msgspec.structs.replace(self._slow_step(stages, summary), is_over=True)

    def _slow_step(self, stages: Mapping[str, _Series], summary: StepSummary) -> Suspicion:
        """Return the suspicion of a slow step; it is in the stage that grew most."""
        step, grown = self._step, {stage: one.excess for stage, one in stages.items() if one.excess > 0}
        most = max(grown, key=grown.__getitem__, default=None)
        where = ""
        if most is not None:
            where = f", by {duration(grown[most])} in {f'stage {most}' if most else 'no stage'}"
        took_what = f"step {summary.step} took {duration(step.value)}{where}: "
        before_it = f"of the {len(step.history)} steps before"
        return self._suspicion(summary, "slow_step", most or "", step, took_what, before_it)

    def _suspicion(
        self, summary: StepSummary, sign: Sign, stage: str, series: _Series, took: str, before: str
    ) -> Suspicion:
        usual = series.usual
        times = f"{series.value / usual:.1f} times the median" if usual > 0 else "and the median was 0"
        found = Suspicion(
            noticed=summary.step,
            sign=sign,
            stage=stage,
            value=series.value,
            median=usual,
            history=[*series.history, series.value],
            reason=f"{took}{times} {before}",
        ).with_suspects(series.seen)
        return self._explained(found, *series.seen[-1])

    def _leading(
        self, leads: dict[tuple[str, str], float], summary: StepSummary, before: StepSummary | None
    ) -> Suspicion | None:
        """Return a suspicion if a process leads in a stage for long enough, or by more than before."""
        least = self._options.leader
        if least is None:
            return None
        found = None
        for who in {*self._leads, *leads}:
            lead = self._leads.setdefault(who, _Lead(self._options.window))
            share = leads.get(who, 0.0)
            lead.shares.append(share)
            if not any(lead.shares):
                del self._leads[who]
            elif found is None and lead.is_news(share, least):
                stage, lane = who
                longer = duration(share * summary.duration_ns / 1e9)
                found = Suspicion(
                    noticed=summary.step,
                    sign="leader",
                    stage=stage,
                    value=share,
                    median=median(lead.shares),
                    history=list(lead.shares),
                    reason=f"step {summary.step}: {lane} was in stage {stage} {longer} longer than its "
                    f"peers, {share:.0%} of the step, and so it was in {lead.steps - 1} steps shortly before",
                ).with_suspects([(summary, before)])
                found = msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who]))
        return found

    def _follow_spans(self, summary: StepSummary) -> None:
        totals = _by_role(summary)
        for who in {*self._spans, *totals}:
            past = self._spans.setdefault(who, deque(maxlen=self._options.window))
            past.append(totals.get(who, SpanTotal(who[1], 0, 0)))
            if not any(total.runs for total in past):
                del self._spans[who]

    def _explained(self, found: Suspicion, summary: StepSummary, before: StepSummary | None) -> Suspicion:
        """Return the suspicion, with the spans in its reason that grew along with its stage.

        These are spans of roles that worked in the stage. Roles without stages count where nobody worked but
        engines, the loop or other roles with spans. The spans grew by at least half of the stage's excess.
        A trajectory is listed only if none of its spans is.
        """
        processes = (*summary.loop, *summary.workers)
        at_work = {lane for one in standings(summary, before).get(found.stage, ()) for lane in one.lanes}
        working = [one for one in processes if one.lane in at_work]
        roles = {one.role for one in working}
        if all(one.spans or one in summary.loop or one.role == ROLLOUT_ROLE for one in working):
            roles |= {one.role for one in processes if not (one.stages and found.stage)}
        enough_ns = (found.value - found.median) * 1e9 / 2
        grown: list[tuple[bool, float, str, tuple[str, str]]] = []
        for (role, name), total in _by_role(summary).items():
            past = self._spans.get((role, name), ())
            usual_ns = median(one.duration_ns for one in past) if past else 0
            more_ns = total.duration_ns - usual_ns
            if role in roles and more_ns >= enough_ns and total.duration_ns > NEWS * usual_ns:
                runs = median(one.runs for one in past) if past else 0
                sentence = (
                    f"{name} of {role} took {duration(total.duration_ns / 1e9)} in {_calls(total.runs)}, "
                    f"usually {duration(usual_ns / 1e9)} in {_calls(runs)}"
                )
                grown.append((name == TRAJECTORY, -more_ns, sentence, (role, name)))
        inside = [one for one in sorted(grown) if not one[0]] or grown
        named = [sentence for _, _, sentence, _ in inside[:_MOST_SPANS_NAMED]]
        own = self._stages.get("")
        if inside and found.suspects and {*found.suspects} <= {one.lane for one in summary.loop}:
            found = _with_span(found, processes, *inside[0][3], enough_ns)
        if own and not (found.stage or named) and 2e-9 * alone_ns(summary) >= own.value + own.usual:
            named = ["meanwhile no process was in a stage: it is the loop's own code"]
            found = msgspec.structs.replace(found, suspects=[one.lane for one in summary.loop][:1])
        return msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who, *named]))


class _Lead(_Evidence):
    """Evidence that a process leads in a stage, step after step."""

    def __init__(self, window: int) -> None:
        super().__init__(window, until_over=2)
        self.shares: deque[float] = deque(maxlen=window)
        self.noticed_share = 0.0

    def is_news(self, share: float, least: float) -> bool:
        """Add a step; return whether its lead completes a detection, the first or one of a larger lead."""
        if self.is_noticed:
            self._score, self.steps, self._age, self._lasted, self.is_noticed = 0.0, 0, 0, 0, False
        if max(self.shares) < least:
            self.noticed_share = 0.0
        leads = share >= max(least, NEWS * self.noticed_share)
        if not self.add(_OF_A_LEAD if leads else -1.0):
            return False
        self.noticed_share = share
        return True


class _Held(NamedTuple):
    """Memory of a process after a step: index of the step since the first one, its number, and bytes."""

    at: int
    step: int
    size: int


class _Growth:
    """Follows the memory that each process holds at the end of its steps, if it was read in them.

    It is not read in every quick step, so a suspicion also needs a minimum number of readings. Growth in
    several processes of a role is one suspicion, because they run the same code.

    Args:
        options: The minimum growth, as a share, and the window, in steps.
    """

    def __init__(self, options: Anomaly) -> None:
        self._share = options.memory
        self._window = options.window
        self._enough = max(2, options.window // 4)
        self._at = 0
        self._held: dict[str, deque[_Held]] = {}

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if memory grew at every reading of the window and does not level off."""
        self._at += 1
        uses = {use.lane: use for use in (*summary.loop, *summary.workers)}
        self._held = {lane: self._held.get(lane, deque()) for lane in uses}
        grown: list[tuple[float, RankUse]] = []
        for lane, held in self._held.items():
            if self._share is None or not (size := uses[lane].held_bytes):
                continue
            if held and size <= held[-1].size:
                held.clear()
            held.append(_Held(self._at, summary.step, size))
            while len(held) > self._enough + 1 and held[1].at <= self._at - self._window:
                held.popleft()
            is_long = len(held) > self._enough and self._at - held[0].at >= self._window
            share, half = size / held[0].size - 1, held[len(held) // 2].size
            if is_long and share >= self._share and size - half >= _STEADY * (half - held[0].size):
                grown.append((share, uses[lane]))
        if not grown:
            return None
        share, most = max(grown, key=lambda each: each[0])
        alike = sum(use.role == most.role for _, use in grown) - 1
        return self._suspicion(summary, share, most, alike, list(uses.values()))

    def _suspicion(
        self, summary: StepSummary, share: float, use: RankUse, alike: int, uses: list[RankUse]
    ) -> Suspicion:
        first, history = self._held[use.lane][0].step, [held.size for held in self._held[use.lane]]
        growth = {
            other.lane: held[-1].size - held[0].size
            for other in uses
            if other.role == use.role and (held := self._held[other.lane])
        }
        for lane in growth:
            self._held[lane].clear()
        others = f"; so it is with {alike} more of its role" if alike else ""
        return Suspicion(
            noticed=summary.step,
            sign="memory",
            suspects=[use.lane],
            peers=healthiest(growth, [use.lane]),
            value=history[-1],
            median=median(history[:-1]),
            history=list(map(float, history)),
            reason=f"step {summary.step}: {use.lane} has {byte_size(history[-1])}, {share:.0%} more than "
            f"after step {first}, and more each of the {len(history) - 1} times that it was looked at since"
            f"{others}",
        )


def _with_span(
    found: Suspicion, processes: Sequence[RankUse], role: str, span: str, enough_ns: float
) -> Suspicion:
    """Return the suspicion of the process in which a span grew, instead of the loop that waited for it.

    In ``generate`` and in a trajectory as a whole, a process waits for others.
    """
    took = {
        one.lane: float(sum(total.duration_ns for total in one.spans if total.name == span))
        for one in processes
        if one.role == role
    }
    first, *others = sorted(took, key=took.__getitem__, reverse=True)
    is_known = not others or took[first] - median(took[lane] for lane in others) >= enough_ns
    suspects = [first] if is_known and span not in (TRAJECTORY, _GENERATE) else []
    peers = healthiest(took, suspects) if suspects else []
    return msgspec.structs.replace(found, suspects=suspects, peers=peers, ran=[])


def _by_role(summary: StepSummary) -> dict[tuple[str, str], SpanTotal]:
    found: dict[tuple[str, str], SpanTotal] = {}
    for process in (*summary.loop, *summary.workers):
        for total in process.spans:
            who = process.role, total.name
            found[who] = found[who] + total if who in found else total
    return found


def _calls(runs: float) -> str:
    return f"{runs:,.0f} {'call' if runs == 1 else 'calls'}"
