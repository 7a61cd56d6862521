"""A suspicion of the watch: the sign, the stage, and the processes and spans that may be the cause.

Spans of trajectories and services are compared with their past. The mean per call is judged in
every step. The totals explain why a stage became slow.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import partial
from itertools import chain
from operator import attrgetter
from statistics import median

from msgspec.structs import replace

from verl_profiling.capture_request import Trigger, TriggerKind
from verl_profiling.files.step_summary import MOST_SPANS, OTHERS, SpanTotal, StepSummary
from verl_profiling.files.watch_signs import sign_of
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.level_shifts import LEAST_S, MATTERS, Series
from verl_profiling.manifest import GC, WAIT, WEIGHT_SYNC
from verl_profiling.settings.config import Anomaly
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.units import duration
from verl_profiling.watch.stage_numbers import TIED, Standing, alone_ns, standings

MOST_SUSPECTS = 4
NOBODY = "no process was longer there than the others"
_BESIDE_THE_LEADER = 0.5  # share of the leader's lead from which others are suspects, too

NEWS = 1.25
"""Minimum ratio of a duration to the usual one, or of a lead to the reported one, to mention it."""

_OF_A_STAGE = 0.4
"""Weight of a slow span relative to a slow stage: the mean of few calls with long tails varies."""

GENERATE = "generate"
_MOST_SPANS_NAMED = 2  # in a reason, which is one line of the log

SpanKey = tuple[str, str]
"""Role of the processes, and name of the spans."""

SpanTotals = dict[SpanKey, SpanTotal]
"""Totals of the spans of a step."""

_lane = attrgetter("lane")


class Suspicion(Trigger, frozen=True, kw_only=True):
    """An anomaly that the watch detected in a step, and the processes that may be its cause.

    Attributes:
        everyone: Lanes of all processes that worked in the stage, if none was longer than the
            others.
        ran: Names of the stages that these processes ran inside the loop's stage.
        is_over: Whether only one step was slow, which is not worth a capture of the next step.
        likely: Slowest process of one later step; a suspect if it is so in a further step.
    """

    kind: TriggerKind = "anomaly"
    everyone: list[str] = []
    ran: list[str] = []
    is_over: bool = False
    likely: str = ""

    def trigger(self) -> Trigger:
        """Return the trigger of a capture that this suspicion requests, for its manifest."""
        return Trigger(**{field: getattr(self, field) for field in Trigger.__struct_fields__})

    def with_suspects(self, summary: StepSummary) -> Suspicion:
        """Return the suspicion with its suspects: the slowest processes in the stage of a step."""
        working = standings(summary).get(self.stage, [])
        suspects: list[str] = []
        peers: list[str] = []
        ran: dict[str, None] = {}
        for standing in working:
            found = stand_out(standing)
            if found:
                peers += healthiest(standing.by_lane(), found)
                suspects += found
                ran |= dict.fromkeys(standing.ran)
        suspects = [*dict.fromkeys(suspects)][:MOST_SUSPECTS]
        everyone: list[str] = []
        if working and not suspects:
            everyone = [*working[0].lanes]
            ran |= dict.fromkeys(working[0].ran)
        return replace(self, suspects=suspects, peers=peers, everyone=everyone, ran=list(ran))

    @property
    def who(self) -> list[str]:
        """A list of at most one clause that names the suspects; empty if ``reason`` names them."""
        if not self.stage or (sign_of(self).is_of_process and len(self.suspects) <= 1):
            return []
        return [f"longest there: {', '.join(self.suspects)}" if self.suspects else NOBODY]

    def lasts_in(self, summary: StepSummary) -> bool:
        """Return whether another step may still have at least half of the excess over the median;
        always ``True`` for signs that are not of the loop, and where the stage did not run.
        """
        sign = sign_of(self)
        took_s = sign.value_in(self, summary)
        return not sign.is_of_loop or took_s is None or 2 * took_s >= self.value + self.median

    def named_in(self, summary: StepSummary) -> Suspicion:
        """Return the suspicion, with suspects if two later slow steps have the same first suspect.

        In both steps, its lead has to be at least half of the excess over the median.
        """
        if not self.lasts_in(summary):
            return self
        first = next(iter(standings(summary).get(self.stage, [])), None)
        lead_s = first.lead_ns / 1e9 if first is not None else 0.0
        if 2 * lead_s < self.value - self.median:
            return self
        later = self.with_suspects(summary)
        if later.suspects[:1] != [self.likely]:
            return replace(self, likely="".join(later.suspects[:1]))
        who = f"longest there in step {summary.step}: {', '.join(later.suspects)}"
        reason = self.reason.replace(NOBODY, who)
        return replace(later, reason=reason)


def stand_out(standing: Standing) -> list[str]:
    """Return the processes of a role that were longer in a stage than the others, the leader first.

    Included are the leader, if its lead exceeds the tolerance ``TIED``, and processes that exceed
    the median by more than half of that lead. The only process of a role is included, too.
    """
    durations = standing.by_lane()
    if len(durations) == 1:
        return [standing.leader] if standing.leader else []
    if standing.lead_ns <= TIED * max(durations.values()):
        return []
    ordered = sorted(durations, key=durations.__getitem__, reverse=True)
    middle_ns = durations[ordered[len(ordered) // 2]]
    enough_ns = middle_ns + _BESIDE_THE_LEADER * standing.lead_ns
    also_slow = [
        lane for lane in ordered if lane != standing.leader and durations[lane] > enough_ns
    ]
    return [standing.leader, *also_slow][:MOST_SUSPECTS]


def healthiest(values: Mapping[str, float], suspects: list[str]) -> list[str]:
    """Return the lane nearest to the median that is no suspect, as a list;
    empty if all are suspects.
    """
    ordered = sorted(values, key=values.__getitem__)
    middle = values[ordered[(len(ordered) - 1) // 2]]
    others = [lane for lane in ordered if lane not in suspects]
    return [min(others, key=lambda lane: abs(values[lane] - middle))] if others else []


class SpanPast:
    """The spans of the last steps, by role and name.

    Args:
        options: Thresholds; ``slow_span`` and ``window`` are used.

    Attributes:
        series: Mean time per call of each span, with its past.
    """

    def __init__(self, options: Anomaly) -> None:
        self._options = options
        self._totals: deque[tuple[Counter[str], SpanTotals]] = deque(maxlen=options.window)
        self.series = defaultdict[SpanKey, Series](partial(Series, options.window))

    def join(self, totals: SpanTotals, summary: StepSummary) -> list[SpanKey]:
        """Add the spans of a step; return the spans whose mean time per call became slow."""
        self._totals.append((_read(summary), totals))
        if self._options.slow_span is None:
            return []
        return [key for key, total in totals.items() if self._is_slow(key, total, totals, summary)]

    def _is_slow(
        self, key: SpanKey, total: SpanTotal, totals: SpanTotals, summary: StepSummary
    ) -> bool:
        role, name = key
        trajectories = totals.get((role, TRAJECTORY))
        if not total.runs or is_wait(name) or (trajectories is not None and name == GENERATE):
            return False
        if key not in self.series and len(self.series) >= MOST_SPANS:
            return False
        # Spans of trajectories overlap, so their sum is compared with that of the trajectories.
        whole_s = max(summary.seconds, trajectories.seconds if trajectories is not None else 0.0)
        matters_s = max(MATTERS * whole_s / total.runs, LEAST_S)
        series = self.series[key]
        amount = series.measure(total.seconds / total.runs, self._options.slow_span, matters_s)
        return series.add(_OF_A_STAGE * amount)

    def grown(self, summary: StepSummary, enough_ns: float) -> dict[SpanKey, str]:
        """Return the spans whose totals grew by at least ``enough_ns``, each with a sentence.

        The largest growth is first, and trajectories are last.
        """
        rows = []
        for key, total in by_role(summary).items():
            past = self._past_of(key, summary)
            if not past:
                continue
            usual_ns = median(map(attrgetter("duration_ns"), past))
            runs = median(map(attrgetter("runs"), past))
            more_ns = total.duration_ns - usual_ns
            if (
                more_ns >= enough_ns
                and total.duration_ns > NEWS * usual_ns
                and not key[1].startswith(WAIT)
            ):
                sentence = (
                    f"{key[1]} of {key[0]} took {duration(total.seconds)} in {calls(total.runs)}, "
                    f"usually {duration(usual_ns / 1e9)} in {calls(runs)}"
                )
                rows.append((key[1] == TRAJECTORY, -more_ns, key, sentence))
        return {key: sentence for *_, key, sentence in sorted(rows)}

    def longer(self, summary: StepSummary) -> list[str]:
        """Return sentences on trajectories with more tokens than usual."""
        sentences = []
        for (role, name), total in by_role(summary).items():
            past_totals = self._past_of((role, name), summary)
            past = [one.tokens / one.runs for one in past_totals if one.runs]
            usual = median(past) if past else 0.0
            if name == TRAJECTORY and usual and total.tokens > NEWS * usual * total.runs:
                mean = total.tokens / total.runs
                sentences.append(f"a {name} of {role} has {mean:,.0f} tokens, usually {usual:,.0f}")
        return sentences

    def _past_of(self, key: SpanKey, summary: StepSummary) -> list[SpanTotal]:
        """Return the totals of a span in the steps in which as many processes of its role were
        read: fewer have less, and what the others did is unknown.
        """
        none, many = SpanTotal(key[1], 0, 0), _read(summary)[key[0]]
        return [totals.get(key, none) for read, totals in self._totals if read[key[0]] == many]


def _read(summary: StepSummary) -> Counter[str]:
    """Return the number of processes that were read, by role."""
    return Counter(map(attrgetter("role"), summary.processes))


def is_wait(name: str) -> bool:
    """Return whether spans of this name are never slow by themselves.

    They wait for others, contain them (trajectories), are garbage collections or the sum of further
    names, or are parts of a weight update.
    """
    return name in (TRAJECTORY, GC, OTHERS) or name.startswith((WAIT, f"{WEIGHT_SYNC}/"))


def by_role(summary: StepSummary) -> SpanTotals:
    """Return the totals of the spans by role and name, over all processes of the role."""
    totals: SpanTotals = {}
    for process in summary.processes:
        for total in process.spans:
            key = process.role, total.name
            totals[key] = totals[key] + total if key in totals else total
    return totals


def worker_role(name: str) -> str:
    """Return the role that does a span's work: ``rollout`` for ``generate``, else of its name."""
    return ROLLOUT_ROLE if name in (GENERATE, TRAJECTORY) else name


