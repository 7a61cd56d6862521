"""The idle time of training and rollout in a step, and its causes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from verl_profiling.files.step_summary import NO_REQUESTS, ROLLOUT, TRAINING, Idle, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WAIT, WEIGHT_SYNC
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.exposed import Runs, StepRuns, numbered

_GENERATE = "generate"
_NOT_TRAINING = (ROLLOUT_ROLE, "agent_loop", "reward", "rollouter")
"""Roles that do not train."""

_APART = (WEIGHT_SYNC, "reward", "validate")
"""Stages for which a rollout waits that are not training."""

_WAITS = 0.05
"""Share of a step from which a trainer waits for a rollout in the background."""

_Floats = NDArray[np.float64]
_Whole = NDArray[np.int64]
_Cause = tuple[str, list[tuple[float, float]]]
"""Name and periods. Where causes overlap, the last one counts."""


def made_in(summary: StepSummary) -> tuple[int, int]:
    """Return the number of trajectories that ended in a step, and their tokens.

    Without trajectories, the first number is of engine requests.
    """
    spans = [(use.role, one) for use in summary.processes for one in use.spans]
    requests = sum(
        one.runs for role, one in spans if role == ROLLOUT_ROLE and one.name == _GENERATE
    )
    made = [one for _, one in spans if one.name == TRAJECTORY]
    return sum(one.runs for one in made) or requests, sum(one.tokens for one in made)


def idle_of(
    summary: StepSummary, has_workers: bool, runs: StepRuns
) -> tuple[Idle | None, Idle | None]:
    """Return the idle time of training and of the rollout in a step; ``None`` if unknown.

    Training are the workers with a training role, or else the loop. The rollout are the replicas,
    else the training processes that generate, else the loop's stage ``rollout``. Roles without
    stages are left out. A replica that receives weights does not generate, so this time is idle.

    Args:
        summary: The summary of the step, with its exposed times.
        has_workers: Whether the loop calls workers. Then the idle time is unknown without the
            workers' replies.
        runs: The runs of the step.
    """
    step_ns = summary.duration_ns
    is_unread = (
        has_workers and not summary.workers and [use.role for use in summary.loop] == ["controller"]
    )
    if is_unread or not (summary.loop and step_ns):
        return None, None
    if len(summary.loop) == 1 and not summary.workers and not summary.background:
        return _alone(summary)
    loop, workers = runs.loop, runs.workers
    roles, role_of, in_loop = (
        runs.roles,
        runs.role_of,
        numbered([use.role for use in summary.loop])[1],
    )
    trains = np.array([role not in _NOT_TRAINING for role in roles], dtype=bool)[role_of]
    is_engine = np.array([role == ROLLOUT_ROLE for role in roles], dtype=bool)[role_of]
    of_training, own = (
        (role_of, workers.at(trains[workers.who])) if trains.any() else (in_loop, loop)
    )
    wait = [name for name in runs.stages if name.startswith(WAIT)]
    works = own.at(~runs.named(own, ROLLOUT, _GENERATE, *wait)).own_time()
    of_rollout, made = role_of, workers.at(is_engine[workers.who])
    if not made.who.size:
        of_rollout, made = of_training, own.at(runs.named(own, ROLLOUT, _GENERATE))
    if not made.who.size:
        of_rollout, made = in_loop, loop.at(runs.named(loop, ROLLOUT))
    made = made.at(~runs.named(made, WEIGHT_SYNC))
    stages = [*_by_name(runs, loop)]
    by_loop = sorted(stages, key=lambda one: one[0] not in summary.background)
    others = _by_name(runs, workers.at(~trains[workers.who]))
    trainer_idle = _idle(of_training, works, [one[1:] for one in (*others, *by_loop)], step_ns)
    is_apart = runs.named(works, *_APART)
    causes = [
        *((NO_REQUESTS if name == ROLLOUT else name, periods) for _, name, periods in by_loop),
        (TRAINING, _union(works.begin[~is_apart], works.end[~is_apart])),
        *(one[1:] for one in _by_name(runs, works.at(is_apart))),
        *(one[1:] for one in stages if one[0] in _APART),
    ]
    rollout_idle = _idle(of_rollout, made.own_time(), causes, step_ns)
    if summary.background and trainer_idle is not None and rollout_idle is not None:
        waits = trainer_idle.cause == ROLLOUT and trainer_idle.share >= _WAITS
        if waits and rollout_idle.cause == TRAINING:  # both cannot wait for each other
            rollout_idle = msgspec.structs.replace(rollout_idle, cause=NO_REQUESTS)
    return trainer_idle, rollout_idle


def _by_name(runs: StepRuns, rows: Runs) -> Iterator[tuple[str, str, list[tuple[float, float]]]]:
    """Yield the name of each stage, the name of what is waited for in it, and its periods."""
    names = list(runs.stages)
    for stage in sorted({*rows.stage.tolist()}):
        those, name = rows.stage == stage, names[stage].removeprefix(WAIT)
        yield (
            names[stage],
            ROLLOUT if name == _GENERATE else name,
            _union(rows.begin[those], rows.end[those]),
        )


def _idle(role_of: _Whole, busy: Runs, causes: Sequence[_Cause], step_ns: int) -> Idle | None:
    """Return the mean idle time, and its largest cause, over the processes of busy roles.

    Args:
        role_of: The role of each process.
        busy: Stage runs of the processes, without overlap within a process.
        causes: Periods of possible causes of waits.
        step_ns: Duration of the step (ns).
    """
    if not busy.who.size:
        return None
    processes = int(np.bincount(role_of)[[*{*role_of[busy.who].tolist()}]].sum())
    periods = [(number, *period) for number, (_, found) in enumerate(causes, 1) for period in found]
    times = {min(max(time, 0.0), step_ns) for _, *period in periods for time in period}
    cuts = sorted({0.0, float(step_ns), *times})
    cause_of = [0] * len(cuts)
    for number, *period in periods:
        first, last = (bisect_left(cuts, time) for time in period)
        cause_of[first:last] = [number] * (last - first)
    at, weight = (
        np.array(cuts),
        np.minimum(busy.length / np.maximum(busy.end - busy.begin, 1.0), 1.0),
    )
    open_ns = _since(busy.begin, weight, at) - _since(busy.end, weight, at)
    idle = np.diff(at - open_ns / processes) / step_ns
    names = ["", *(name for name, _ in causes)]
    return _largest(zip(names, np.bincount(cause_of[:-1], idle, len(names)).tolist(), strict=True))


def _alone(summary: StepSummary) -> tuple[Idle | None, Idle | None]:
    """Return the same of a loop without workers, from its exposed times,
    which takes a tenth of the time.
    """
    trainer, rollout, step_ns = [("", 0.0)], [("", 0.0)], summary.duration_ns
    trains = generates = False
    for row in summary.exposed:
        name, share = row.name, row.exposed_ns / step_ns
        if name in (ROLLOUT, _GENERATE):
            generates = True
            trainer.append((ROLLOUT, share))
        elif name and not name.startswith(WAIT):
            trains = True
            rollout.append((name if name in _APART else TRAINING, share))
        else:
            trainer.append((name.removeprefix(WAIT), share))
            rollout.append((NO_REQUESTS if name else "", share))
    return _largest(trainer) if trains else None, _largest(rollout) if generates else None


def _largest(parts: Iterable[tuple[str, float]]) -> Idle:
    """Return the total idle time of some causes, and the largest cause."""
    shares: dict[str, float] = {}
    for name, share in parts:
        shares[name] = shares.get(name, 0.0) + share
    cause = max(shares, key=shares.__getitem__)
    total, most = (
        round(1e4 * max(0.0, share)) / 1e4 for share in (sum(shares.values()), shares[cause])
    )
    return Idle(total, cause, most)


def _since(times: _Floats, weight: _Floats, cuts: _Floats) -> _Floats:
    """Return for each cut the sum of weighted distances to earlier times."""
    at = np.searchsorted(cuts, times)
    many, total = (
        np.bincount(at, each, cuts.size)[: cuts.size].cumsum() for each in (weight, weight * times)
    )
    return np.asarray(many * cuts - total)


def _union(begin: _Floats, end: _Floats) -> list[tuple[float, float]]:
    """Return the union of intervals."""
    if begin.size > 1:
        order = np.argsort(begin)
        begin, reached = begin[order], np.maximum.accumulate(end[order])
        is_apart = begin[1:] > reached[:-1]
        begin, end = begin[np.append(True, is_apart)], reached[np.append(is_apart, True)]
    return [*zip(begin.tolist(), end.tolist(), strict=True)]
