"""Exposed time: the seconds by which each stage of the loop lengthened the step, and the slowest
process.

The method is that of StageFrontier (arXiv 2606.06751). Each rank's durations are added up stage by
stage; the longest sum is the frontier. The exposed time of a stage is the growth of the frontier in
the stage. The leader is the process at the frontier; if one process calls workers, it is a worker
that ran in the stage.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import chain, pairwise
from math import inf
from operator import attrgetter, itemgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.step_summary import ExposedStage, RankUse, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WAIT
from verl_profiling.trajectories.spans import TRAJECTORY

TIED = 0.05
"""Tolerance, as a share of a stage's longest duration, within which processes count as tied."""

LATE = 0.08
"""Minimum lateness to collectives with which a process leads, as a share of the stage."""

_Floats = NDArray[np.float64]
_Whole = NDArray[np.int64]


class Standing(NamedTuple):
    """Comparison of the processes of one role in one stage of the loop.

    Attributes:
        role: The role.
        lanes: Lanes of the role's processes.
        durations: Nanoseconds that each process spent in the stage.
        leader: Lane of the process at the frontier; empty if unknown.
        lead_ns: The leader's time in the stage minus the median of the others; 0 if the leader
            waited for the others.
        imbalance: Longest duration over the mean of all.
        clear: Whether the others waited for the leader; also ``True`` for a single process.
        ran: Names of the workers' own stages inside the loop's stage; empty for processes of the
            loop.
        begin_ns: Begin of the first worker stage, after the step began.
        end_ns: End of the last worker stage, after the step began.
    """

    role: str
    lanes: Sequence[str]
    durations: _Floats
    leader: str
    lead_ns: int
    imbalance: float
    clear: bool
    ran: tuple[str, ...] = ()
    begin_ns: float = 0.0
    end_ns: float = 0.0

    def by_lane(self) -> dict[str, float]:
        """Return the durations (ns) by lane."""
        return dict(zip(self.lanes, self.durations.tolist(), strict=True))


def exposed(
    summary: StepSummary, has_workers: bool = True, runs: StepRuns | None = None
) -> list[ExposedStage]:
    """Return the exposed time of the loop's stages, in order; a last row holds the time in no
    stage.

    ``C_r(s)`` is the time of process ``r`` of the loop in all stages up to ``s``. The frontier
    ``F(s)`` is the largest ``C_r(s)``, and the exposed time of ``s`` is ``F(s) - F(s-1)``. A
    frontier beyond the end of the step is clipped, so the rows always add up to the step, to the
    nanosecond.

    Args:
        summary: The summary of the step.
        has_workers: Whether the loop calls workers. Then a summary without workers has no clear
            leader.
        runs: The runs of the step, if computed already.
    """
    step_ns = summary.duration_ns
    if len(summary.loop) == 1 and not summary.workers:
        rows = _alone(summary, step_ns, leads=not has_workers)
        if rows is not None:
            return rows
    rows, done_ns = [], 0
    for name, (front_ns, [first, *_]) in _stages(
        summary, has_workers, runs or StepRuns(summary)
    ).items():
        reached_ns = min(round(front_ns), step_ns)
        rows.append(
            ExposedStage(
                name=name,
                exposed_ns=reached_ns - done_ns,
                role=first.role,
                leader=first.leader if first.clear else "",
                lead_ns=first.lead_ns if first.clear else 0,
                imbalance=first.imbalance,
            )
        )
        done_ns = reached_ns
    if done_ns < step_ns:
        role = summary.loop[0].role if summary.loop else "controller"
        rows.append(ExposedStage(name="", exposed_ns=step_ns - done_ns, role=role))
    return rows


def standings(summary: StepSummary) -> dict[str, list[Standing]]:
    """Return the standings of the working roles for each stage, first the role of the leader."""
    return {name: found for name, (_, found) in _stages(summary, True, StepRuns(summary)).items()}


