"""The prediction of a step after changes: critical path, slack,
and the next changes that would help.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from operator import attrgetter

import msgspec
import numpy as np

from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.manifest import POLLING, WAIT
from verl_profiling.numbers.report_columns import HelpRow, PathRow, added
from verl_profiling.numbers.stage_rows import CAPTURE_CALLS, OUTSIDE_STAGES
from verl_profiling.predict.change_effects import Baseline, CallTimes
from verl_profiling.predict.changes import TOOL, Changes, tool_name
from verl_profiling.predict.replays import Replay, replay
from verl_profiling.predict.replicas import on_resources
from verl_profiling.predict.segments import DELAY, LAG_BY, WORK
from verl_profiling.predict.slack import SlackRow, slack_rows
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import length, within
from verl_profiling.slices.slices import PathPart
from verl_profiling.steps.trajectory_columns import GENERATE

_NOT_STEADY = (
    "the predicted step is not the mean step: each step leaves more or less work to the next"
)
_UNSEEN = (
    "what trajectories did before the capture takes as long, or is such a call; a watch knows it"
)
_PACED = (
    "how long the loop then waits for the rollout in the background is not recorded, so a "
    "prediction is an interval, and nothing is offered; the watch has the waits of all steps"
)
CAPTURE = "capture"
_LEAST_SHARE = 0.001  # minimum saving of a listed change, as a share of the step
_NOISE = 0.03  # share of the step by which equal steps differ; added on each side of an interval
# of two nested spans, the inner one is no change of its own if the times differ by at most this
_NESTED = 0.05
# least trajectories or requests of a rollout, for a change that leaves out its tail
_LEAST_OF_TAIL = 10


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it would be after changes; without changes, the recorded step.

    Attributes:
        step: Number of the step.
        span_us: Duration of the recorded step.
        predicted_us: Duration of the predicted step.
        low_us: Low end of the interval of the predicted step. ``None`` if nothing makes it
            uncertain: other replicas, steps ahead, or waits for something unknown that matter.
        high_us: High end of the interval.
        changes: The changes, as options of the command.
        path: The critical path of the predicted step, in order; the durations add up to
            ``predicted_us``.
        slack: Slack of each process in each stage.
        what_would_help: Effects of single changes of the predicted step, the largest first; empty
            with an interval.
        missing: Sentences on missing data.
        assumed: Sentences on what is assumed.
        notes: Sentences on what is not known, and on changes outside of what the capture shows.
    """

    step: int | None
    span_us: float
    predicted_us: float
    changes: list[str]
    path: list[PathRow]
    slack: list[SlackRow]
    what_would_help: list[HelpRow]
    missing: list[str]
    assumed: list[str]
    notes: list[str]
    low_us: float | None = None
    high_us: float | None = None


def predict(
    graph: Graph,
    changes: Changes | None = None,
    step: int | None = None,
    missing: Sequence[str] = (),
    kernels: tuple[Mapping[int, int], Sequence[str]] = ({}, ()),
) -> Prediction:
    """Return the step after changes, its critical path and its slack.

    Args:
        graph: The graph of the step.
        changes: The changes; by default none.
        step: Number of the step.
        missing: Sentences on missing data.
        kernels: Duration (ns) of segments with the changed kernels, and sentences on what is
            assumed of them.

    Raises:
        ConfigError: The step has no such stage, tool or rollout, or lacks what other resources
            need.
    """
    changes, (timed_ns, assumed_of_kernels) = changes or Changes(), kernels
    baseline, recorded = Baseline(graph, timed_ns), replay(graph)
    replayed = baseline.replay(changes) if changes.options() else recorded
    assumed = [*changes.assumed(), *assumed_of_kernels]
    notes, helps, spans_ns = list(baseline.extrapolations(changes)), list[HelpRow](), list[int]()
    if changes.has_resources:
        replayed, spans_ns = on_resources(replayed, changes, assumed, notes)
    else:
        if not graph.paced_by_rollout:
            helps = _helps(baseline, replayed, changes)
        spans_ns = _interval_ns(baseline, replayed, changes, assumed)
    if not replayed.alike:
        notes.append(_NOT_STEADY)
    low_us = high_us = None
    if spans_ns:
        low_us = min(spans_ns) * (1 - _NOISE) / 1000
        high_us = max(spans_ns) * (1 + _NOISE) / 1000
    return Prediction(
        step=step,
        span_us=recorded.span_ns / 1000,
        predicted_us=replayed.span_ns / 1000,
        low_us=low_us,
        high_us=high_us,
        changes=changes.options(),
        path=_path_rows(replayed, is_idle_known=not timed_ns),
        slack=slack_rows(replayed),
        what_would_help=helps,
        missing=list(missing),
        assumed=[*(f"{rule} ({many:,})" for rule, many in graph.assumed.items()), *assumed],
        notes=[*notes, *graph.unknown, *([_PACED] * graph.paced_by_rollout)],
    )


