"""The changes that a user can ask for with ``what-if``: their values, their options, their effect.

A new change is a field of :class:`Changes`, with its check, its option and its assumption, and
takes effect in :class:`Baseline`. ``CapturedStep.what_if`` and ``commands/what_if.py`` pass it;
``predict/prediction.py`` offers it as one that would help. Other resources are replayed in
:mod:`verl_profiling.predict.replicas`.
"""

from __future__ import annotations

import math
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import msgspec
import numpy as np

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.manifest import POLLING, WAIT
from verl_profiling.numbers.lost import ROLLOUT
from verl_profiling.predict.kernels import KERNEL
from verl_profiling.predict.segments import LAG_BY, WORK, Graph, Replay, Segment, replay
from verl_profiling.slices.intervals import length, time_of
from verl_profiling.slices.slices import Floats
from verl_profiling.steps.nesting import UNKNOWN
from verl_profiling.steps.records import LOOP_LAG, OTHERS
from verl_profiling.steps.requests import VALIDATE
from verl_profiling.units import duration

TOOL = "tool:"
"""Prefix of the name of a tool's spans, e.g. ``tool:search``; changes have the name without it."""
_ASSUMED = (
    "a scaled stage has the same shape, with its own delays and waits",
    "code of the host, gaps and other kernels take as long as before",
    "a balanced stage takes the mean of its workers, who still do the same work in all",
    "a rollout without its tail is followed by stages that take as long as before",
    "other calls take as long as before a tool changed, also in a fuller engine",
    "calls take as long as before in threads of their own, however many at once",
    "rollout and training run side by side as fast as alone, and neither runs in a weight update",
)


class Changes(msgspec.Struct, frozen=True):
    """Changes of a step.

    Attributes:
        scale: Factor of the time in a stage, such as ``{"rollout": 0.5}``, or of kernels by a
            pattern of their names: ``{"kernel:*gemm*": 0.5}``.
        balance: Stages in which each worker takes the mean time of all.
        no_tail: Percentage of trajectories (else requests) after which a rollout ends.
        tools: Duration of each call of a tool (s), or its factor as text, e.g. ``0.5x``.
        unblock: Tools and spans that no longer block the event loop.
        replicas: Number of replicas of the rollout engine.
        steps_ahead: Steps that a rollout is ahead of the training, on devices of its own: 0 or 1.

    Raises:
        ConfigError: A value has a wrong type, or is a number that no step has.
    """

    scale: Mapping[str, float] = {}
    balance: Sequence[str] = ()
    no_tail: float | None = None
    tools: Mapping[str, float | str] = {}
    unblock: Sequence[str] = ()
    replicas: int | None = None
    steps_ahead: int | None = None

    def __post_init__(self) -> None:
        for option, names in (("--balance", self.balance), ("--unblock", self.unblock)):
            is_list = isinstance(names, Sequence) and not isinstance(names, str)
            _check(is_list, option, f"{names!r} is no list of names, such as ['search']")
        _check_numbers("--scale", self.scale, "0.5")
        _check_numbers("--tools", self.tools, "0.2 (s)")
        tail, replicas, ahead = self.no_tail, self.replicas, self.steps_ahead
        is_percentage = tail is None or (isinstance(tail, Real) and 0 < tail <= 100)
        _check(is_percentage, "--no-tail", f"{tail!r} is not a percentage above 0 and at most 100")
        is_count = replicas is None or (isinstance(replicas, Integral) and replicas >= 1)
        _check(is_count, "--replicas", f"{replicas!r} is not an integer of at least 1")
        _check(ahead in (None, 0, 1), "--async", f"{ahead!r} is not 0 or 1")

    def options(self) -> list[str]:
        """Return the changes as options of the command."""
        pairs: list[tuple[str, str]] = []
        for name, factor in self.scale.items():
            pairs.append(("--scale", f"{name}={factor:.6g}"))
        for name in self.balance:
            pairs.append(("--balance", _listed(name)))
        if self.no_tail is not None:
            pairs.append(("--no-tail", f"{self.no_tail:.6g}"))
        for name, value in self.tools.items():
            text = value if isinstance(value, str) else f"{value:.6g}s"
            pairs.append(("--tools", f"{name}={text}"))
        for name in self.unblock:
            pairs.append(("--unblock", _listed(name)))
        for option, count in (("--replicas", self.replicas), ("--async", self.steps_ahead)):
            if count is not None:
                pairs.append((option, str(count)))
        return [f"{option} {shlex.quote(value)}" for option, value in pairs]

    def with_more(self, more: Changes) -> Changes:
        """Return these changes and more; factors of one stage are multiplied,
        and other values replaced.
        """
        scale, tools = {**self.scale}, {**self.tools}
        for name, factor in more.scale.items():
            scale[name] = scale.get(name, 1.0) * factor
        for name, value in more.tools.items():
            tools[name] = self._tool(name, value)
        return msgspec.structs.replace(
            self,
            scale=scale,
            balance=list(dict.fromkeys((*self.balance, *more.balance))),
            no_tail=self.no_tail if more.no_tail is None else more.no_tail,
            tools=tools,
            unblock=list(dict.fromkeys((*self.unblock, *more.unblock))),
        )

    def _tool(self, name: str, value: float | str) -> float | str:
        """Return a tool's value after one more change: ``0.5x`` multiplies, and seconds replace."""
        factor, before = factor_of(value), self.tools.get(name, "1x")
        if factor is None:
            return value
        factor_before = factor_of(before)
        return float(before) * factor if factor_before is None else f"{factor_before * factor:.6g}x"

    @property
    def kernels(self) -> dict[str, float]:
        """Scale factor of kernels, by the pattern of their names."""
        scale = self.scale.items()
        return {name[len(KERNEL) :]: by for name, by in scale if name.startswith(KERNEL)}

    def assumed(self) -> list[str]:
        """Return a sentence on the assumption of each kind of change."""
        scaled = len(self.scale) > len(self.kernels)
        times = (scaled, self.kernels, self.balance, self.no_tail, self.tools, self.unblock)
        changed = (*times, self.steps_ahead)
        return [sentence for sentence, change in zip(_ASSUMED, changed, strict=True) if change]