def alone_ns(summary: StepSummary) -> float:
    """Return the time of a step in which no process was in a stage (ns);
    0 for a loop of several ranks.
    """
    processes = summary.processes
    runs = _runs_of(processes, summary.begin_ns, [0] * len(processes), {})
    busy_ns = float(runs.within(0, summary.duration_ns).own_time().length.sum())
    return summary.duration_ns - busy_ns if len(summary.loop) == 1 else 0.0


def _stages(
    summary: StepSummary, has_workers: bool, runs: StepRuns
) -> dict[str, tuple[float, list[Standing]]]:
    """Return for each stage of the loop the frontier after it (ns),
    and the standings of its roles.
    """
    if not summary.loop:
        return {}
    lanes = [use.lane for use in summary.loop]
    # Background stages are left out: their cost is the loop's wait for them.
    loop = runs.loop.at(~runs.named(runs.loop, *summary.background))
    names = list(runs.stages)
    calls = len(summary.loop) == 1 and bool(summary.workers or has_workers)
    workers = _Workers(summary, loop, runs) if calls and summary.workers else None
    found = {}
    for stage, front_ns, standing in _frontier(summary.loop[0].role, lanes, loop.own_time()):
        clear = standing.clear and (workers is not None or not calls)
        first, *others = workers.standings(stage, standing) if workers is not None else [standing]
        found[names[stage]] = front_ns, [first._replace(clear=clear and first.clear), *others]
    return found


def _alone(summary: StepSummary, left_ns: int, leads: bool) -> list[ExposedStage] | None:
    """Return :func:`exposed` of a loop whose stages run once and in sequence;
    ``None`` for any other loop.
    """
    [use] = summary.loop
    found: dict[str, ExposedStage] = {}
    busy_until_ns, leader = 0, use.lane if leads else ""
    for name, begin_ns, _, took_ns in sorted(use.each_run(), key=itemgetter(1)):
        if name in summary.background:
            continue
        if name in found or begin_ns < busy_until_ns:
            return None
        busy_until_ns = begin_ns + took_ns
        took_ns = min(took_ns, left_ns)
        left_ns -= took_ns
        found[name] = ExposedStage(name=name, exposed_ns=took_ns, role=use.role, leader=leader)
    return [
        *found.values(),
        *([ExposedStage(name="", exposed_ns=left_ns, role=use.role)] if left_ns else []),
    ]


