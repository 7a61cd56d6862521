"""Who waits for whom: for which share of a step training and rollout had nothing open, and why."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.step_summary import NO_REQUESTS, ROLLOUT, TRAINING, Idle, RankUse, StepSummary
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.exposed import WAIT, Runs, StepRuns

_GENERATE = "generate"
_NOT_TRAINING = (ROLLOUT_ROLE, "agent_loop", "reward", "rollouter")
"""Roles that do not train."""

_APART = ("update_weights", "reward", "validate")
"""Stages for which a rollout waits that are not training."""

_Floats = NDArray[np.float64]
_Whole = NDArray[np.int64]
_Cause = tuple[str, _Floats, _Floats]
"""Name, begins and ends. Where causes overlap, the last one counts."""


def samples_of(summary: StepSummary) -> int:
    """Return how many trajectories ended in a step; without any, how many requests of engines did."""
    spans = [(use.role, one) for use in (*summary.loop, *summary.workers) for one in use.spans]
    requests = sum(one.runs for role, one in spans if role == ROLLOUT_ROLE and one.name == _GENERATE)
    return sum(one.runs for _, one in spans if one.name == TRAJECTORY) or requests


def idle_of(summary: StepSummary, has_workers: bool, runs: StepRuns) -> tuple[Idle | None, Idle | None]:
    """Return the idle time of training and of the rollout in a step; ``None`` where it is unknown.

    Training is the workers whose role trains; without any, the loop. The rollout is its replicas; without
    any, the training processes that generate; last the loop's stage. A role that marks no stage is left out.

    Args:
        summary: The summary of the step, with its exposed times.
        has_workers: Whether the loop calls workers. If so, nothing is known without their replies.
        runs: The runs of the step.
    """
    step_ns = summary.duration_ns
    is_unread = has_workers and not summary.workers and [use.role for use in summary.loop] == ["controller"]
    if is_unread or not (summary.loop and step_ns):
        return None, None
    if len(summary.loop) == 1 and not summary.workers and not summary.beside:
        return _alone(summary)
    loop, workers = runs.loop, runs.workers
    (roles, role_of), in_loop = _roles(summary.workers), _roles(summary.loop)[1]
    trains = np.array([role not in _NOT_TRAINING for role in roles], dtype=bool)[role_of]
    is_engine = np.array([role == ROLLOUT_ROLE for role in roles], dtype=bool)[role_of]
    of_training, own = (role_of, workers.at(trains[workers.who])) if trains.any() else (in_loop, loop)
    generates = runs.named(own, ROLLOUT, _GENERATE)
    waits = runs.named(own, *(name for name in runs.stages if name.startswith(WAIT)))
    works = own.at(~(generates | waits)).own_time()
    rollouts = (
        (role_of, workers.at(is_engine[workers.who])),
        (of_training, own.at(generates)),
        (in_loop, loop.at(runs.named(loop, ROLLOUT))),
    )
    of_rollout, made = next((found for found in rollouts if found[1].who.size), rollouts[-1])
    beside = runs.named(loop, *summary.beside)
    by_loop = [*_by_name(runs, loop.at(beside)), *_by_name(runs, loop.at(~beside))]
    others = _by_name(runs, workers.at(~trains[workers.who]))
    trainer_idle = _idle(of_training, works, [*others, *by_loop], step_ns)
    is_apart = runs.named(works, *_APART)
    causes = [
        *((NO_REQUESTS if one[0] == ROLLOUT else one[0], one[1], one[2]) for one in by_loop),
        (TRAINING, works.begin[~is_apart], works.end[~is_apart]),
        *_by_name(runs, works.at(is_apart)),
        *_by_name(runs, loop.at(runs.named(loop, *_APART))),
    ]
    return trainer_idle, _idle(of_rollout, made.own_time(), causes, step_ns)


def _roles(uses: Sequence[RankUse]) -> tuple[list[str], _Whole]:
    """Return the roles of processes, and for each process the index of its role."""
    numbers: dict[str, int] = {}
    role_of = [numbers.setdefault(use.role, len(numbers)) for use in uses]
    return list(numbers), np.array(role_of, dtype=np.int64)


def _by_name(runs: StepRuns, rows: Runs) -> Iterator[_Cause]:
    """Yield the runs of each stage, with its name as a cause."""
    names = list(runs.stages)
    for stage in np.unique(rows.stage).tolist():
        name = names[stage].removeprefix(WAIT)
        those = rows.stage == stage
        yield ROLLOUT if name == _GENERATE else name, rows.begin[those], rows.end[those]


def _idle(role_of: _Whole, busy: Runs, causes: Sequence[_Cause], step_ns: int) -> Idle | None:
    """Return the mean idle time of the processes whose roles were busy at all, and its largest cause.

    Args:
        role_of: The role of each process.
        busy: Their runs, which do not overlap in a process.
        causes: What they may have waited for.
        step_ns: How long the step took.
    """
    if not busy.who.size:
        return None
    processes = np.isin(role_of, role_of[busy.who]).sum()
    periods = [_union(begin, end) for _, begin, end in causes]
    cuts = np.unique(np.concatenate([[0.0, step_ns], *map(np.ravel, periods)]).clip(0.0, step_ns))
    weight = np.minimum(busy.length / np.maximum(busy.end - busy.begin, 1.0), 1.0)
    open_ns = _since(busy.begin, weight, cuts) - _since(busy.end, weight, cuts)
    idle = np.diff(cuts - open_ns / processes) / step_ns
    cause_of = np.zeros(idle.size, dtype=np.int64)
    for number, each in enumerate(periods, 1):
        for begin, end in np.searchsorted(cuts, each).T:
            cause_of[begin:end] = number
    names = ["", *(name for name, _, _ in causes)]
    return _largest(zip(names, np.bincount(cause_of, idle, len(names)).tolist(), strict=True))


def _alone(summary: StepSummary) -> tuple[Idle | None, Idle | None]:
    """Return both for a loop that is one process, from its exposed times; numpy would take longer."""
    trainer, rollout = [("", 0.0)], [("", 0.0)]
    trains = generates = False
    for name, seconds in summary.exposed_s.items():
        share, is_made = seconds / summary.seconds, name in (ROLLOUT, _GENERATE)
        generates |= is_made
        if name and not is_made and not name.startswith(WAIT):
            trains = True
            rollout.append((name if name in _APART else TRAINING, share))
            continue
        trainer.append((ROLLOUT if is_made else name.removeprefix(WAIT), share))
        if not is_made:
            rollout.append((NO_REQUESTS if name else "", share))
    return _largest(trainer) if trains else None, _largest(rollout) if generates else None


def _largest(parts: Iterable[tuple[str, float]]) -> Idle:
    """Return idle time of these causes and shares."""
    shares = defaultdict[str, float](float)
    for name, share in parts:
        shares[name] += share
    cause = max(shares, key=lambda name: shares[name])
    return Idle(round(max(0.0, sum(shares.values())), 4), cause, round(max(0.0, shares[cause]), 4))


def _since(times: _Floats, weight: _Floats, cuts: _Floats) -> _Floats:
    """Return for each cut the sum over earlier times of weight and distance."""
    order = np.argsort(times)
    sums = np.zeros((2, order.size + 1))
    np.cumsum([weight[order], (weight * times)[order]], axis=1, out=sums[:, 1:])
    many, total = sums[:, np.searchsorted(times[order], cuts)]
    return np.asarray(many * cuts - total)


def _union(begin: _Floats, end: _Floats) -> _Floats:
    """Return begins and ends of the periods that intervals cover together."""
    if begin.size < 2:
        return np.array([begin, end])
    order = np.argsort(begin)
    begin, reached = begin[order], np.maximum.accumulate(end[order])
    is_apart = begin[1:] > reached[:-1]
    return np.array([begin[np.append(True, is_apart)], reached[np.append(is_apart, True)]])
