"""Exposed time of a step: by how much each stage of the loop lengthened it, and which process led.

The method is that of StageFrontier (arXiv 2606.06751). Each rank's durations are added up stage by stage; the
longest sum is the frontier. The exposed time of a stage is by how much it moves the frontier. If the loop is
one process that calls workers, a stage is led by one of the workers that ran in it, if any did.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import ExposedStage, RankUse, StepSummary
from verl_profiling.trajectories.spans import TRAJECTORY

TIED = 0.05
"""Tolerance, as a share of a stage's longest duration, within which processes count as tied."""

LATE = 0.08
"""Share of a stage from which the last process to enter a collective leads."""

SLOW = 1.15
"""An engine that leads beside agent loops is a suspect if its requests take longer by this ratio, too."""

_OF_A_STAGE = 0.1

WAIT = "wait:"
"""Prefix of a stage in which the loop only waits for a role, e.g. ``wait:rollout``."""


class Standing(NamedTuple):
    """Comparison of the processes of one role in one stage of the loop.

    Attributes:
        role: The role.
        durations: Nanoseconds that each process spent in the stage, by lane.
        leader: Lane of the process at the frontier; empty if unknown.
        lead_ns: The leader's time in the stage minus the median of the others; 0 if it waited for them.
        clear: Whether the others waited for the leader; also ``True`` for a single process.
        ran: Names of the processes' own stages inside the loop's stage.
    """

    role: str
    durations: dict[str, float]
    leader: str
    lead_ns: int
    clear: bool
    ran: tuple[str, ...] = ()


class Run(NamedTuple):
    """A run of a stage, and how late its process was to the collectives in the stage (ns).

    ``own_ns`` is the time spent in the run, without that of earlier runs at the same time.
    """

    stage: str
    begin_ns: int
    end_ns: int
    own_ns: float
    late_ns: int = 0


def exposed(
    summary: StepSummary, before: StepSummary | None = None, has_workers: bool = True
) -> list[ExposedStage]:
    """Return the exposed time of the loop's stages, in order; a last row holds the time in no stage.

    ``C_r(s)`` is the time of process ``r`` of the loop in all stages up to ``s``. The frontier ``F(s)`` is
    the largest ``C_r(s)``, and the exposed time of ``s`` is ``F(s) - F(s-1)``. A frontier beyond the end of
    the step is clipped, so the rows always add up to the step, to the nanosecond.

    Args:
        summary: The summary of the step.
        before: The summary of the step before, whose workers may still have run in this step.
        has_workers: Whether the loop calls workers. If so, no leader is clear in a summary without workers.
    """
    rows: list[ExposedStage] = []
    done_ns = 0
    for name, (front_ns, [first, *_]) in _stages(summary, before, has_workers).items():
        reached_ns = min(round(front_ns), summary.duration_ns)
        mean_ns = fmean(first.durations.values())
        rows.append(
            ExposedStage(
                name=name,
                exposed_ns=reached_ns - done_ns,
                role=first.role,
                leader=first.leader if first.clear else "",
                lead_ns=first.lead_ns if first.clear else 0,
                imbalance=max(1.0, max(first.durations.values()) / mean_ns) if mean_ns else 1.0,
            )
        )
        done_ns = reached_ns
    if done_ns < summary.duration_ns:
        role = summary.loop[0].role if summary.loop else "controller"
        rows.append(ExposedStage(name="", exposed_ns=summary.duration_ns - done_ns, role=role))
    return rows


def standings(summary: StepSummary, before: StepSummary | None = None) -> dict[str, list[Standing]]:
    """Return for each stage the standings of the roles that worked in it; the exposed row's role is first."""
    return {name: found for name, (_, found) in _stages(summary, before, True).items()}


def alone_ns(summary: StepSummary) -> float:
    """Return the time of a step in which no process was in a stage (ns); 0 for a loop of several ranks."""
    runs = [run for use in (*summary.loop, *summary.workers) for run in _runs_of(use)]
    busy_ns = sum(run.own_ns for run in _own_time(_within(runs, summary.begin_ns, summary.end_ns)))
    return summary.duration_ns - busy_ns if len(summary.loop) == 1 else 0.0