class _Workers:
    """The workers of a single-process loop, in a step and the step before.

    A worker's run belongs to the loop's stage in which the middle of the run lies.
    """

    def __init__(self, summary: StepSummary, loop: Runs, runs: StepRuns) -> None:
        self._summary, self._stages, self._loop, self._runs = (
            summary,
            runs.stages,
            loop,
            runs.workers,
        )
        self._lanes = [use.lane for use in runs.processes]
        self._roles = runs.roles
        self._borders = np.searchsorted(runs.role_of, range(len(runs.roles) + 1)).tolist()
        middle = (self._runs.begin + self._runs.end) / 2
        home = np.full(middle.shape, -1)
        for row in np.argsort(loop.begin, kind="stable"):
            home[(loop.begin[row] <= middle) & (middle < loop.end[row])] = loop.stage[row]
        places = home * len(self._lanes) + self._runs.who
        self._inside = self._runs._replace(who=places).at(np.argsort(places, kind="stable"))
        # An agent loop may have sent more to an engine; without a stage, it may have kept the loop
        # waiting.
        agents = [
            use
            for use in summary.workers
            if use.spans and TRAJECTORY in [one.name for one in use.spans]
        ]
        hidden = any(not use.stages for use in agents)
        self._unclear = {summary.loop[0].role} if hidden else set()
        if hidden or (
            agents and any(use.has_spans for use in summary.workers if use.role == ROLLOUT_ROLE)
        ):
            self._unclear.add(ROLLOUT_ROLE)

    def standings(self, stage: int, own: Standing) -> list[Standing]:
        """Return the standings of roles in a stage of the loop; first the role that the loop waited
        for.

        A ``wait:`` stage counts all runs that overlap it. Any other stage counts the runs whose
        middle lies in it; without such runs, the runs that began before the stage and ended in it.
        Without any run, the loop itself worked.
        """
        name = list(self._stages)[stage]
        works = (
            []
            if (is_wait := name.startswith(WAIT))
            else self._works(self._inside, stage * len(self._lanes))
        )
        if not works:
            loop, runs, parts = self._loop.at(self._loop.stage == stage), self._under_way, []
            for begin, end in zip(loop.begin, loop.end, strict=True):
                ended = (runs.begin < begin) & (runs.end <= end + TIED * (end - begin))
                parts.append(runs.at(ended | is_wait).within(begin, end))
            works = self._works(_joined(parts).own_time(), 0)
        found = (
            _by_weight(name, self._loop.length[self._loop.stage == stage], works)
            if works
            else [own]
        )
        return [
            one._replace(leader="", lead_ns=0, clear=False) if one.role in self._unclear else one
            for one in found
        ]

    @cached_property
    def _under_way(self) -> Runs:
        """The runs of the workers in this step and the step before."""
        numbers = {lane: number for number, lane in enumerate(self._lanes)}
        earlier = [use for use in self._summary.earlier if use.lane in numbers]
        who = [numbers[use.lane] for use in earlier]
        return _joined([_runs_of(earlier, self._summary.begin_ns, who, self._stages), self._runs])

    def _works(self, runs: Runs, least: int) -> list[Standing]:
        """Return the standing of each role, led as the worker stage with the largest lead.

        Args:
            runs: The runs, by process.
            least: Number of the first process in the runs.
        """
        works, names = [], list(self._stages)
        rows = np.searchsorted(runs.who, [least + one for one in self._borders]).tolist()
        for number, (role, (begin, end)) in enumerate(
            zip(self._roles, pairwise(rows), strict=True)
        ):
            if begin == end:
                continue
            first, last = self._borders[number : number + 2]
            mine, lanes = runs.at(slice(begin, end)), self._lanes[first:last]
            mine = mine._replace(who=mine.who - least - first).own_time()
            totals = np.bincount(mine.who, mine.length, len(lanes)).astype(float)
            tied_ns = TIED * float(totals.max())
            stages = {names[stage]: standing for stage, _, standing in _frontier(role, lanes, mine)}
            standing = max(
                stages.values(),
                key=lambda one: (one.lead_ns if one.lead_ns > tied_ns else 0, one.durations.max()),
            )
            begin_ns, end_ns, ran = float(mine.begin.min()), float(mine.end.max()), tuple(stages)
            works.append(
                standing._replace(durations=totals, ran=ran, begin_ns=begin_ns, end_ns=end_ns)
            )
        return works


def _by_weight(name: str, loop_ns: _Floats, works: list[Standing]) -> list[Standing]:
    """Return the standings of roles in a stage of the loop; first the role that the loop waited
    for.

    If a role ran a stage of the same name, other roles are left out. The role that worked longest
    comes first; of concurrent roles, the role that ended last.
    """
    works = [work for work in works if name in work.ran] or works
    slack_ns = TIED * float(loop_ns.sum())
    first = max(works, key=lambda work: work.durations.max())
    beside = [
        work
        for work in works
        if work is not first
        and min(work.end_ns, first.end_ns) - max(work.begin_ns, first.begin_ns) > slack_ns
    ]
    if beside:
        first = max([first, *beside], key=lambda work: work.end_ns)
    others = sorted(
        (work for work in works if work is not first), key=lambda work: -work.durations.max()
    )
    return [first._replace(clear=first.clear and not beside), *others]


