"""The effects of the changes of ``what-if``: the recorded step is replayed with them."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from verl_profiling.errors import ConfigError
from verl_profiling.files.step_summary import ROLLOUT
from verl_profiling.files.trajectory_log import NO_CPU, NO_SPAN
from verl_profiling.manifest import POLLING, WAIT
from verl_profiling.predict.balance import shares_by_work
from verl_profiling.predict.changes import Changes, check_name, factor_of, tool_name
from verl_profiling.predict.kernels import KERNEL
from verl_profiling.predict.replays import Replay, replay
from verl_profiling.predict.segments import LAG_BY, WORK, Chains, Segment
from verl_profiling.predict.step_graph import Graph
from verl_profiling.slices.intervals import Ints, length, time_of
from verl_profiling.slices.slices import Floats
from verl_profiling.steps.requests import VALIDATE
from verl_profiling.steps.trajectory_columns import BEFORE, LOOP_LAG, OTHERS
from verl_profiling.steps.trajectory_spans import UNKNOWN
from verl_profiling.units import duration


class CallTimes(NamedTuple):
    """Segments inside calls of one name, and the duration of the call around each (ns)."""

    at: Ints
    took_ns: Ints


class Baseline:
    """The recorded step, from which all changes start, and the names that changes can have.

    Args:
        graph: The graph of the step.
        timed_ns: Duration of segments with changed kernels, by index of the segment.

    Attributes:
        graph: The graph.
        calls: Names of calls whose duration can be set.
        inside: Segments outside chains by the name of each stage around them.
        blocked: Segments of loop lag by the name of the call that blocks the event loop.
        balanced: Stages that several workers of a role run at once.
        waits: Segments that wait for something unknown.
    """

    def __init__(self, graph: Graph, timed_ns: Mapping[int, int] = {}) -> None:
        self.graph, table = graph, graph.segments
        self._chains = table.chains
        self._recorded_ns = table.recorded_ns().astype(float)
        self._capture_ns = np.zeros(len(table))
        self._capture_ns[table.chained :] = [one.capture_ns for one in table.others]
        self._took_ns = self._recorded_ns.copy()
        for at, took_ns in timed_ns.items():
            self._took_ns[at] = took_ns
        workers = Counter(graph.parts)
        self.balanced = sorted({name for (_, name, _), many in workers.items() if many > 1})
        waits = [at for at, segment in table.of_others() if segment.waits]
        self.inside = defaultdict[str, list[int]](list)
        self._around = defaultdict[str, list[int]](list)
        self._called = defaultdict[str, dict[int, int]](dict)
        blocked, others = defaultdict[str, list[int]](list), set[str]()
        for at, segment in table.of_others():
            others |= self._add(at, segment)
            if segment.kind.startswith(LAG_BY):
                blocked[tool_name(segment.kind.removeprefix(LAG_BY))].append(at)
        if self._chains is not None:
            waits += np.flatnonzero(self._chains.of_kinds(WAIT)).tolist()
            others |= self._add_chains(self._chains, blocked)
        self.waits = np.array(waits, np.int64)
        # Lag is no call of its own: its time goes with the call that blocks the event loop.
        self.calls = {name for name in others if name != OTHERS and not name.startswith(WAIT)}
        self.blocked = {
            name: ats
            for name, ats in blocked.items()
            if name not in (NO_CPU, OTHERS, UNKNOWN) and not name.startswith(WAIT)
        }

    @cached_property
    def unseen(self) -> list[int]:
        """Segments of trajectories from before the capture, of whose calls nothing is known."""
        return [at for at, segment in self.graph.segments.of_others() if segment.kind == BEFORE]

    def _add(self, at: int, segment: Segment) -> set[str]:
        """Note a segment under the names of its stages and calls; return the names of its calls,
        if it is no lag.
        """
        for name in segment.within:
            self.inside[name].append(at)
        for name in segment.around:
            self._around[name].append(at)
        if segment.waits:
            return set()
        for name, call_ns in reversed(segment.calls):
            self._called[tool_name(name)][at] = call_ns
        if segment.kind.startswith(LOOP_LAG):
            return set()
        return {tool_name(name) for name, _ in segment.calls}

    def _add_chains(self, chains: Chains, blocked: dict[str, list[int]]) -> set[str]:
        """Note the segments of chains under the calls around them, and segments of lag in
        ``blocked``; return the names of calls around segments that are no lag.
        """
        is_lag = chains.of_kinds(LOOP_LAG)
        names, table = set[str](), chains.records.spans
        for row in chains.open_spans():
            rows = row[(row != NO_SPAN) & ~is_lag]
            names |= {tool_name(chains.records.names[name]) for name in np.unique(table.name[rows])}
        for number, kind in enumerate(chains.kinds):
            if kind.startswith(LAG_BY) and number in chains.kind:
                ats = np.flatnonzero(chains.kind == number).tolist()
                blocked[tool_name(kind.removeprefix(LAG_BY))] += ats
        return names

    def calls_of(self, name: str) -> CallTimes:
        """Return the segments inside calls of a name; of nested ones, the outermost call counts."""
        called = self._called.get(name, {}).items()
        times = np.array([*called], np.int64).reshape(-1, 2)
        if self._chains is not None:
            of_rows = np.full(len(self._chains.begin), NO_SPAN)
            spans = self._chains.records.spans
            has_name = [tool_name(one) == name for one in self._chains.records.names]
            is_call = np.array([*has_name, False])[np.append(spans.name, -1)]
            for row in self._chains.open_spans():
                of_rows = np.where(is_call[row], row, of_rows)
            rows = np.flatnonzero(of_rows != NO_SPAN)
            took_ns = (spans.end - spans.since)[of_rows[rows]]
            times = np.append(times, np.stack((rows, took_ns), axis=1), axis=0)
        return CallTimes(*times.T)

    def replay(self, changes: Changes, waits: float = 1.0, unseen: float = 1.0) -> Replay:
        """Return the replay of the step with all changes but replicas and steps ahead.

        Args:
            changes: The changes.
            waits: Factor of the waits for something unknown.
            unseen: Factor of what trajectories did before the capture.

        Raises:
            ConfigError: The step has no stage, span or kernel of a name in the changes.
        """
        took, delay = self._times_ns(changes)
        took[self.waits] *= waits
        took[self.unseen] *= unseen
        took_ns, delay_ns = (np.rint(times).astype(np.int64) for times in (took, delay))
        after = self.graph.after()
        graph = self.graph.with_polls(lambda at: changes.scale.get(POLLING, 1.0))
        replayed = replay(graph, took_ns, delay_ns, after)
        if changes.no_tail is None:
            return replayed
        if not graph.tails:
            raise ConfigError(
                "--no-tail", "no stage waits for trajectories or requests whose ends are known"
            )
        for at, left_out in _tails(replayed, changes.no_tail):
            # of a rollout one step ahead, trajectories that ended before the step are not recorded
            if left_out & graph.cut or graph.carried:
                raise ConfigError(
                    "--no-tail",
                    "the tail began before the step, so not all of it is recorded; capture a "
                    "step in which the rollout begins and ends (one step off, there is none)",
                )
            number = at - graph.segments.chained
            after[number] = [one for one in after[number] if one not in left_out]
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
                if self._chains is not None:
                    rows = np.flatnonzero(self._chains.in_stage(stage))
                    took[rows] *= factor
                    delay[rows] *= factor
        for name in changes.balance:
            stage, _, way = name.partition("=")
            check_name("--balance", f"stage {stage!r} of several workers", stage, self.balanced)
            shares = shares_by_work(self.graph, stage, way) if way else _shares(self.graph, stage)
            for at, factor in shares.items():
                took[at] *= factor
        for name, value in changes.tools.items():
            check_name("--tools", f"call of {name!r}", tool_name(name), self.calls)
            (ats, calls_ns), times = self.calls_of(tool_name(name)), factor_of(value)
            if times is None:
                took[ats] = self._recorded_ns[ats] * float(value) * 1e9 / calls_ns
            else:
                took[ats] *= times
        for name in changes.unblock:
            what = f"call of {name!r} that blocks an event loop"
            check_name("--unblock", what, tool_name(name), self.blocked)
            took[self.blocked[tool_name(name)]] = 0.0
        return took, delay

    def factor_of_call(self, name: str, value: float | str) -> float:
        """Return how many times as long the calls of a name take with a change."""
        factor = factor_of(value)
        if factor is None:
            factor = float(value) * 1e9 / self.calls_of(tool_name(name)).took_ns.mean().item()
        return factor

    def hidden_ranks(self, stage: str) -> int:
        """Return the number of ranks in a stage whose waits for each other are not recorded; else
        0.

        Engines and agent loops do not wait for each other.
        """
        graph = self.graph
        chains = zip(self._chains.who, self._chains.links, strict=True) if self._chains else ()
        parts = {(one.who, one.part) for one in graph.segments.others}
        parts |= {(who, link.part) for who, link in chains}
        ranks = {who for who, part in parts if part >= 0 and graph.parts[part][1] == stage}
        is_hidden = stage not in (ROLLOUT, VALIDATE) and not ranks <= graph.synced | graph.engines
        return len(ranks) if is_hidden else 0

    def extrapolations(self, changes: Changes) -> Iterable[str]:
        """Yield a sentence for each duration of a tool that no call in the capture had."""
        for name, value in changes.tools.items():
            if factor_of(value) is not None:
                continue
            took_ns = self.calls_of(tool_name(name)).took_ns
            least_s, most_s = took_ns.min().item() / 1e9, took_ns.max().item() / 1e9
            if not least_s <= float(value) <= most_s:
                recorded = f"calls of {name} took {duration(least_s)} to {duration(most_s)}"
                yield (
                    f"extrapolated: {recorded} in the capture, and none took "
                    f"{duration(float(value))}"
                )


def _shares(graph: Graph, stage: str) -> dict[int, float]:
    """Return the factors of a stage's segments with which each worker takes the mean time.

    Ranks that wait for each other take the mean of each time between two collectives.
    """
    side_by_side = defaultdict[tuple[str, str, int], dict[int, list[int]]](dict)
    chains = graph.segments.chains
    for link, _, of_chain in chains.each() if chains else ():
        if link.part >= 0 and graph.parts[link.part][1] == stage:
            ats = side_by_side[graph.parts[link.part]].setdefault(link.part, [])
            ats += of_chain
    for at, segment in graph.segments.of_others():
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
    """Divide the segments of workers at their collectives, if all workers have the same
    collectives.

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
        ended = sorted((replayed.ends[last], last) for at in waiting for last in graph.tails[at])
        left_out = {last for _, last in ended[math.ceil(len(ended) * percent / 100) :]}
        yield from ((at, left_out) for at in waiting)
