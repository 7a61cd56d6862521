"""Predictions of a step after changes: the same graph, replayed."""

from __future__ import annotations

import math
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import ClassVar, NamedTuple

import msgspec

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.manifest import POLLING, WEIGHT_SYNC
from verl_profiling.predict.graph import (
    CAPTURE,
    DELAY,
    LAG_BY,
    NEXT_POLL,
    OWN,
    WORK,
    Graph,
    Segment,
    graph_of,
)
from verl_profiling.predict.kernels import KERNEL, Timed
from verl_profiling.predict.path import Chains, Replay, chains_of, critical_path, replay, slacks_ns
from verl_profiling.predict.replicas import has_requests, on_replicas, steps_ahead
from verl_profiling.report.anatomy import OUTSIDE_STAGES
from verl_profiling.report.build import Content
from verl_profiling.report.capture_rows import VALIDATE
from verl_profiling.report.columns import HelpRow, PathRow
from verl_profiling.report.intervals import length, spans_of, within
from verl_profiling.report.lost import ROLLOUT
from verl_profiling.report.model import Report
from verl_profiling.report.records import GENERATE, LOOP_LAG, OTHERS, UNKNOWN
from verl_profiling.report.tables import added
from verl_profiling.units import duration, visible, visible_text_of

_TOOL = "tool:"
_NOT_ALIKE = "the predicted step is one of many that differ: each leaves more or less work to the next"
_NOT_LOGGED = (
    "extrapolated: without logged requests, a rollout takes all between as long as before and a time in "
    "proportion"
)
_ASSUMED = (
    "a scaled stage has the same shape, with its own delays and waits",
    "code of the host, gaps and other kernels take as long as before",
    "a balanced stage takes the mean of its workers, who still do the same work in all",
    "a rollout without its tail is followed by stages that take as long as before",
    "other calls take as long as before a tool changed, also in a fuller engine",
    "calls take as long as before in threads of their own, however many at once",
    "rollout and training run side by side as fast as alone, and neither runs in a weight update",
    "training on other devices takes between as long as before and a time in proportion",
)
_LEAST_SHARE = 0.001  # of the step, from which on a change is listed
_NOISE = 0.03  # share by which steps differ that are alike, on each side of an interval
_NESTED = 0.05  # share by which a call is longer than one inside of it, up to which both are one change
_LEAST_OF_TAIL = 10  # trajectories or requests of a rollout, from which on its tail may be left out

_Calls = dict[str, dict[int, int]]