def _frontier(role: str, lanes: Sequence[str], runs: Runs) -> Iterator[tuple[int, float, Standing]]:
    """Yield the index of each stage, the frontier after the stage (ns), and the standing of the
    processes.

    All ranks leave a collective together, and the rank that arrives first spends the most time in
    it. So a rank whose stage ends together with the others' does not lead. The last rank to enter
    leads, if known. Engines have no collectives.

    Args:
        role: Role of the processes.
        lanes: Lanes of the processes.
        runs: Stage runs of the processes, from :meth:`Runs.own_time`.
    """
    many = len(lanes)
    reached = np.zeros(many)
    for stage, those in _in_order(runs):
        here: _Floats = np.bincount(those.who, those.length, many).astype(float)
        reached += here
        front_ns, longest_ns = float(reached.max()), float(here.max())
        near = np.flatnonzero(front_ns - reached <= TIED * longest_ns)
        leader = int(near[here[near].argmax()])
        lead_ns, known = 0.0, True
        if many > 1:
            # If all are tied, they wait for each other.
            known = near.size < many
            lead_ns = max(0.0, float(here[leader]) - _median(here[np.arange(many) != leader]))
            if lead_ns and known and role != ROLLOUT_ROLE:
                ends = dict(zip(those.who.tolist(), those.end.tolist(), strict=True))
                own_end_ns = ends.pop(leader, -inf)
                known = not ends or 2 * (own_end_ns - _median([*ends.values()])) >= lead_ns
        clear = known and near.size == 1
        if not clear and (late_ns := those.late.max()) > LATE * longest_ns:
            late = np.zeros(many)
            np.maximum.at(late, those.who, those.late)
            leader = int(late.argmax())
            lead_ns = late_ns - np.delete(late, leader).max(initial=0.0)
            clear = known = bool(lead_ns > LATE * longest_ns)
            here = max(0.0, longest_ns - late_ns) + late
        mean_ns = float(here.sum()) / many
        yield (
            stage,
            front_ns,
            Standing(
                role=role,
                lanes=lanes,
                durations=here,
                leader=lanes[leader],
                lead_ns=round(lead_ns) if known else 0,
                imbalance=max(1.0, float(here.max()) / mean_ns) if mean_ns else 1.0,
                clear=clear,
            ),
        )


def _in_order(runs: Runs) -> list[tuple[int, Runs]]:
    """Return the runs of each stage, in order of the median of the processes' first begins."""
    stages = sorted({*runs.stage.tolist()})
    if len(stages) < 2:
        return [(stage, runs) for stage in stages]
    runs = runs.at(np.argsort(runs.stage, kind="stable"))
    borders = [*np.searchsorted(runs.stage, stages).tolist(), None]
    parts = [runs.at(slice(*border)) for border in pairwise(borders)]
    begins = [_median(part.begin[np.unique(part.who, return_index=True)[1]]) for part in parts]
    return [(stages[row], parts[row]) for row in np.argsort(begins, kind="stable")]