def _interval_ns(
    baseline: Baseline, replayed: Replay, changes: Changes, assumed: list[str]
) -> list[int]:
    """Return the durations (ns) that an interval spans: empty where no unknown wait matters.

    Where waits of ranks for each other are not recorded, one rank may do all the work of a stage.
    So to balance the stage may change nothing, or shorten it to 1 / ranks.

    Args:
        baseline: The recorded step.
        replayed: The step with the changes.
        changes: The changes.
        assumed: Sentences on what is assumed; this function adds its own.
    """
    spans_ns = [replayed.span_ns]
    waits_ns = baseline.graph.segments.recorded_ns()[baseline.waits].sum()
    if waits_ns > _LEAST_SHARE * replayed.span_ns and changes.options():
        spans_ns += _with_waits_ns(baseline, replayed, changes)
    if baseline.graph.paced_by_rollout and changes.options():
        spans_ns += _paced_ns(baseline, changes)
    if baseline.unseen and changes.tools:
        assumed.append(_UNSEEN)
        for name, value in changes.tools.items():
            factor = baseline.factor_of_call(name, value)
            spans_ns.append(baseline.replay(changes, unseen=factor).span_ns)
    for balanced in changes.balance:
        stage = balanced.partition("=")[0]
        ranks = baseline.hidden_ranks(stage)
        if ranks:
            assumed.append(
                f"waits of ranks in {stage} are not recorded, and count as work; one may do "
                "all of it"
            )
            rest = [name for name in changes.balance if name != balanced]
            others = msgspec.structs.replace(changes, balance=rest)
            least = others.with_more(Changes(scale={stage: 1 / ranks}))
            spans_ns += (baseline.replay(others).span_ns, baseline.replay(least).span_ns)
    return spans_ns if max(spans_ns) - min(spans_ns) > _LEAST_SHARE * replayed.span_ns else []


def _with_waits_ns(baseline: Baseline, replayed: Replay, changes: Changes) -> tuple[int, int]:
    """Return the least and the longest step (ns), if waits for something unknown change with the
    work.

    The longest step has the stages with such waits scaled by the largest factor of any work in
    them. The least has them scaled by the smallest factor, but is no shorter than without waits.
    """
    table = baseline.graph.segments
    recorded_ns = table.recorded_ns().copy()
    # work from the step before takes what that one leaves of it, which is no factor of anything
    recorded_ns[[one.segment for one in baseline.graph.carried]] = 0
    stages = {table[at].stage for at in baseline.waits.tolist()} - {""}
    factors, inside = [1.0], set[str]()
    for within_stages, ats in table.by_stages():
        ats = ats[recorded_ns[ats] > 0]
        if len(ats) and within_stages[:1] and within_stages[0] in stages:
            shares = replayed.took_ns[ats] / recorded_ns[ats]
            factors += [shares.min().item(), shares.max().item()]
            inside.update(within_stages)
    rest = {name: factor for name, factor in changes.scale.items() if name not in inside}
    spans_ns = []
    for factor in (min(factors), max(factors)):
        scaled = Changes(scale=rest | dict.fromkeys(stages, factor))
        spans_ns.append(baseline.replay(scaled).span_ns)
    least, longest = spans_ns
    none_ns = baseline.replay(changes, waits=0.0).span_ns
    return min(replayed.span_ns, max(none_ns, least)), max(replayed.span_ns, longest)


def _paced_ns(baseline: Baseline, changes: Changes) -> tuple[int, int]:
    """Return the least and the longest step (ns), if the loop waits for an unknown rollout.

    What other work takes less, the loop may wait longer; what it takes more, the wait may be
    shorter. With a faster rollout there may be no wait, and with a slower one all of the step may
    take as much longer.
    """
    recorded_ns, changed_ns = (baseline.replay(one).span_ns for one in (Changes(), changes))
    waits = {stage: 0.0 for stage in (WAIT + ROLLOUT, ROLLOUT) if stage in baseline.inside}
    least_ns = baseline.replay(changes.with_more(Changes(scale=waits))).span_ns
    factors = [1.0, *(changes.scale[stage] for stage in waits if stage in changes.scale)]
    factors += [baseline.factor_of_call(name, value) for name, value in changes.tools.items()]
    if len(factors) == 1 and not changes.unblock and changes.no_tail is None:
        least_ns = min(changed_ns, max(least_ns, recorded_ns))
    return least_ns, max(changed_ns, round(recorded_ns * max(factors)))