class Changes(NamedTuple):
    """Changes of a step.

    Attributes:
        scale: Factor of the time in each stage, or of kernels: ``kernel:`` and a pattern of their names.
        balance: Stages that take the mean time on each worker.
        no_tail: Percentage of trajectories (else requests) after which a rollout ends.
        tools: Duration of each call of a tool (s).
        unblock: Tools and spans that no longer block the event loop.
        replicas: Number of replicas.
        steps_ahead: Most steps that a rollout is ahead of the training, on devices of its own.
        split: Devices of the training and of the rollout; then, a rollout is one step ahead by default.
    """

    scale: Mapping[str, float] = {}
    balance: Sequence[str] = ()
    no_tail: float | None = None
    tools: Mapping[str, float] = {}
    unblock: Sequence[str] = ()
    replicas: int | None = None
    steps_ahead: int | None = None
    split: tuple[int, int] | None = None

    def kernels(self) -> dict[str, float]:
        """Return the factors of kernels by pattern."""
        return {name.removeprefix(KERNEL): by for name, by in self.scale.items() if name.startswith(KERNEL)}

    def check(self) -> None:
        """Refuse values of a wrong type, and numbers that no step has.

        Raises:
            ConfigError: A value is refused.
        """
        for option, names in (("--balance", self.balance), ("--unblock", self.unblock)):
            if isinstance(names, str) or not isinstance(names, Sequence):
                raise ConfigError(option, f"{names!r} is no list of names, such as ['search']")
        for option, numbers, unit in (("--scale", self.scale, "0.5"), ("--tool", self.tools, "0.2 (s)")):
            if not isinstance(numbers, Mapping):
                raise ConfigError(option, f"{numbers!r} is no mapping; give {{'name': {unit}}}")
            for name, number in numbers.items():
                if not isinstance(number, Real) or not 0 <= number < math.inf:
                    said = f"{name}={number!r} is not a finite number of at least 0, such as {unit}"
                    raise ConfigError(option, said)
        if self.no_tail is not None and not (isinstance(self.no_tail, Real) and 0 < self.no_tail <= 100):
            raise ConfigError("--no-tail", f"{self.no_tail!r} is not a percentage above 0 and at most 100")
        if self.split is not None and (not isinstance(self.split, Sequence) or len(self.split) != 2):
            raise ConfigError("--split", f"{self.split!r} is no pair of numbers, such as (8, 24)")
        split = [("--split", devices, 1) for devices in self.split or ()]
        resources = [("--replicas", self.replicas, 1), ("--async", self.steps_ahead, 0), *split]
        for option, many, least in resources:
            if many is not None and not (isinstance(many, Integral) and many >= least):
                raise ConfigError(option, f"{many!r} is not an integer of at least {least}")
        if self.split and self.replicas is not None:
            raise ConfigError("--replicas", "a split has the number of replicas")

    def options(self) -> list[str]:
        """Return the changes as options of the command."""
        return [
            *(f"--scale {shlex.quote(f'{name}={factor:.6g}')}" for name, factor in self.scale.items()),
            *(f"--balance {shlex.quote(name)}" for name in self.balance),
            *([f"--no-tail {self.no_tail:.6g}"] if self.no_tail is not None else []),
            *(f"--tool {shlex.quote(f'{name}={seconds:.6g}s')}" for name, seconds in self.tools.items()),
            *(f"--unblock {shlex.quote(name)}" for name in self.unblock),
            *([f"--replicas {self.replicas}"] if self.replicas is not None else []),
            *([f"--async {self.steps_ahead}"] if self.steps_ahead is not None else []),
            *(["--split {}:{}".format(*self.split)] if self.split else []),
        ]

    def with_more(self, more: Changes) -> Changes:
        """Return these changes and more; factors of one stage are multiplied, and other values replaced."""
        factors = {name: self.scale.get(name, 1.0) * factor for name, factor in more.scale.items()}
        return self._replace(
            scale={**self.scale, **factors},
            balance=list(dict.fromkeys((*self.balance, *more.balance))),
            no_tail=self.no_tail if more.no_tail is None else more.no_tail,
            tools={**self.tools, **more.tools},
            unblock=list(dict.fromkeys((*self.unblock, *more.unblock))),
        )

    @property
    def ahead(self) -> int:
        """Most steps that a rollout is ahead of the training."""
        return int(self.split is not None) if self.steps_ahead is None else self.steps_ahead

    def assumed(self) -> list[str]:
        """Return a sentence on each kind of change."""
        kernels = self.kernels()
        changed = (len(self.scale) > len(kernels), kernels, *self[1:5], self.ahead, self.split)
        return [sentence for sentence, change in zip(_ASSUMED, changed, strict=True) if change]