def _check(holds: bool, option: str, problem: str) -> None:
    if not holds:
        raise ConfigError(option, problem)


def _check_numbers(option: str, values: Any, example: str) -> None:
    is_mapping = isinstance(values, Mapping)
    _check(is_mapping, option, f"{values!r} is no mapping; give {{'name': {example}}}")
    for name, value in values.items():
        factor = factor_of(value) if option == "--tools" else None
        number: float | str = value if factor is None else factor
        is_finite = isinstance(number, Real) and 0 <= number < math.inf
        problem = f"{name}={value!r} is not a finite number of at least 0, such as {example}"
        _check(is_finite, option, problem)


class Baseline:
    """The recorded step, from which all changes start, and the names that changes can have.

    Args:
        graph: The graph of the step.
        timed_ns: Duration of segments with changed kernels, by index of the segment.

    Attributes:
        graph: The graph.
        calls: Calls whose duration can be set: by name, the duration (ns) of the call around each
            segment.
        inside: Segments by the name of each stage around them.
        blocked: Segments of loop lag by the name of the call that blocks the event loop.
        balanced: Stages that several workers of a role run at once.
        waits: Segments that wait for something unknown.
    """

    def __init__(self, graph: Graph, timed_ns: Mapping[int, int] = {}) -> None:
        self.graph, segments = graph, graph.segments
        self._recorded_ns = np.array(graph.recorded_ns(), float)
        self._capture_ns = np.array([one.capture_ns for one in segments], float)
        self._took_ns = self._recorded_ns.copy()
        for at, took_ns in timed_ns.items():
            self._took_ns[at] = took_ns
        workers = Counter(graph.parts)
        self.balanced = sorted({name for (_, name, _), many in workers.items() if many > 1})
        self.waits = [at for at, segment in enumerate(segments) if segment.waits]
        self.calls = defaultdict[str, dict[int, int]](dict)
        self.blocked = defaultdict[str, list[int]](list)
        self.inside = defaultdict[str, list[int]](list)
        self._around = defaultdict[str, list[int]](list)
        for at, segment in enumerate(segments):
            self._add(at, segment)
        for name, of_name in [*self.calls.items()]:
            # Lag is no call of its own: its time goes with the call that blocks the event loop.
            is_lag = all(segments[at].kind.startswith(LOOP_LAG) for at in of_name)
            if is_lag or name == OTHERS or name.startswith(WAIT):
                del self.calls[name]
        for name in [*self.blocked]:
            if name in (OTHERS, UNKNOWN) or name.startswith(WAIT):
                del self.blocked[name]

    def _add(self, at: int, segment: Segment) -> None:
        """Note a segment under the names of its stages and calls."""
        for name in segment.within:
            self.inside[name].append(at)
        for name in segment.around:
            self._around[name].append(at)
        if not segment.waits:
            for name, call_ns in reversed(segment.calls):
                self.calls[tool_name(name)][at] = call_ns
        if segment.kind.startswith(LAG_BY):
            self.blocked[tool_name(segment.kind.removeprefix(LAG_BY))].append(at)

    def replay(self, changes: Changes, waits: float = 1.0) -> Replay:
        """Return the replay of the step with all changes but replicas and steps ahead.

        Args:
            changes: The changes.
            waits: Factor of the waits for something unknown.

        Raises:
            ConfigError: The step has no stage, span or kernel of a name in the changes.
        """
        took, delay = self._times_ns(changes)
        took[self.waits] *= waits
        took_ns, delay_ns = (np.rint(times).astype(int).tolist() for times in (took, delay))
        after = [one.after for one in self.graph.segments]
        graph = self.graph.with_polls([changes.scale.get(POLLING, 1.0)] * len(after))
        replayed = replay(graph, took_ns, delay_ns, after)
        if changes.no_tail is None:
            return replayed
        if not graph.tails:
            raise ConfigError("--no-tail", "no stage waits for trajectories or requests")
        for at, left_out in _tails(replayed, changes.no_tail):
            if left_out & graph.cut:
                raise ConfigError(
                    "--no-tail",
                    "the tail began before the step, so not all of it is recorded; capture a "
                    "step in which "
                    "the rollout begins",
                )
            after[at] = [one for one in after[at] if one not in left_out]
        return replay(graph, took_ns, delay_ns, after)

    def _times_ns(self, changes: Changes) -> tuple[Floats, Floats]:
        """Return the changed durations of segments, and delays before them."""
        took, delay = self._took_ns.copy(), np.array(self.graph.delay_ns, float)
        for stage, factor in changes.scale.items():
            if not stage.startswith(KERNEL):
                check_name("--scale", f"stage {stage!r}", stage, self.inside)
                inside = self.inside[stage]
                kept = self._capture_ns[inside]  # the time of the capture stays
                took[inside] = kept + (took[inside] - kept) * factor
                delay[self._around[stage]] *= factor
        for stage in changes.balance:
            check_name("--balance", f"stage {stage!r} of several workers", stage, self.balanced)
            for at, factor in _shares(self.graph, stage).items():
                took[at] *= factor
        for name, value in changes.tools.items():
            check_name("--tools", f"call of {name!r}", tool_name(name), self.calls)
            calls = self.calls[tool_name(name)]
            ats, times = [*calls], factor_of(value)
            if times is None:
                took[ats] = self._recorded_ns[ats] * float(value) * 1e9 / [*calls.values()]
            else:
                took[ats] *= times
        for name in changes.unblock:
            what = f"call of {name!r} that blocks an event loop"
            check_name("--unblock", what, tool_name(name), self.blocked)
            took[self.blocked[tool_name(name)]] = 0.0
        return took, delay

    def hidden_ranks(self, stage: str) -> int:
        """Return the number of ranks in a stage whose waits for each other are not recorded; else
        0.

        Engines and agent loops do not wait for each other.
        """
        graph = self.graph
        ranks = {
            segment.who
            for segment in graph.segments
            if segment.part >= 0 and graph.parts[segment.part][1] == stage
        }
        is_hidden = stage not in (ROLLOUT, VALIDATE) and not ranks <= graph.synced | graph.engines
        return len(ranks) if is_hidden else 0

    def extrapolations(self, changes: Changes) -> Iterable[str]:
        """Yield a sentence for each duration of a tool that no call in the capture had."""
        for name, value in changes.tools.items():
            took = [call_ns / 1e9 for call_ns in self.calls[tool_name(name)].values()]
            if factor_of(value) is None and not min(took) <= float(value) <= max(took):
                recorded = f"calls of {name} took {duration(min(took))} to {duration(max(took))}"
                yield (
                    f"extrapolated: {recorded} in the capture, and none took "
                    f"{duration(float(value))}"
                )