def _candidates(baseline: Baseline, replayed: Replay) -> Iterable[tuple[str, str, Changes]]:
    """Yield single changes to try, each with the outermost stage that it changes, and in words.

    A call is tried if it takes time on the critical path, or on the path to work of the next step.
    Of nested calls of about the same length, only the tool is tried.

    Args:
        baseline: The recorded step.
        replayed: The step with the changes so far.
    """
    graph = replayed.graph
    outermost = {name: graph.segments[ats[0]].stage for name, ats in baseline.inside.items()}
    for stage in dict.fromkeys(outermost.values()):
        if not stage.startswith(WAIT):
            yield stage, f"{stage} in 50% of its time", Changes(scale={stage: 0.5})
    if graph.polls:
        yield outermost[POLLING], "polls 2x as often", Changes(scale={POLLING: 0.5})
    for stage in baseline.balanced:
        if not (stage.startswith(WAIT) or baseline.hidden_ranks(stage)):
            yield outermost[stage], f"{stage} balanced", Changes(balance=[stage])
    is_whole = not (graph.cut or graph.carried)
    if is_whole and sum(map(len, graph.tails.values())) >= _LEAST_OF_TAIL:
        stage = _first_stage(graph, graph.tails)
        yield stage, "rollout without its last 10%", Changes(no_tail=90.0)
    yield from _calls_to_change(baseline, replayed)


def _calls_to_change(baseline: Baseline, replayed: Replay) -> Iterator[tuple[str, str, Changes]]:
    """Yield changes of the calls on the critical path, tools first."""
    graph, tried = replayed.graph, dict[str, CallTimes]()
    spent, tools = _calls_on_path(replayed)
    for name in sorted(baseline.blocked.keys() & spent.keys()):
        stage = _first_stage(graph, baseline.blocked[name])
        yield stage, f"{name} off the event loop", Changes(unblock=[name])
    names = baseline.calls & spent.keys() - {GENERATE}
    for name in sorted(names, key=lambda name: (name not in tools, name)):
        if spent[name] <= _LEAST_SHARE * replayed.span_ns:
            continue
        calls = baseline.calls_of(name)
        if not any(_is_same(name, other, spent, calls, of) for other, of in tried.items()):
            tried[name] = calls
            stage = _first_stage(graph, calls.at)
            yield stage, f"{name} in 50% of its time", Changes(tools={name: "0.5x"})


def _is_same(
    name: str, other: str, spent: Mapping[str, int], calls: CallTimes, others: CallTimes
) -> bool:
    """Return whether calls of two names are nested and take about as long as each other."""
    is_close = math.isclose(spent[name], spent[other], rel_tol=_NESTED)
    return is_close and len(np.intersect1d(calls.at, others.at)) > 0


def _calls_on_path(replayed: Replay) -> tuple[Counter[str], set[str]]:
    """Return the time on the critical path by call, also on the paths to work of the next step,
    and which of the calls are tools.
    """
    spent, tools = Counter[str](), set[str]()
    for last in {replayed.graph.last, *(one.mark for one in replayed.graph.carried)}:
        for part in replayed.path(last):
            one = replayed.graph.segments[part.segment]
            names = (one.kind.removeprefix(LAG_BY), *dict(one.calls))
            tools |= {tool_name(name) for name in names if name.startswith(TOOL)}
            spent.update(dict.fromkeys(map(tool_name, names), part.end_ns - part.begin_ns))
    return spent, tools


def _first_stage(graph: Graph, ats: Iterable[int]) -> str:
    """Return the outermost stage around the first of some segments that is in a stage."""
    return next((graph.segments[at].stage for at in ats if graph.segments[at].within), "")


