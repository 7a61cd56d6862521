"""Detects anomalies in step summaries: slow steps and stages, leading processes, growing memory.

Three tests: a duration against its own past, a process against its peers, and memory that grows step by step.
The comparison with peers also finds processes that are slow from the first step.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Mapping, Sequence
from itertools import chain
from statistics import median

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
"""Minimum excess of a slow stage over its median, as a share of the median step."""

LONG_S, LONG = 30.0, 3.0
"""Minimum excess of a single slow step over the median, in seconds, and as a multiple of the median."""

NEWS = 1.25
"""Ratio of a lead to the lead at its last detection from which it is detected again."""

_STEADY = 0.5
"""Minimum growth in the second half of the window, as a share of the first half's; less is a warm-up."""

_STEADY_LEAD, _LARGE_LEAD = 0.3, 3.0
_LEAST_OF_A_STEP, _MOST_OF_A_STEP, _OF_A_QUIET_STEP = 0.1, 0.5, 0.12
_LONGEST, _QUIET = 10, 4
_BESIDE_THE_WORST = 0.1
_MOST_SPANS_NAMED = 2
_GENERATE = "generate"


class _Series:
    """A duration (s), step by step, and the evidence that the duration grew.

    A change is detected if its evidence adds up to 1 within ten steps. A step adds at most 0.5, so one
    outlier is no change. A normal step subtracts a little, and four normal steps in a row end the change. An
    ongoing change is detected once. After a normal step, the same change is detected again only if it is
    larger than before. The durations of a change join the past after its detection or end.

    Attributes:
        value: The current duration.
        slow_s: Largest excess of a possible change over the median (s).
        is_noticed: Whether the change is detected.
        past: Durations in the window before the change.
        seen: The last two steps of the change.
    """

    def __init__(self, window: int) -> None:
        self.value = self.slow_s = 0.0
        self.is_noticed = False
        self.past: deque[float] = deque(maxlen=window)
        self.seen: deque[StepSummary] = deque(maxlen=2)
        self._window, self._enough = window, max(3, window // 2)
        self._shifts: deque[float] = deque(maxlen=LONG_PAST * window)
        self._open: list[tuple[float, float]] = []
        self._score, self._goes_on = 0.0, False
        self._slow = self._quiet = self._lasted = 0

    @property
    def usual(self) -> float:
        """The median of the past (s)."""
        return median(self.past) if self.past else 0.0

    @property
    def excess(self) -> float:
        """The current duration minus the median (s)."""
        return self.value - self.usual

    @property
    def waits(self) -> bool:
        """Whether there is evidence for a change, but not enough for a detection."""
        return self._score > 0 and not self.is_noticed

    def measure(self, value: float, ratio: float | None, matters_s: float) -> float:
        """Set the duration of a step (s); return its evidence for a change, negative if there is none."""
        if not self.waits:  # no change, or a detected one: its values join the past
            self.past += [before for before, _ in self._open]
            self._shifts += [before for _, before in self._open if not self.is_noticed]
            self._open.clear()
        self.value = value
        shifted = shift(value, self.usual) if len(self.past) > 2 else 0.0  # the first steps may be a warm-up
        self._open.append((value, shifted))
        if ratio is None or len(self.past) < self._enough or self.excess < matters_s:
            return -1.0
        return evidence(shifted, ratio, spread_of(self._shifts))

    def add(self, amount: float, summary: StepSummary) -> bool:
        """Add the evidence of the step; return whether a change is now detected."""
        is_slow = amount > _LEAST_OF_A_STEP
        if self.is_noticed and not is_slow:  # what comes next may last longer
            self._slow, self._goes_on = 0, False
        self._slow += is_slow
        self._score += max(-_OF_A_QUIET_STEP, min(amount, _MOST_OF_A_STEP))
        self._quiet = 0 if amount > 0 else self._quiet + 1
        if self._quiet >= self._window:
            self._lasted = 0
        is_late = len(self._open) > _LONGEST and not self.is_noticed
        if self._quiet >= _QUIET or self._score <= 0 or is_late:
            self._score, self._slow, self.is_noticed, self._goes_on = 0.0, 0, False, False
        if amount > 0:
            self.seen.append(summary)
            self.slow_s = max(self.excess, self.slow_s)
        elif not self.waits:
            self.seen.clear()
            self.slow_s = 0.0
        if self._goes_on:
            self.notice()
        return self._score >= 1 and self._slow > self._lasted and not self._goes_on

    def notice(self) -> None:
        """Mark the change as detected, if there is evidence."""
        if self._score > 0:
            self.is_noticed, self._goes_on = True, self._slow > 0
            self._lasted = max(self._lasted, self._slow)


class Detector:
    """Compares the summary of every step with the summaries before it.

    Captured steps are skipped, because their times include the cost of the capture. Stages that run in less
    than half of the steps, such as a checkpoint, are subtracted from the step. Stages are compared only with
    their own past.

    Args:
        options: Thresholds of each sign.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._step = _Series(options.window)
        self._stages: dict[str, _Series] = {}
        self._ran: deque[list[str]] = deque(maxlen=options.window)
        self._seldom: set[str] = set()
        self._leads: dict[tuple[str, str], deque[float]] = {}
        self._noticed_leads: defaultdict[tuple[str, str], float] = defaultdict(float)
        self._spans: deque[dict[tuple[str, str], SpanTotal]] = deque(maxlen=options.window)
        self._held: dict[str, deque[int]] = {}
        self._numbers: deque[int] = deque(maxlen=options.window + 1)
        self._since_long = options.window

    def observe(self, summary: StepSummary) -> Suspicion | None:
        """Return the suspicion of a step, if any; the cost is proportional to the window."""
        if summary.captured:
            return None
        slow = self._slow(summary)
        self._spans.append(_by_role(summary))
        return self._leading(slow, summary) or self._growing(summary)

    def is_named(self, found: Suspicion, summary: StepSummary) -> None:
        """Record the suspects of a suspicion, so that their leads are not detected again."""
        leads = _leads(summary)
        for who in leads.keys() & {(found.stage, lane) for lane in found.suspects}:
            self._noticed_leads[who] = leads[who]

    def _slow(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if the step, or one of its stages, has become slow."""
        options, times = self._options, summary.exposed_s
        ran = Counter(chain.from_iterable(self._ran))
        self._seldom |= {stage for stage in times if stage and 2 * ran[stage] < len(self._ran)}
        self._ran.append([*times])
        step, took = self._step, summary.seconds - sum(times.get(stage, 0.0) for stage in self._seldom)
        amount = step.measure(took, options.slow_step, LEAST_S)
        matters_s = max(MATTERS * step.usual, LEAST_S)
        every = {stage: self._stages.setdefault(stage, _Series(options.window)) for stage in times}
        amounts = {
            stage: one.measure(times[stage], options.slow_stage, matters_s) for stage, one in every.items()
        }
        slow_s = {
            stage: max(one.slow_s, one.excess) if amounts[stage] > 0 else one.slow_s
            for stage, one in every.items()
            if amounts[stage] > 0 or one.waits
        }
        # Several roles that are slow at once may be a busy host.
        enough_s = _BESIDE_THE_WORST * max(slow_s.values(), default=0.0)
        roles = {row.role for row in summary.exposed if slow_s.get(row.name, -1.0) >= enough_s}
        at_most = _MOST_OF_A_STEP / min(max(1, len(roles)), 3)
        is_slow_step = step.add(min(amount, at_most), summary)
        news = [stage for stage, one in every.items() if one.add(min(amounts[stage], at_most), summary)]
        usual_stages = {stage: one for stage, one in every.items() if stage not in self._seldom}
        if not news and not is_slow_step:
            is_long = step.waits and step.excess >= max(LONG_S, LONG * step.usual)
            since, self._since_long = self._since_long, 1 if is_long else self._since_long + 1
            is_first = is_long and since >= options.window
            return self._slow_step(usual_stages, [summary], is_over=True) if is_first else None
        known_s = max((one.excess for one in every.values() if one.is_noticed), default=0.0)
        for one in (step, *every.values()):  # a slowdown of several series is detected once
            one.notice()
        worst = max(news, key=lambda stage: every[stage].excess, default=None)
        if worst is not None and not (is_slow_step and every[worst].excess < step.excess / 2):
            where = f"stage {worst}" if worst else "the time in no stage"
            took_what = f"step {summary.step}: {where} took {duration(every[worst].value)} of the step, "
            return self._suspicion(
                "slow_stage", worst, every[worst], every[worst].seen, took_what, "of {} steps before"
            )
        if worst is None and known_s >= step.excess / 2:
            return None
        return self._slow_step(usual_stages, step.seen)

    def _slow_step(
        self, stages: Mapping[str, _Series], seen: Sequence[StepSummary], is_over: bool = False
    ) -> Suspicion:
        """Return the suspicion of a slow step, in the stage that grew most."""
        step, number = self._step, seen[-1].step
        most = max(stages, key=lambda stage: stages[stage].excess, default="")
        where = f"stage {most}" if most else "no stage"
        grown_s = stages[most].excess if stages else 0.0
        grew = f", by {duration(grown_s)} in {where}" if grown_s > 0 else ""
        took_what = f"step {number} took {duration(step.value)}{grew}: "
        found = self._suspicion("slow_step", most, step, seen, took_what, "of the {} steps before")
        return msgspec.structs.replace(found, is_over=is_over)

    def _suspicion(
        self, sign: Sign, stage: str, series: _Series, seen: Sequence[StepSummary], took: str, before: str
    ) -> Suspicion:
        usual = series.usual
        times = f"{series.value / usual:.1f} times the median" if usual > 0 else "and the median was 0"
        found = Suspicion(
            noticed=seen[-1].step,
            sign=sign,
            stage=stage,
            value=series.value,
            median=usual,
            history=[*series.past, series.value],
            reason=f"{took}{times} {before.format(len(series.past))}",
        ).with_suspects(seen)
        return self._explained(found, seen[-1])

    def _leading(self, slow: Suspicion | None, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if a process leads in a stage in five steps in a row, or in every second step.

        For a lead of three times the threshold, three steps in a row are enough. A larger lead is detected
        again. Slow stages go first, and their suspects count as detected.
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
            steady = min(latest[-5:]) >= _STEADY_LEAD * least or min(latest[-3:]) >= _LARGE_LEAD * least
            lasting = max(median(latest[-5:]) if steady else 0.0, min(latest[-7::2]))
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
                    reason=f"step {summary.step}: {lane} was in stage {stage} {longer} longer than its "
                    f"peers ({shares[-1]:.0%} of the step), as in most recent steps",
                ).with_suspects([summary])
                found = msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who]))
        return found

    def _explained(self, found: Suspicion, summary: StepSummary) -> Suspicion:
        """Return the suspicion, with the spans in its reason that grew along with its stage.

        These are spans of roles that worked in the stage, and grew by at least half of the stage's excess.
        Roles without stages count if only engines, the loop or other roles with spans worked. A trajectory is
        listed only if none of its spans is.
        """
        processes = (*summary.loop, *summary.workers)
        at_work = {lane for one in standings(summary).get(found.stage, ()) for lane in one.lanes}
        working = [one for one in processes if one.lane in at_work]
        roles = {one.role for one in working}
        if all(one.spans or one in summary.loop or one.role == ROLLOUT_ROLE for one in working):
            roles |= {one.role for one in processes if not (one.stages and found.stage)}
        enough_ns = (found.value - found.median) * 1e9 / 2
        grown: list[tuple[bool, float, str, tuple[str, str]]] = []
        for (role, name), total in _by_role(summary).items():
            none = SpanTotal(name, 0, 0)
            past = [spans.get((role, name), none) for spans in self._spans] or [none]
            usual_ns, runs = median(one.duration_ns for one in past), median(one.runs for one in past)
            more_ns = total.duration_ns - usual_ns
            if role in roles and more_ns >= enough_ns and total.duration_ns > NEWS * usual_ns:
                sentence = (
                    f"{name} of {role} took {duration(total.duration_ns / 1e9)} in {_calls(total.runs)}, "
                    f"usually {duration(usual_ns / 1e9)} in {_calls(runs)}"
                )
                grown.append((name == TRAJECTORY, -more_ns, sentence, (role, name)))
        inside = [one for one in sorted(grown) if not one[0]] or grown
        named = [sentence for _, _, sentence, _ in inside[:_MOST_SPANS_NAMED]]
        own = self._stages.get("")
        if not inside or inside[0][3][1] in (_GENERATE, TRAJECTORY):  # agent loops wait for engines
            engines = {one.lane for one in processes if one.role == ROLLOUT_ROLE}
            suspects = sorted(found.suspects, key=lambda lane: lane not in engines)
            found = msgspec.structs.replace(found, suspects=suspects)
        if inside and found.suspects and {*found.suspects} <= {one.lane for one in summary.loop}:
            found = _with_span(found, processes, *inside[0][3], enough_ns)
        if own and not (found.stage or named) and 2e-9 * alone_ns(summary) >= own.value + own.usual:
            named = ["meanwhile no process was in a stage, so the loop's own code took the time"]
            found = msgspec.structs.replace(found, suspects=[one.lane for one in summary.loop][:1])
        return msgspec.structs.replace(found, reason="; ".join([found.reason, *found.who, *named]))

    def _growing(self, summary: StepSummary) -> Suspicion | None:
        """Return a suspicion if memory grew at every reading of a window and does not level off.

        Memory is not read in every quick step; a quarter of the steps must have a reading. Growth in several
        processes of a role is one suspicion, because they run the same code.
        """
        uses = {use.lane: use for use in (*summary.loop, *summary.workers)}
        least, window = self._options.memory, self._options.window
        self._numbers.append(summary.step)
        self._held = {lane: self._held.get(lane, deque(maxlen=window + 1)) for lane in uses}
        grown: list[tuple[float, RankUse]] = []
        for lane, held in self._held.items():
            size = uses[lane].held_bytes or (held[-1] if held else 0)
            if uses[lane].held_bytes and held and size <= held[-1]:
                held.clear()
            held.append(size)
            first, half = held[0], held[len(held) // 2]
            if least is None or not first or len(held) <= window or len({*held}) <= max(2, window // 4):
                continue
            if size / first - 1 >= least and size - half >= _STEADY * (half - first):
                grown.append((size / first - 1, uses[lane]))
        if not grown:
            return None
        share, most = max(grown, key=lambda each: each[0])
        history = [*dict.fromkeys(self._held[most.lane])]
        growth = {
            lane: held[-1] - held[0] for lane, held in self._held.items() if uses[lane].role == most.role
        }
        alike = sum(use.role == most.role for _, use in grown) - 1
        for lane in growth:
            self._held[lane].clear()
        others = f"; the same holds for {alike} more of its role" if alike else ""
        return Suspicion(
            noticed=summary.step,
            sign="memory",
            suspects=[most.lane],
            peers=healthiest(growth, [most.lane]),
            value=history[-1],
            median=median(history[:-1]),
            history=list(map(float, history)),
            reason=f"step {summary.step}: {most.lane} has {byte_size(history[-1])}, {share:.0%} more than "
            f"after step {self._numbers[0]}, and grew at each of the {len(history) - 1} readings "
            f"since{others}",
        )


def _with_span(
    found: Suspicion, processes: Sequence[RankUse], role: str, span: str, enough_ns: float
) -> Suspicion:
    """Return a suspicion of the process in which a span grew, in place of the loop, which only waited.

    ``generate`` and whole trajectories do not count, because a process waits in them.
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


def _leads(summary: StepSummary) -> dict[tuple[str, str], float]:
    """Return the leads of processes in stages as shares of the step, by stage and lane."""
    return {
        (row.name, row.leader): min(row.lead_ns, row.exposed_ns) / max(summary.duration_ns, 1)
        for row in summary.exposed
        if row.name and row.leader and row.lead_ns
    }


def _by_role(summary: StepSummary) -> dict[tuple[str, str], SpanTotal]:
    found: dict[tuple[str, str], SpanTotal] = {}
    for process in (*summary.loop, *summary.workers):
        for total in process.spans:
            who = process.role, total.name
            found[who] = found[who] + total if who in found else total
    return found


def _calls(runs: float) -> str:
    return f"{runs:,.0f} {'call' if runs == 1 else 'calls'}"