def calls(runs: float) -> str:
    """Return a number of calls as text."""
    return f"{runs:,.0f} {'call' if runs == 1 else 'calls'}"


def explained(
    suspicion: Suspicion, summary: StepSummary, spans: SpanPast, outside: Series | None
) -> Suspicion:
    """Return the suspicion with a longer reason: the spans that grew along with its stage, or the
    loop's own code.

    Args:
        suspicion: The suspicion.
        summary: The step.
        spans: The past of each span.
        outside: The past of the time in no stage, if there is any.
    """
    grown = _grown(suspicion, summary, spans)
    sentences = [*grown.values()][:_MOST_SPANS_NAMED]
    if grown:
        sentences += spans.longer(summary)
        suspicion = _by_growth(suspicion, summary, [*grown])
    elif not suspicion.stage and _loop_was_alone(summary, outside):
        sentences.append(
            "meanwhile no process was in a stage, so the loop's own code took the time"
        )
        suspicion = replace(suspicion, suspects=[*map(_lane, summary.loop[:1])])
    reason = "; ".join([suspicion.reason, *suspicion.who, *sentences])
    return replace(suspicion, reason=reason)


def _loop_was_alone(summary: StepSummary, outside: Series | None) -> bool:
    """Return whether the time in which no process was in a stage explains half of the growth of the
    loop's time in no stage.
    """
    return outside is not None and 2e-9 * alone_ns(summary) >= outside.value + outside.past.usual