def _stages(
    summary: StepSummary, before: StepSummary | None, has_workers: bool
) -> dict[str, tuple[float, list[Standing]]]:
    """Return for each stage of the loop the frontier after it (ns), and the standings of its roles."""
    if not summary.loop:
        return {}
    # Background stages are left out: their cost is the loop's wait for them.
    loop = {
        use.lane: _own_time([run for run in _runs_of(use) if run.stage not in summary.beside])
        for use in summary.loop
    }
    calls = len(loop) == 1 and bool(summary.workers or has_workers)
    workers = _Workers(summary, before, *loop.values()) if calls and summary.workers else None
    found = {}
    for stage, front_ns, own in _frontier(summary.loop[0].role, loop):
        ran = () if workers else (stage,)
        standing = own._replace(ran=ran, clear=own.clear and (workers is not None or not calls))
        found[stage] = front_ns, workers.standings(stage, standing) if workers else [standing]
    return found


def _runs_of(use: RankUse) -> list[Run]:
    """Return the stage runs of a process."""
    runs = []
    for stage in use.stages:
        length_ns = max(0, stage.duration_ns)
        periods = stage.periods or ((stage.begin_ns, stage.begin_ns + length_ns),)
        share = length_ns / max(1, sum(max(0, end - begin) for begin, end in periods))
        for begin, end in periods:
            runs.append(Run(stage.name, begin, end, share * max(0, end - begin), stage.late_ns or 0))
    return runs