def _helps(baseline: Baseline, replayed: Replay, changes: Changes) -> list[HelpRow]:
    """Return the single changes that make a step shorter, the largest effect first.

    Args:
        baseline: The recorded step.
        replayed: The step with the changes so far.
        changes: The changes so far.
    """
    rows, span_ns = list[HelpRow](), replayed.span_ns
    for stage, words, more in _candidates(baseline, replayed):
        both = changes.with_more(more)
        predicted_ns = baseline.replay(both).span_ns
        share = (predicted_ns - span_ns) / max(span_ns, 1)
        # by less, workers with equal work differ from each other
        if share >= -(_NOISE if more.balance else _LEAST_SHARE):
            continue
        options = [option for option in both.options() if option not in changes.options()]
        row = HelpRow(
            change=words,
            option=" ".join(options),
            stage=stage,
            predicted_us=predicted_ns / 1000,
            difference_us=(predicted_ns - span_ns) / 1000,
            difference_share=share,
            hours_a_day=-share * baseline.graph.lanes * 24,
            unit="GPU-hours" if baseline.graph.on_device else "lane-hours",
        )
        rows.append(row)
    return sorted(rows, key=lambda row: row.difference_us)


def _path_rows(replayed: Replay, is_idle_known: bool) -> list[PathRow]:
    rows = list[PathRow]()
    for part in replayed.path():
        for begin_ns, end_ns, is_capture in _without_capture(replayed.graph, part):
            time = part._replace(begin_ns=begin_ns, end_ns=end_ns)
            row = _path_row(replayed, time, is_capture, is_idle_known)
            if rows and _place_of(row) == _place_of(rows[-1]):
                row = added(rows.pop(), row)
            rows.append(row)
    return rows


def _path_row(replayed: Replay, part: PathPart, is_capture: bool, is_idle_known: bool) -> PathRow:
    graph, segment = replayed.graph, replayed.graph.segments[part.segment]
    stage = " / ".join(segment.around if part.is_delay else segment.within) or OUTSIDE_STAGES
    kind = DELAY if part.is_delay else graph.kind_of(segment)
    return PathRow(
        stage=CAPTURE_CALLS if is_capture else stage,
        who=f"{segment.who} {segment.trajectory}" if segment.trajectory else segment.who,
        worker=segment.who,
        kind=CAPTURE if is_capture else kind,
        begin_us=(part.begin_ns - graph.begin_ns) / 1000,
        duration_us=(part.end_ns - part.begin_ns) / 1000,
        share=(part.end_ns - part.begin_ns) / max(replayed.span_ns, 1),
        idle_us=_idle_us(graph, part) if is_idle_known and kind == WORK else None,
    )


def _without_capture(graph: Graph, part: PathPart) -> Iterator[tuple[int, int, bool]]:
    """Divide a part of the path into times of the capture and others, as the table of stages does.

    In a time of the capture, the loop only waits for recordings to start or stop. It stays as
    recorded; the others are scaled to what is left of the part.

    Yields:
        Begin, end, and whether it is a time of the capture.
    """
    segment = graph.segments[part.segment]
    since_ns, until_ns = segment.begin_ns, segment.end_ns
    if part.is_delay:
        since_ns = segment.begin_ns - graph.delay_ns.item(part.segment)
        until_ns = segment.begin_ns
    captures = within(graph.capture, since_ns, until_ns)
    if not len(captures):
        yield part.begin_ns, part.end_ns, False
        return
    took_ns = np.diff([since_ns, *captures.ravel(), until_ns]).astype(float)
    captured_ns = min(length(captures), part.end_ns - part.begin_ns)
    took_ns[::2] *= (part.end_ns - part.begin_ns - captured_ns) / max(took_ns[::2].sum(), 1)
    took_ns[1::2] *= captured_ns / max(length(captures), 1)
    edges = part.begin_ns + np.rint(np.append(0, np.cumsum(took_ns))).astype(int)
    for number, (begin_ns, end_ns) in enumerate(pairwise(edges.tolist())):
        if end_ns > begin_ns:
            yield begin_ns, end_ns, number % 2 == 1


def _idle_us(graph: Graph, part: PathPart) -> float | None:
    """Return the time in which all lanes of a worker are idle; ``None`` if no lane is recorded."""
    segment = graph.segments[part.segment]
    if segment.who not in graph.idle:
        return None
    idle_ns = length(within(graph.idle[segment.who], segment.begin_ns, segment.end_ns))
    # A changed segment keeps its recorded share of idle time.
    return idle_ns / 1000 * (part.end_ns - part.begin_ns) / max(segment.recorded_ns, 1)


_place_of = attrgetter("stage", "who", "kind")