def _grown(suspicion: Suspicion, summary: StepSummary, spans: SpanPast) -> dict[SpanKey, str]:
    """Return the spans that grew by at least half of the suspicion's excess over the median, of
    roles that worked in its stage.

    A trajectory is returned only if none of its spans is. In a weight sync, a generation counts
    only if it ran there.
    """
    working = standings(summary).get(suspicion.stage, [])
    roles = _roles_at_work(working, summary)
    ran = {*chain(*map(attrgetter("ran"), working))}
    least_ns = (suspicion.value - suspicion.median) * 1e9 / 2
    grown = {}
    for (role, name), sentence in spans.grown(summary, least_ns).items():
        is_inside = name in ran or name.startswith(WEIGHT_SYNC)
        if role in roles and (is_inside or suspicion.stage != WEIGHT_SYNC):
            grown[role, name] = sentence
    parts = {key: sentence for key, sentence in grown.items() if key[1] != TRAJECTORY}
    return parts or grown


def _roles_at_work(working: Iterable[Standing], summary: StepSummary) -> set[str]:
    """Return the roles that worked in a stage.

    Roles without stages count if only engines, the loop or other roles with spans worked.
    """
    lanes = {*chain(*map(attrgetter("lanes"), working))}
    busy = [use for use in summary.processes if use.lane in lanes]
    for use in busy:
        if not (use.has_spans or use in summary.loop or use.role == ROLLOUT_ROLE):
            return {*map(attrgetter("role"), busy)}
    return {*map(attrgetter("role"), summary.processes)}