def _median(values: Sequence[float] | _Floats) -> float:
    ordered = np.sort(values)
    return float(ordered[(ordered.size - 1) // 2] + ordered[ordered.size // 2]) / 2


class Runs(NamedTuple):
    """Runs of stages, as columns: index of the process and of the stage, begin, end, time spent
    (ns).

    ``late`` is the process's total lateness to the collectives in the stage (ns).
    """

    who: _Whole
    stage: _Whole
    begin: _Floats
    end: _Floats
    length: _Floats
    late: _Floats

    def at(self, rows: NDArray[np.bool_] | _Whole | slice) -> Runs:
        """Return the rows that a mask, indices or a slice select."""
        return Runs(*(column[rows] for column in self))  # type: ignore[arg-type]

    def within(self, begin_ns: float, end_ns: float) -> Runs:
        """Return the runs clipped to an interval; runs outside of it are left out."""
        begin, end = np.maximum(self.begin, begin_ns), np.minimum(self.end, end_ns)
        late = self.late * (end - begin) / np.maximum(self.end - self.begin, 1.0)
        return self._replace(begin=begin, end=end, length=end - begin, late=late).at(begin < end)

    def own_time(self) -> Runs:
        """Return the runs by process and begin, without overlap with earlier runs."""
        if (self.who[1:] > self.who[:-1]).all():
            return self
        width = self.end.max() - self.begin.min() + 1.0
        # The runs of a process mostly are in order, which this sort makes use of.
        runs = self.at(np.argsort(self.begin + self.who * width, kind="stable"))
        busy = np.maximum.accumulate(runs.end + runs.who * width)[:-1] - runs.who[1:] * width
        begin = np.append(runs.begin[:1], np.clip(busy, runs.begin[1:], runs.end[1:]))
        covered = (begin - runs.begin) / np.maximum(runs.end - runs.begin, 1.0)
        return runs._replace(begin=begin, length=runs.length * (1.0 - covered))


class StepRuns:
    """The runs of a step's processes as columns, computed at the first use.

    Args:
        summary: The summary of the step.

    Attributes:
        stages: Index of each stage, by name.
        processes: The workers by role.
        roles: The roles of the workers.
        role_of: The index of the role of each worker.
    """

    def __init__(self, summary: StepSummary) -> None:
        self.stages: dict[str, int] = {}
        self.processes = sorted(summary.workers, key=attrgetter("role"))
        self.roles, self.role_of = numbered([use.role for use in self.processes])
        self._summary = summary

    @cached_property
    def loop(self) -> Runs:
        """The runs of the loop; processes have their index in the summary."""
        return self._of(self._summary.loop)

    @cached_property
    def workers(self) -> Runs:
        """The runs of the workers; processes have their index in :attr:`processes`."""
        return self._of(self.processes)

    def named(self, runs: Runs, *names: str) -> NDArray[np.bool_]:
        """Return a mask of the runs of stages with these names."""
        return np.array([name in names for name in self.stages], dtype=bool)[runs.stage]

    def _of(self, uses: Sequence[RankUse]) -> Runs:
        return _runs_of(uses, self._summary.begin_ns, range(len(uses)), self.stages)


def numbered(names: Sequence[str]) -> tuple[list[str], _Whole]:
    """Return the different names, and the index of each name among them."""
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return list(numbers), np.fromiter(map(numbers.__getitem__, names), np.int64, len(names))


def _joined(parts: Sequence[Runs]) -> Runs:
    """Concatenate tables of runs."""
    return Runs(*map(np.concatenate, zip(*parts, strict=True)))


def _runs_of(
    uses: Sequence[RankUse], origin_ns: int, numbers: Sequence[int], stages: dict[str, int]
) -> Runs:
    """Return the stage runs of processes, in nanoseconds after ``origin_ns``.

    Args:
        uses: The processes, with their stages in one step.
        origin_ns: The unix time that becomes 0.
        numbers: Index of each process in the table.
        stages: Index of each stage, by name; new names are added.
    """
    kinds, kind = numbered(
        [use.stages for use in uses]
    )  # most processes of a role have the same stages
    names = [names.split("\n") for names in kinds]
    first = np.cumsum([0, *map(len, names)])[kind]
    index = np.array(
        [stages.setdefault(name, len(stages)) for name in chain(*names)], dtype=np.int64
    )
    runs = [use.runs for use in uses]
    rows = np.frombuffer(b"".join(runs), np.int64).reshape(-1, 4)
    at = np.repeat(np.arange(len(uses)), np.fromiter(map(len, runs), np.int64, len(uses)) // 32)
    who, stage = np.array(numbers, dtype=np.int64)[at], index[first[at] + rows[:, 0]]
    begin, end = (rows[:, 1:3] - origin_ns).T.astype(float)
    late = np.zeros((len(uses), len(stages)))
    for number, late_ns in [
        (number, use.late_ns) for number, use in enumerate(uses) if use.late_ns
    ]:
        late[number, [stages[name] for name in late_ns]] = [*late_ns.values()]
    return Runs(who, stage, begin, end, rows[:, 3].astype(float), late[at, stage])