def _own_time(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of a process in order; ``own_ns`` excludes overlap with earlier runs."""
    found = []
    busy_until_ns = -inf
    for run in sorted(runs, key=attrgetter("begin_ns")):
        covered_ns = max(0.0, busy_until_ns - run.begin_ns)
        share = 1.0 - min(1.0, covered_ns / max(1, run.end_ns - run.begin_ns))
        found.append(Run(run.stage, run.begin_ns, run.end_ns, share * run.own_ns, run.late_ns))
        busy_until_ns = max(busy_until_ns, run.end_ns)
    return found


def _within(runs: Sequence[Run], begin_ns: int, end_ns: int) -> list[Run]:
    """Return the runs clipped to an interval; runs outside of it are left out."""
    found = []
    for run in runs:
        first_ns, last_ns = max(run.begin_ns, begin_ns), min(run.end_ns, end_ns)
        if first_ns < last_ns:
            found.append(Run(run.stage, first_ns, last_ns, last_ns - first_ns, run.late_ns))
    return found


def _frontier(role: str, runs: Mapping[str, Sequence[Run]]) -> Iterator[tuple[str, float, Standing]]:
    """Yield each stage, the frontier after it (ns), and the standing of the processes in it.

    All ranks leave a collective together, and the rank that arrives first spends the most time in it. So a
    rank whose stage ends together with the others' does not lead. The rank that was last to enter does,
    where that is known. Engines have no collectives.

    Args:
        role: Their role.
        runs: Their runs, by lane, as :func:`_own_time` returns them.
    """
    by_stage: defaultdict[str, defaultdict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for lane, of_lane in runs.items():
        for run in of_lane:
            by_stage[run.stage][lane].append(run)
    reached, front_ns = dict.fromkeys(runs, 0.0), 0.0
    ran_all = {*runs}
    for stage in _order(runs):
        those = by_stage[stage]
        here = dict.fromkeys(runs, 0.0) | {lane: sum(run.own_ns for run in those[lane]) for lane in those}
        reached = {lane: reached_ns + here[lane] for lane, reached_ns in reached.items()}
        before_ns, front_ns = front_ns, max(reached.values())
        longest_ns = max(here.values())
        near = [lane for lane in runs if front_ns - reached[lane] <= TIED * longest_ns]
        leader = max(near, key=here.__getitem__)
        lead_ns, known = 0.0, True
        if len(runs) > 1:
            # If all are tied, they wait for each other.
            known = len(near) < len(runs) and (len(near) > 1 or leader in ran_all)
            lead_ns = max(0.0, here[leader] - median(here[lane] for lane in runs if lane != leader))
            ends = {lane: max(run.end_ns for run in mine) for lane, mine in those.items()}
            own_end_ns = ends.pop(leader, -inf)
            if lead_ns and ends and role != ROLLOUT_ROLE:
                known &= 2 * (own_end_ns - median(ends.values())) >= lead_ns
        if front_ns > before_ns:
            ran_all &= those.keys()
        clear = known and len(near) == 1
        late = dict.fromkeys(runs, 0) | {lane: max(run.late_ns for run in those[lane]) for lane in those}
        if not clear and (late_ns := max(late.values())) > LATE * longest_ns:
            leader = max(late, key=late.__getitem__)
            lead_ns = late_ns - max((late[lane] for lane in late if lane != leader), default=0)
            clear = known = lead_ns > LATE * longest_ns
            here = {lane: longest_ns - late_ns + own_ns for lane, own_ns in late.items()}
        yield stage, front_ns, Standing(role, here, leader, round(lead_ns) if known else 0, clear)


def _order(runs: Mapping[str, Sequence[Run]]) -> list[str]:
    """Return the stages in the processes' most frequent order; others are inserted as a process ran them."""
    order: list[str] = []
    ways = Counter(tuple(dict.fromkeys(run.stage for run in of_lane)) for of_lane in runs.values())
    for way, _ in ways.most_common():
        at = len(order)
        for stage in reversed(way):
            if stage in order:
                at = order.index(stage)
            else:
                order.insert(at, stage)
    return order


class _Work(NamedTuple):
    """The work of one role inside one stage of the loop."""

    standing: Standing
    begin_ns: int
    end_ns: int

    @property
    def busy_ns(self) -> float:
        """The longest time that a process of the role worked (ns)."""
        return max(self.standing.durations.values())


class _Workers:
    """The workers of a single-process loop, in a step and the step before.

    A worker's run belongs to the loop's stage in which the middle of the run lies.
    """

    def __init__(self, summary: StepSummary, before: StepSummary | None, loop: Sequence[Run]) -> None:
        self._loop = loop
        self._before = {use.lane: _runs_of(use) for use in (before.workers if before else ())}
        self._runs = {use.lane: _runs_of(use) for use in summary.workers}
        self._roles: dict[str, list[str]] = {}
        everyone = (*summary.workers, *(before.workers if before else ()))
        for lane, role in {use.lane: use.role for use in everyone}.items():
            self._roles.setdefault(role, []).append(lane)
        self._inside: dict[str, dict[str, list[Run]]] = {}
        for lane, runs in self._runs.items():
            for run in runs:
                middle = (run.begin_ns + run.end_ns) // 2
                homes = [one.stage for one in loop if one.begin_ns <= middle < one.end_ns]
                for home in homes[-1:]:
                    self._inside.setdefault(home, {}).setdefault(lane, []).append(run)
        # Trajectories outside of stages have no known times: engines or the loop may have waited for them.
        hidden = any(
            not use.stages and TRAJECTORY in (one.name for one in use.spans) for use in summary.workers
        )
        self._unclear = {ROLLOUT_ROLE, summary.loop[0].role} if hidden else set()
        self._request_ns = {
            use.lane: one.duration_ns / one.runs
            for use in summary.workers
            for one in use.spans
            if use.role == ROLLOUT_ROLE and one.runs
        }

    def standings(self, stage: str, own: Standing) -> list[Standing]:
        """Return the standings of the roles in a stage of the loop; the role that it waited for is first.

        A ``wait:`` stage counts all runs that overlap it. Any other stage counts the runs whose middle lies
        in it; without such runs, those that began before the stage and ended in it. Without any, the loop
        itself worked.
        """
        loop = [run for run in self._loop if run.stage == stage]
        length_ns = sum(run.own_ns for run in loop)
        inside: Mapping[str, Sequence[Run]] = self._inside.get(stage, {})
        if stage.startswith(WAIT) or not inside:
            inside = {lane: [*self._under_way(lane, loop)] for lane in {**self._runs, **self._before}}
        works = [work for role in self._roles if (work := self._work(role, inside, length_ns))]
        found = _by_weight(stage, loop, works) if works else [own]
        if self._request_ns and ROLLOUT_ROLE not in (one.role for one in found):
            found += [work.standing for work in works if work.standing.role == ROLLOUT_ROLE]
        return [self._known(one, one is found[0], length_ns) for one in found]

    def _known(self, one: Standing, is_first: bool, length_ns: float) -> Standing:
        """Return a standing, without leader where the watch cannot know it.

        Beside others, an engine leads if it does by enough, and takes longer for a request than the others.
        """
        is_beside = one.role == ROLLOUT_ROLE and bool(self._request_ns) and not is_first
        if one.role not in self._unclear and not is_beside:
            return one
        others = [each for lane, each in self._request_ns.items() if lane != one.leader]
        own_ns = self._request_ns.get(one.leader, 0.0)
        if (
            one.clear
            and one.lead_ns >= _OF_A_STAGE * length_ns
            and others
            and own_ns >= SLOW * median(others)
        ):
            return one._replace(clear=False)
        return one._replace(leader="", lead_ns=0, clear=False)

    def _under_way(self, lane: str, loop: Sequence[Run]) -> Iterator[Run]:
        """Yield the runs of a worker that the loop may have waited for in a stage, clipped to it."""
        runs = [*self._before.get(lane, ()), *self._runs.get(lane, ())]
        for stage in loop:
            begin_ns, end_ns = stage.begin_ns, stage.end_ns
            if not stage.stage.startswith(WAIT):
                late_ns = end_ns + TIED * (end_ns - begin_ns)
                runs = [run for run in runs if run.begin_ns < begin_ns < run.end_ns <= late_ns]
            yield from _within(runs, begin_ns, end_ns)

    def _work(self, role: str, inside: Mapping[str, Sequence[Run]], length_ns: float) -> _Work | None:
        """Return the work of a role in a stage; its leader is that of the worker stage with the largest lead.

        Concurrent runs of one process, such as requests, can add up to more than the loop's stage took. Then
        the role's times are scaled so that the longest equals the stage.
        """
        lanes = self._roles[role]
        if any(lane in self._runs for lane in lanes):  # processes that were not read in this step are unknown
            lanes = [lane for lane in lanes if lane in self._runs or inside.get(lane)]
        mine = {lane: _own_time(inside.get(lane, ())) for lane in lanes}
        every = [run for runs in mine.values() for run in runs]
        if not every:
            return None
        totals = {lane: sum(run.own_ns for run in runs) for lane, runs in mine.items()}
        if (longest_ns := max(totals.values())) > (1 + TIED) * length_ns:
            scale = length_ns / longest_ns
            mine = {lane: [run._replace(own_ns=scale * run.own_ns) for run in mine[lane]] for lane in mine}
            totals = {lane: scale * total for lane, total in totals.items()}
        tied_ns = TIED * max(totals.values())
        standing = max(
            (standing for _, _, standing in _frontier(role, mine)),
            key=lambda one: (one.lead_ns if one.lead_ns > tied_ns else 0, max(one.durations.values())),
        )
        standing = standing._replace(durations=totals, ran=tuple(dict.fromkeys(run.stage for run in every)))
        return _Work(standing, min(run.begin_ns for run in every), max(run.end_ns for run in every))


def _by_weight(name: str, loop: Sequence[Run], works: list[_Work]) -> list[Standing]:
    """Return the standings of the roles in a stage of the loop; the role that it waited for is first.

    If a role ran a stage of the same name, roles that did not are left out. The loop did not wait for a role
    that went on after the stage. Of the rest, the role that worked longest comes first. If others ran
    concurrently with it, the one of them that ended last does.
    """
    works = [work for work in works if name in work.standing.ran] or works
    slack_ns = TIED * sum(run.own_ns for run in loop)
    awaited = [work for work in works if work.end_ns <= loop[-1].end_ns + slack_ns] or works
    first = max(awaited, key=lambda work: work.busy_ns)
    beside = [
        work
        for work in awaited
        if work is not first
        and min(work.end_ns, first.end_ns) - max(work.begin_ns, first.begin_ns) > slack_ns
    ]
    if beside:
        first = max([first, *beside], key=lambda work: work.end_ns)
    others = sorted((work for work in works if work is not first), key=lambda work: -work.busy_ns)
    standing = first.standing._replace(clear=first.standing.clear and not beside)
    return [standing, *(work.standing for work in others)]