def _by_growth(suspicion: Suspicion, summary: StepSummary, grown: list[SpanKey]) -> Suspicion:
    """Return the suspicion with the processes that do the work of the grown spans as first
    suspects.

    An agent loop waits for the process that does the work, if that has a span of the same name.
    """
    name = GENERATE if grown[0][1] == TRAJECTORY else grown[0][1]
    totals = by_role(summary)
    doing = [key for key in grown if key[1] == name and (key[0], TRAJECTORY) not in totals]
    first = {use.lane for use in summary.workers if use.role == worker_role(name)}
    suspects = sorted(suspicion.suspects, key=lambda lane: lane not in first)
    suspicion = replace(suspicion, suspects=suspects)
    if doing or {*suspects}.issubset(map(_lane, summary.loop)):
        return with_span(suspicion, summary, *[*doing, *grown][0])
    return suspicion


def with_span(suspicion: Suspicion, summary: StepSummary, role: str, span: str) -> Suspicion:
    """Return the suspicion with the process of a grown span as first suspect, without the loop if
    it waits.

    Calls take longer in that process than in other processes of the role. An agent loop's
    ``generate`` and whole trajectories do not count, because an agent loop waits in them.
    """
    took = {}
    for use in summary.workers:
        for total in use.spans:
            if use.role == role and total.name == span:
                took[use.lane] = total.duration_ns / max(total.runs, 1)
    is_wait = span == TRAJECTORY or (span == GENERATE and role != ROLLOUT_ROLE)
    slowest = "" if is_wait else _slowest(took)
    others = {use.lane for use in summary.loop if use.role != role}
    suspects = [lane for lane in suspicion.suspects if lane not in (slowest, *others)]
    if not slowest:
        return replace(suspicion, suspects=suspects, ran=[])
    has_stages = any(use.stages for use in summary.workers if use.lane == slowest)
    return replace(
        suspicion,
        suspects=[slowest, *suspects],
        peers=[*healthiest(took, [slowest]), *suspicion.peers],
        ran=suspicion.ran if has_stages else [],
    )


def _slowest(took: Mapping[str, float]) -> str:
    """Return the lane whose value exceeds the median of the others by a quarter; else empty."""
    slowest = max(took, key=took.__getitem__, default="")
    others = {**took}
    others.pop(slowest, None)
    if others and took[slowest] < NEWS * median(others.values()):
        return ""
    return slowest