def factor_of(value: object) -> float | None:
    """Return the factor that a text such as ``0.5x`` gives; ``None`` for anything else."""
    match = re.fullmatch(r"(\d+(\.\d*)?|\.\d+)x", value) if isinstance(value, str) else None
    return float(match[1]) if match else None


def _listed(name: str) -> str:
    r"""Return a name as an item of an option's list, in which a comma of a name is ``\,``."""
    return name.replace(",", "\\,")


def tool_name(name: str) -> str:
    """Return the name of a span as users give it: of a tool, without ``tool:``."""
    return name.removeprefix(TOOL)


def check_name(option: str, what: str, name: str, choices: Iterable[str]) -> None:
    """Refuse a name that the step does not have.

    Args:
        option: The option with the name.
        what: The named thing in words, such as ``stage 'rollout'``.
        name: The name.
        choices: Names that the step has.
    """
    names = set(choices)
    if name not in names:
        hint = choices_hint(name, names) if names else "it has none of any name"
        raise ConfigError(option, f"the step has no {what}; {hint}")


def _shares(graph: Graph, stage: str) -> dict[int, float]:
    """Return the factors of a stage's segments with which each worker takes the mean time.

    Ranks that wait for each other take the mean of each time between two collectives.
    """
    side_by_side = defaultdict[tuple[str, str, int], dict[int, list[int]]](dict)
    for at, segment in enumerate(graph.segments):
        if segment.part >= 0 and graph.parts[segment.part][1] == stage:
            side_by_side[graph.parts[segment.part]].setdefault(segment.part, []).append(at)
    factors: dict[int, float] = {}
    for of_workers in side_by_side.values():
        for phase in _phases(graph, list(of_workers.values())):
            worked_ns = [length(time_of(graph.segments[at] for at in ats)) for ats in phase]
            mean_ns = sum(worked_ns) / len(worked_ns)
            for ats, ns in zip(phase, worked_ns, strict=True):
                factors |= {at: mean_ns / ns for at in ats if ns}
    return factors


def _phases(graph: Graph, of_workers: list[list[int]]) -> list[list[list[int]]]:
    """Divide the segments of workers at their collectives, if all workers have the same ones.

    Each phase has the segments of each worker. Workers without common collectives have one phase.
    """
    kinds = {tuple(graph.segments[at].kind for at in ats) for ats in of_workers}
    if len(kinds) == 1 and set(*kinds) == {WORK}:
        return [[[at] for at in phase] for phase in zip(*of_workers, strict=True)]
    return [of_workers]


def _tails(replayed: Replay, percent: float) -> Iterable[tuple[int, set[int]]]:
    """Yield each segment that waits for a rollout, with the trajectories or requests in its tail:
    the last segments of those that end after ``percent`` of all.
    """
    graph, rollouts = replayed.graph, defaultdict[tuple[object, ...], list[int]](list)
    for at in graph.tails:
        segment = graph.segments[at]
        rollouts[segment.within, graph.parts[segment.part] if segment.part >= 0 else at].append(at)
    for waiting in rollouts.values():
        ended = sorted((replayed.end_ns[last], last) for at in waiting for last in graph.tails[at])
        left_out = {last for _, last in ended[math.ceil(len(ended) * percent / 100) :]}
        yield from ((at, left_out) for at in waiting)