class SlackRow(msgspec.Struct, frozen=True, kw_only=True):
    """The slack of a process in a stage.

    Attributes:
        stage: The outermost stage.
        who: Lane, worker or the loop.
        time_us: Time in which the process works in the stage.
        slack_us: How much longer this could take without a longer step; 0 on the critical path.
    """

    columns: ClassVar[str] = "stage, who, works=time_us, slack=slack_us"

    stage: str
    who: str
    time_us: float
    slack_us: float


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """A step as it would be after changes; without changes, the recorded step.

    Attributes:
        step: Number of the step.
        span_us: Duration of the recorded step.
        predicted_us: Duration of the predicted step.
        low_us: Low end of the interval of the predicted step; ``None`` without other resources.
        high_us: High end of the interval.
        changes: The changes, as options of the command.
        path: The critical path of the predicted step, in order; the durations add up to ``predicted_us``.
        slack: Slack of each process in each stage.
        what_would_help: Effects of single changes of the predicted step, the largest first; empty with other
            resources.
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


def with_predictions(report: Report, content: Content) -> tuple[Report, Graph | None]:
    """Return a report with its critical path and the changes that would help, and the graph of the step.

    An error costs these alone: it becomes a sentence on missing data.

    Args:
        report: The report of a step.
        content: Everything that was read of the step.
    """
    try:
        graph = graph_of(content)
        recorded = replay(graph)
        helps, path = _helps(graph, recorded, _calls(graph), Changes(), {}), _path_rows(recorded)
        rows = {
            "what_would_help": list(map(visible_text_of, helps)),
            "critical_path": list(map(visible_text_of, path)),
        }
    except Exception as error:
        problem = f"critical path and changes that would help: {type(error).__name__}: {error}"
        report.coverage.missing.append(visible(problem))
        return report, None
    return msgspec.structs.replace(report, **rows), graph


def predict(
    graph: Graph,
    changes: Changes | None = None,
    step: int | None = None,
    missing: Sequence[str] = (),
    with_kernels: Callable[[Mapping[str, float]], Timed] | None = None,
) -> Prediction:
    """Return the step after changes, its critical path and its slack.

    Args:
        graph: The graph of the step.
        changes: The changes; by default none.
        step: Number of the step.
        missing: Sentences on missing data.
        with_kernels: Function that reads the traces and returns the times with other kernels.

    Raises:
        ConfigError: The step has no such stage, kernel, tool or rollout, or a number is wrong.
    """
    changes = changes or Changes()
    changes.check()
    recorded = replay(graph)
    calls, low_us, high_us = _calls(graph), None, None
    timed = Timed({}, [])
    if with_kernels and changes.kernels():
        timed = with_kernels(changes.kernels())
    found = _changed(graph, changes, calls, timed.took_ns) if changes.options() else recorded
    assumed, notes = [*changes.assumed(), *timed.assumed], list(_extrapolations(calls, changes))
    helps = list[HelpRow]()
    if (changes.replicas, changes.steps_ahead, changes.split) != (None, None, None):
        found, spans_ns = _with_resources(found, changes, assumed, notes)
        low_us, high_us = min(spans_ns) * (1 - _NOISE) / 1000, max(spans_ns) * (1 + _NOISE) / 1000
    else:
        helps = _helps(graph, found, calls, changes, timed.took_ns)
    path = _path_rows(found)
    return Prediction(
        step=step,
        span_us=recorded.span_ns / 1000,
        predicted_us=found.span_ns / 1000,
        low_us=low_us,
        high_us=high_us,
        changes=changes.options(),
        path=[msgspec.structs.replace(row, idle_us=None) for row in path] if timed.took_ns else path,
        slack=_slack_rows(found),
        what_would_help=helps,
        missing=list(missing),
        assumed=[*(f"{rule} ({many:,})" for rule, many in graph.assumed.items()), *assumed],
        notes=[*notes, *([] if found.alike else [_NOT_ALIKE]), *graph.unknown],
    )


def _changed(
    graph: Graph,
    changes: Changes,
    calls: _Calls,
    timed: Mapping[int, int] = {},
    chains: Chains | None = None,
) -> Replay:
    """Return the replay of a graph with changes.

    Args:
        graph: The graph.
        changes: The changes.
        calls: The calls whose duration can be set.
        timed: Duration (ns) of segments with other kernels.
        chains: The chains to replay in place of the graph's segments.
    """
    took = [float(timed.get(at, one.end_ns - one.begin_ns)) for at, one in enumerate(graph.segments)]
    delay = [float(ns) for ns in graph.delay_ns]
    before = [float(one.before_ns) for one in graph.carried]
    for stage, factor in changes.scale.items():
        if stage.startswith(KERNEL):
            continue
        _known("--scale", "stage", stage, {name for one in graph.segments for name in one.within})
        for at, one in enumerate(graph.segments):
            if stage in one.within:
                took[at] = one.capture_ns + (took[at] - one.capture_ns) * factor
            delay[at] *= factor if stage in one.around else 1.0
        for number, carried in enumerate(graph.carried):
            before[number] *= factor if stage in graph.segments[carried.segment].within else 1.0
    for stage in changes.balance:
        _known("--balance", "stage of several workers", stage, _balanced(graph))
        for at, factor in _shares(graph, stage).items():
            took[at] *= factor
    for name, seconds in changes.tools.items():
        _known("--tool", "whole call of", _tool(name), calls)
        for at, call_ns in calls[_tool(name)].items():
            one = graph.segments[at]
            took[at] = (one.end_ns - one.begin_ns) * seconds * 1e9 / call_ns
    blocked = _blocked(graph)
    for name in changes.unblock:
        _known("--unblock", "event loop that is blocked by", _tool(name), blocked)
        for at in blocked[_tool(name)]:
            took[at] = 0.0
    whole = ([round(ns) for ns in column] for column in (took, delay, before))
    took_ns, delay_ns, before_ns = whole
    if chains is not None:
        graph, (took_ns, delay_ns) = chains.graph, chains.times(took_ns, delay_ns)
    graph = graph.with_polls([changes.scale.get(POLLING, 1.0)] * len(took))
    after: list[Sequence[int]] = [one.after for one in graph.segments]
    found = replay(graph, took_ns, delay_ns, after, before_ns)
    if changes.no_tail is None:
        return found
    if not graph.tails:
        raise ConfigError("--no-tail", "no stage waits for trajectories or requests")
    for at, left_out in _tails(found, changes.no_tail):
        after[at] = [before for before in after[at] if before not in left_out]
    return replay(graph, took_ns, delay_ns, after, before_ns)


def _with_resources(
    found: Replay, changes: Changes, assumed: list[str], notes: list[str]
) -> tuple[Replay, list[int]]:
    """Return the replay with other resources, and the durations (ns) that its interval spans.

    Args:
        found: The replay with all other changes.
        changes: The changes.
        assumed: Sentences on what is assumed, which get more.
        notes: Sentences on extrapolation, which get more.
    """
    graph, ahead, replicas, factors = found.graph, changes.ahead, changes.replicas, [1.0]
    if changes.split or ahead:
        option = "--split" if changes.split else "--async"
        _known(option, "stage", ROLLOUT, {one.within[0] for one in graph.segments if one.within})
        if not graph.whole:
            raise ConfigError(
                option, "needs a step whose rollout begins and ends in it, with engines recorded"
            )
    if changes.split:
        replicas, factor = _pools(graph, *changes.split, assumed)
        factors = [factor, 1.0]
        replicas = replicas if replicas != len(graph.engines) else None
    elif replicas is not None:
        assumed.append(f"the capture has all replicas of the run: {len(graph.engines):,}")
    logged, rollouts = has_requests(graph), [found]
    if replicas is not None and changes.split and not logged:
        ratio = len(graph.engines) / replicas
        rollouts = [_slower(found, factor) for factor in ((1 + ratio) / 2, 1.0, ratio)]
    elif replicas is not None and not (ahead > 1 and logged):
        option = "--split" if changes.split else "--replicas"
        times_ns, said, extrapolated = on_replicas(found, replicas, option)
        assumed += said
        notes += extrapolated
        rollouts = [replay(graph, list(map(round, ns)), found.delay_ns, found.given) for ns in times_ns]
    if not logged and (changes.split or ahead > 1):
        notes.append(_NOT_LOGGED)
    both = [_trained(one, factor) for one in rollouts for factor in factors]
    if not ahead:
        return both[0], [one.span_ns for one in both]
    loop = graph.segments[graph.last].who  # whose own time in the rollout may be a part of the training
    pairs = [
        (
            _times(one, lambda stage, part, who=who: stage != ROLLOUT or part.who == who),  # type: ignore[misc]
            _times(one, lambda stage, _: stage in (ROLLOUT, WEIGHT_SYNC)),
        )
        for one in both
        for who in ("", loop)
    ]
    if ahead == 1:
        longer = [max(pair, key=lambda one: one.span_ns) for pair in pairs]
        return longer[0], [one.span_ns for one in longer]
    training, rollout = pairs[0]
    alone = _times(rollout, lambda stage, _: stage == ROLLOUT)
    sync_ns = rollout.span_ns - alone.span_ns
    trained_ns, made_ns = ([one.span_ns - sync_ns for one in of] for of in zip(*pairs, strict=True))
    trained_ns = [trained_ns[0], min(trained_ns), max(trained_ns)]
    if logged:
        steps_ns, said, extrapolated = steps_ahead(alone, replicas, ahead, trained_ns)
        assumed += said
        notes += extrapolated
    else:  # engines are as fast as before beside the rollouts of other steps, or share their time among them
        made_ns = [made_ns[0], min(made_ns), max(made_ns)]
        fast = [max(t, (t + made) / (ahead + 1)) for t, made in zip(trained_ns, made_ns, strict=True)]
        slow = [max(pair) for pair in zip(trained_ns, made_ns, strict=True)]
        steps_ns = [(fast[0] + slow[0]) / 2, fast[1], slow[2]]
    if steps_ns[0] > trained_ns[0]:
        whole = rollout._replace(graph=replace(graph, polls={}))  # a mean of steps ends at no poll
        training = _slower(whole, steps_ns[0] / alone.span_ns)
    return training, [training.span_ns, *(round(ns) + sync_ns for ns in steps_ns)]


def _pools(graph: Graph, training: int, rollout: int, assumed: list[str]) -> tuple[int, float]:
    """Return the number of replicas of a split, and the factor of the training's time in proportion.

    A worker without a known device counts as one, unless other workers have devices.

    Args:
        graph: The graph.
        training: Number of devices of the training.
        rollout: Number of devices of the rollout.
        assumed: Sentences on what is assumed, which get one more.
    """
    trainers = {one.who for one in graph.segments if _trains(one)}
    if not trainers:
        raise ConfigError("--split", "needs stages of workers that train")
    on_devices = any(graph.devices.values())
    sizes = {len(graph.devices.get(name, ())) or int(not on_devices) for name in graph.engines}
    if len(sizes) != 1 or not min(sizes):
        raise ConfigError("--split", "the capture does not tell how many devices each replica has")
    (size,) = sizes
    if rollout % size:
        raise ConfigError("--split", f"a replica has {size} devices, and {rollout} is no multiple of it")
    devices = set[str]().union(*(graph.devices.get(name) or {name} for name in trainers))
    assumed.append(
        f"the capture has all workers of the run: {len(devices):,} train, and {len(graph.engines):,} replicas"
    )
    return rollout // size, len(devices) / training


def _trains(one: Segment) -> bool:
    """Return whether a segment is work of the training."""
    is_work = one.kind not in (OWN, CAPTURE, NEXT_POLL) and not one.trajectory and one.request is None
    return is_work and bool(one.within) and one.within[0] not in (ROLLOUT, WEIGHT_SYNC, VALIDATE)


def _times(found: Replay, factor: Callable[[str, Segment], float], *, delays: bool = True) -> Replay:
    """Return a replay with factors of the durations, and of the delays before segments.

    Args:
        found: The replay.
        factor: Function of the outermost stage around a time, and of the segment.
        delays: Whether delays change, too.
    """
    took_ns, delay_ns = list(found.took_ns), list(found.delay_ns)
    for at, one in enumerate(found.graph.segments):
        took_ns[at] = round(took_ns[at] * factor((*one.within, "")[0], one))
        if delays:
            delay_ns[at] = round(delay_ns[at] * factor((*one.around, "")[0], one))
    return replay(found.graph, took_ns, delay_ns, found.given)


def _trained(found: Replay, factor: float) -> Replay:
    """Return the replay in which the training takes so many times as long."""
    return _times(found, lambda _, one: factor if _trains(one) else 1.0, delays=False)


def _slower(found: Replay, factor: float) -> Replay:
    """Return the replay in which the rollout takes so many times as long."""
    return _times(found, lambda stage, _: factor if stage == ROLLOUT else 1.0)


def _known(option: str, what: str, name: str, choices: Iterable[str]) -> None:
    names = set(choices)
    if name not in names:
        hint = choices_hint(name, names) if names else "there is none"
        raise ConfigError(option, f"the step has no {what} {name!r}; {hint}")


def _balanced(graph: Graph) -> list[str]:
    """Return the stages that several workers of a role run at once."""
    return sorted({name for (_, name, _), workers in Counter(graph.parts).items() if workers > 1})


def _shares(graph: Graph, stage: str) -> dict[int, float]:
    """Return the factor of each segment of a stage for which each worker takes the mean time.

    Workers that wait for each other take the mean between their collectives.
    """
    found: defaultdict[int, list[int]] = defaultdict(list)
    for at, one in enumerate(graph.segments):
        if one.part >= 0 and graph.parts[one.part][1] == stage:
            found[one.part].append(at)
    runs: defaultdict[tuple[str, str, int], list[list[int]]] = defaultdict(list)
    for part, ats in found.items():
        runs[graph.parts[part]].append(ats)
    factors: dict[int, float] = {}
    for run in runs.values():
        kinds = {tuple(graph.segments[at].kind for at in ats) for ats in run}
        divided = len(kinds) == 1 and set(*kinds) <= {WORK, CAPTURE}
        for phase in zip(*([[at] for at in ats] for ats in run), strict=True) if divided else [run]:
            took = [_worked_ns(graph.segments[at] for at in ats) for ats in phase]
            mean = sum(took) / len(took)
            for ats, worked in zip(phase, took, strict=True):
                factors |= {at: mean / worked for at in ats if worked}
    return factors


def _worked_ns(segments: Iterable[Segment]) -> int:
    return length(spans_of((one.begin_ns, one.end_ns) for one in segments))


def _calls(graph: Graph) -> _Calls:
    """Return the calls whose duration can be set: by name, the call (ns) of each segment in one.

    Loop lag is no call, but goes with the calls that cause it.
    """
    found, names = defaultdict[str, dict[int, int]](dict), set[str]()
    for at, one in enumerate(graph.segments):
        for name, call_ns in reversed(one.calls):
            found[_tool(name)][at] = call_ns
            if not one.kind.startswith(LOOP_LAG):
                names.add(_tool(name))
    return {name: found[name] for name in names - {OTHERS}}


def _blocked(graph: Graph) -> dict[str, list[int]]:
    """Return the segments of loop lag by the name of the call that blocks the event loop."""
    found = defaultdict[str, list[int]](list)
    for at, one in enumerate(graph.segments):
        if one.kind.startswith(LAG_BY):
            found[_tool(one.kind.removeprefix(LAG_BY))].append(at)
    return {name: found[name] for name in found.keys() - {OTHERS, UNKNOWN}}


def _tool(name: str) -> str:
    return name.removeprefix(_TOOL)


def _tails(found: Replay, percent: float) -> Iterable[tuple[int, set[int]]]:
    """Yield each segment that waits for a rollout, and the trajectories or requests in its tail."""
    graph, rollouts = found.graph, defaultdict[tuple[object, ...], list[int]](list)
    for at in graph.tails:
        one = graph.segments[at]
        rollouts[one.within, graph.parts[one.part] if one.part >= 0 else at].append(at)
    for waiting in rollouts.values():
        ended = sorted((found.end_ns[last], last) for at in waiting for last in graph.tails[at])
        left_out = {last for _, last in ended[math.ceil(len(ended) * percent / 100) :]}
        yield from ((at, left_out) for at in waiting)


def _candidates(found: Replay, calls: _Calls) -> Iterable[tuple[str, str, Changes]]:
    """Yield single changes to try, each with the outermost stage that it changes, and in words.

    Of the calls, those are tried that take time on the path of the step, or on that of the next step's work.
    Of calls that are hardly longer than calls inside of them, the tool is tried.
    """
    graph = found.graph
    outermost: dict[str, str] = {}
    for one in graph.segments:
        outermost |= {name: outermost.get(name, one.within[0]) for name in one.within}
    for stage in dict.fromkeys(outermost.values()):
        yield stage, f"{stage} in 50% of its time", Changes(scale={stage: 0.5})
    if graph.polls:
        yield outermost[POLLING], "polls 2x as often", Changes(scale={POLLING: 0.5})
    for stage in _balanced(graph):
        yield outermost[stage], f"{stage} balanced", Changes(balance=[stage])
    if sum(map(len, graph.tails.values())) >= _LEAST_OF_TAIL:
        yield _first_stage(graph, graph.tails), "rollout without its last 10%", Changes(no_tail=90.0)
    spent, tools, tried = Counter[str](), set[str](), list[str]()
    for last in {graph.last, *(one.mark for one in graph.carried)}:
        for part in critical_path(found, last):
            one = graph.segments[part.segment]
            names = (one.kind.removeprefix(LAG_BY), *dict(one.calls))
            tools |= {_tool(name) for name in names if name.startswith(_TOOL)}
            spent.update(dict.fromkeys(map(_tool, names), part.end_ns - part.begin_ns))
    blocked = _blocked(graph)
    for name in sorted(blocked.keys() & spent.keys()):
        yield _first_stage(graph, blocked[name]), f"{name} off the event loop", Changes(unblock=[name])
    for name in sorted(calls.keys() & spent.keys() - {GENERATE}, key=lambda name: (name not in tools, name)):
        same = any(
            math.isclose(spent[name], spent[one], rel_tol=_NESTED) and calls[name].keys() & calls[one].keys()
            for one in tried
        )
        if spent[name] > _LEAST_SHARE * found.span_ns and not same:
            tried.append(name)
            took_ns = [ns * _factor(found, at) for at, ns in calls[name].items() if found.took_ns[at]]
            half_s = float(f"{sum(took_ns) / max(len(took_ns), 1) / 2e9:.3g}")
            words = f"each {name} call at half the mean, {duration(half_s)}"
            yield _first_stage(graph, calls[name]), words, Changes(tools={name: half_s})


def _first_stage(graph: Graph, ats: Iterable[int]) -> str:
    """Return the outermost stage around the first of some segments in a stage."""
    return next((graph.segments[at].within[0] for at in ats if graph.segments[at].within), "")


def _helps(
    graph: Graph, found: Replay, calls: _Calls, changes: Changes, timed: Mapping[int, int]
) -> list[HelpRow]:
    """Return the single changes that make a step shorter, the largest effect first.

    Args:
        graph: The recorded step.
        found: The step with the changes so far.
        calls: The calls whose duration can be set.
        changes: The changes so far.
        timed: Duration (ns) of segments with other kernels.
    """
    rows, chains, span_ns = list[HelpRow](), chains_of(graph), found.span_ns
    for stage, words, more in _candidates(found, calls):
        both = changes.with_more(more)
        predicted_ns = _changed(graph, both, calls, timed, chains).span_ns
        change, share = predicted_ns - span_ns, (predicted_ns - span_ns) / max(span_ns, 1)
        row = HelpRow(
            change=words,
            option=" ".join(option for option in both.options() if option not in changes.options()),
            stage=stage,
            predicted_us=predicted_ns / 1000,
            difference_us=change / 1000,
            difference_share=share,
            hours_a_day=-share * graph.lanes * 24,
            unit="GPU-hours" if graph.on_device else "lane-hours",
        )
        rows += [row] if share < -_LEAST_SHARE else []
    return sorted(rows, key=lambda row: row.difference_us)


def _factor(found: Replay, at: int) -> float:
    """Return how many times as long as recorded a segment takes."""
    one = found.graph.segments[at]
    return found.took_ns[at] / max(one.end_ns - one.begin_ns, 1)


def _extrapolations(calls: _Calls, changes: Changes) -> Iterable[str]:
    """Yield a sentence for each duration of a tool that no call in the capture had."""
    for name, seconds in changes.tools.items():
        took = [call_ns / 1e9 for call_ns in calls[_tool(name)].values()]
        if not min(took) <= seconds <= max(took):
            yield (
                f"extrapolated: calls of {name} took {duration(min(took))} to {duration(max(took))} in the "
                f"capture, and none took {duration(seconds)}"
            )


def _path_rows(replayed: Replay) -> list[PathRow]:
    graph, rows = replayed.graph, list[PathRow]()
    for part in critical_path(replayed):
        one = graph.segments[part.segment]
        stages = one.around if part.is_delay else one.within
        row = PathRow(
            stage=" / ".join(stages) or OUTSIDE_STAGES,
            who=f"{one.who} {one.trajectory}" if one.trajectory else one.who,
            worker=one.who,
            kind=DELAY if part.is_delay else one.kind,
            begin_us=(part.begin_ns - graph.begin_ns) / 1000,
            duration_us=(part.end_ns - part.begin_ns) / 1000,
            share=(part.end_ns - part.begin_ns) / max(replayed.span_ns, 1),
            idle_us=None if part.is_delay else _idle_us(replayed, part.segment),
        )
        if rows and (row.stage, row.who, row.kind) == (rows[-1].stage, rows[-1].who, rows[-1].kind):
            row = added(rows.pop(), row)
        rows.append(row)
    return rows


def _idle_us(replayed: Replay, at: int) -> float | None:
    """Return the time in which all lanes of a worker are idle; ``None`` if no lane is recorded."""
    graph, one = replayed.graph, replayed.graph.segments[at]
    if one.kind != WORK or one.who not in graph.idle:
        return None
    idle_ns = length(within(graph.idle[one.who], one.begin_ns, one.end_ns))
    return idle_ns / 1000 * _factor(replayed, at)


def _slack_rows(replayed: Replay) -> list[SlackRow]:
    found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
    for at, one in enumerate(replayed.graph.segments):
        if replayed.took_ns[at] > 0:
            found[one.within[0] if one.within else OUTSIDE_STAGES, one.who].append(at)
    slack, end_ns, took_ns = slacks_ns(replayed), replayed.end_ns, replayed.took_ns
    return [
        SlackRow(
            stage=stage,
            who=who,
            time_us=length(spans_of((end_ns[at] - took_ns[at], end_ns[at]) for at in own)) / 1000,
            slack_us=min(slack[at] for at in own) / 1000,
        )
        for (stage, who), own in found.items()
    ]
