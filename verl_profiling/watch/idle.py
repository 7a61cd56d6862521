"""The idle time of training and rollout in a step, and its causes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from functools import cached_property

import msgspec
import numpy as np

from verl_profiling.files.step_summary import NO_REQUESTS, ROLLOUT, TRAINING, Idle, StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WAIT, WEIGHT_SYNC
from verl_profiling.slices.slices import Floats, Ints, Slices, joined
from verl_profiling.trajectories.spans import TRAJECTORY
from verl_profiling.watch.step_slices import StepSlices, numbered

_GENERATE = "generate"
_NOT_TRAINING = (ROLLOUT_ROLE, "agent_loop", "reward", "rollouter")
"""Roles that do not train."""

_SCORING = ("reward", "validate")
"""Stages that are no training in a training process either: nothing is learnt in them."""

_APART = (WEIGHT_SYNC, *_SCORING)
"""Stages for which a rollout waits that are not training."""

_WAITS = 0.05
"""Minimum idle share with which a trainer counts as waiting for a rollout in the background."""


def made_in(summary: StepSummary) -> tuple[int, int]:
    """Return the number of trajectories that ended in a step, and their tokens.

    Without trajectories, the first number is of engine requests. What failed, such as a request
    that was aborted to go on later, is no sample.
    """
    made = tokens = requests = 0
    for use in summary.processes:
        for total in use.spans:
            if total.name == TRAJECTORY:
                made += total.runs - total.failed
                tokens += total.tokens
            elif total.name == _GENERATE and use.role == ROLLOUT_ROLE:
                requests += total.runs - total.failed
    return made or requests, tokens


def idle_in(
    slices: StepSlices, has_workers: bool, engines: Collection[str] = ()
) -> list[tuple[Idle | None, Idle | None]]:
    """Return the idle time of training and of the rollout in each step; ``None`` if unknown.

    Training are the workers with a training role, or else the loop. The rollout are the replicas,
    else the training processes that generate, else the loop's stage ``rollout``. Roles without
    stages are left out. A replica that receives weights does not generate, so this time is idle.
    Training processes that score or validate do not train, so this time is idle, too.

    Args:
        slices: The slices of the steps, whose summaries have their exposed times.
        has_workers: Whether the loop calls workers. Then the idle time is unknown without the
            workers' replies.
        engines: Lanes of the engines that generated in earlier steps, and so are idle without a
            stage.
    """
    summaries, first = slices.summaries, slices.summaries[0]
    is_alone = len(first.loop) == 1 and not first.workers
    if not first.loop or (has_workers and is_alone and first.loop[0].role == "controller"):
        return [(None, None)] * len(summaries)
    if is_alone and not first.background:
        return [*map(_alone, summaries)]
    has_engines = any(use.lane in engines for use in first.workers)
    sides = _Sides(slices, has_engines)
    trainers = sides.idle(sides.training, sides.causes_of_training)
    rollouts = sides.idle(sides.rollout, sides.causes_of_rollout)
    if first.background:
        rollouts = [*map(_not_both, trainers, rollouts)]
    return [*zip(trainers, rollouts, strict=True)]


def _not_both(trainer: Idle | None, rollout: Idle | None) -> Idle | None:
    """Return the rollout's idle time; both sides cannot wait for each other.

    If the trainer waits for the rollout, the rollout has no requests, and does not wait for the
    training.
    """
    if trainer is None or rollout is None or rollout.cause != TRAINING:
        return rollout
    if trainer.cause == ROLLOUT and trainer.share >= _WAITS:
        return msgspec.structs.replace(rollout, cause=NO_REQUESTS)
    return rollout


class _Sides:
    """Training and rollout in a step, and what each of them may wait for.

    Args:
        slices: The slices of the step.
        has_engines: Whether engines are known to generate, so that they are the rollout.

    Attributes:
        training: Stages of the training processes, without waits, generation and scoring.
        rollout: Stages in which the processes of the rollout generate.
    """

    def __init__(self, slices: StepSlices, has_engines: bool) -> None:
        self._slices = slices
        self._has_engines = has_engines
        table = ["", *map(_waited, slices.names), TRAINING, NO_REQUESTS, ROLLOUT]
        self._causes, [_, *of_stages, training, no_requests, rollout] = numbered(table)
        self._waited = np.array(of_stages, np.int64)
        self._training = np.full_like(self._waited, training)
        self._no_requests = np.where(self._waited == rollout, no_requests, self._waited)
        work, side = slices.workers, slices.whole_loop
        is_other = slices.in_roles(work, *_NOT_TRAINING)
        self._others = work.at(is_other)
        if {*slices.roles}.difference(_NOT_TRAINING):
            side = work.at(~is_other)
        generates = slices.named(side, ROLLOUT, _GENERATE)
        self._work = side.at(~(generates | slices.named(side, *slices.wait_names))).flat()
        self.training = self._work.at(~slices.named(self._work, *_SCORING))
        self.rollout = self._rollout(side.at(generates))

    def _rollout(self, generating: Slices) -> Slices:
        """Return the replicas, else training processes that generate, else the loop's rollout, in
        each step.
        """
        slices, loop = self._slices, self._slices.whole_loop
        side = self._others.at(slices.in_roles(self._others, ROLLOUT_ROLE))
        if self._has_engines:
            generating, loop = generating.at(slice(0)), loop.at(slice(0))
        for other in (generating, loop.at(slices.named(loop, ROLLOUT))):
            has_side = np.bincount(slices.step(side), minlength=len(slices.ends)) > 0
            side = joined([side, other.at(~has_side[slices.step(other)])])
        return side.at(~slices.named(side, WEIGHT_SYNC)).flat()

    @cached_property
    def _loop(self) -> list[Slices]:
        """Periods of the loop's stages; periods of stages in the background come first."""
        loop, background = self._slices.whole_loop, self._slices.summaries[0].background
        is_in_background = self._slices.named(loop, *background)
        return [self._periods(loop.at(rows)) for rows in (is_in_background, ~is_in_background)]

    def causes_of_training(self) -> list[tuple[Ints, Slices]]:
        """Return what training may wait for, in the form of ``causes`` of :meth:`idle`."""
        return [(self._waited, each) for each in (self._periods(self._others), *self._loop)]

    def causes_of_rollout(self) -> list[tuple[Ints, Slices]]:
        """Return what the rollout may wait for, in the form of ``causes`` of :meth:`idle`."""
        slices, work = self._slices, self._work
        is_apart = slices.named(work, *_APART)
        trains = work.at(~is_apart)
        trains = trains._replace(name=slices.step(trains) * len(slices.names))
        apart = slices.has_name(*_APART)
        return [
            *[(self._no_requests, loop) for loop in self._loop],
            (self._training, self._periods(trains)),
            (self._waited, self._periods(work.at(is_apart))),
            *[(self._waited, loop.at(apart[loop.name])) for loop in self._loop],
        ]

    def _periods(self, slices: Slices) -> Slices:
        """Return the periods in which any of the processes is in a stage, in order of begin.

        Where several stages are open, the one that began last is the cause.
        """
        union = slices.by_name()
        union = union._replace(name=union.name % max(len(self._slices.names), 1))
        return union.at(np.argsort(union.begin, kind="stable"))

    def idle(
        self, busy: Slices, causes: Callable[[], list[tuple[Ints, Slices]]]
    ) -> list[Idle | None]:
        """Return the mean idle time of the processes of some roles in each step, and its largest
        cause.

        Args:
            busy: The work of the processes, without overlap within a process.
            causes: Returns pairs: the cause that each stage stands for, and periods in stages.
                Where periods overlap, the last one counts.
        """
        slices = self._slices
        is_of_engines = busy is self.rollout and self._has_engines
        if not (busy.who.size or is_of_engines):
            return [None] * len(slices.summaries)
        processes = _processes(slices, busy, (ROLLOUT_ROLE,) if is_of_engines else ())
        if (busy.role < 0).any():
            busy = joined([busy, _ahead(slices)]).flat()
        parts = [part._replace(name=cause_of[part.name]) for cause_of, part in causes()]
        _, _, cause, begin, end, *_ = joined(parts)
        cuts = np.unique(np.concatenate([begin, end, slices.begins, slices.ends]))
        cause_of = np.zeros(cuts.size - 1, np.int64)
        borders = np.searchsorted(cuts, (begin, end)).tolist()
        for number, first, last in zip(cause.tolist(), *borders, strict=True):
            cause_of[first:last] = number
        step = np.searchsorted(slices.ends, cuts[:-1], side="right")
        weight = np.minimum(busy.took / np.maximum(busy.end - busy.begin, 1.0), 1.0)
        open_ns = np.diff(_since(busy.begin, weight, cuts) - _since(busy.end, weight, cuts))
        idle_ns = np.diff(cuts) - open_ns / np.maximum(processes, 1)[step]
        shape = len(slices.ends), len(self._causes)
        total_ns = np.bincount(step * shape[1] + cause_of, idle_ns, shape[0] * shape[1])
        step_ns = slices.ends - slices.begins
        shares = total_ns.reshape(shape) / np.maximum(step_ns, 1)[:, None]
        is_known = (processes > 0) & (step_ns > 0)
        return [*map(self._largest, shares.tolist(), is_known.tolist())]

    def _largest(self, shares: list[float], is_known: bool) -> Idle | None:
        """Return the idle time of all causes, as shares of a step, and the largest of them."""
        if not is_known:
            return None
        most = max(shares)
        return _idle(sum(shares), self._causes[shares.index(most)], most)


def _waited(stage: str) -> str:
    """Return a stage as a cause: ``NAME`` for ``wait:NAME``, and ``rollout`` for ``generate``."""
    name = stage.removeprefix(WAIT)
    return ROLLOUT if name == _GENERATE else name


def _ahead(slices: StepSlices) -> Slices:
    """Return the time of ranks of the loop before their first stage of a step and after the last,
    while another rank is in a stage.

    Such a rank is still in the step before, or already in the next one. Nothing says that it waits.
    """
    loop = slices.whole_loop
    who, row = np.unique(loop.who, return_index=True)
    first, last = np.full(who.size, np.inf), np.zeros(who.size)
    place = np.searchsorted(who, loop.who)
    np.minimum.at(first, place, loop.begin)
    np.maximum.at(last, place, loop.end)
    step = who // max(slices.many, 1)
    begin, end = slices.ends.astype(float), slices.begins.astype(float)
    np.minimum.at(begin, step, first)
    np.maximum.at(end, step, last)
    early = loop.at(row)._replace(begin=begin[step], end=first)
    late = loop.at(row)._replace(begin=last, end=end[step])
    both = joined([early, late])
    both = both.at(both.end > both.begin)
    return both._replace(took=both.end - both.begin)


def _processes(slices: StepSlices, busy: Slices, always: Collection[str]) -> Ints:
    """Return the number of processes of busy roles in each step; roles in ``always`` are busy."""
    of_role = np.bincount(slices.role_of + 1)  # the loop's processes are in role -1
    is_busy = np.zeros((len(slices.ends), of_role.size), dtype=bool)
    is_busy[slices.step(busy), busy.role + 1] = True
    for role in always:
        is_busy[:, slices.roles.index(role) + 1] = True
    return np.asarray(is_busy @ of_role)


def _alone(summary: StepSummary) -> tuple[Idle | None, Idle | None]:
    """Return the idle times of a step of a loop without workers, from its exposed times."""
    trainer, rollout = [("", 0.0)], [("", 0.0)]
    trains = generates = False
    for row in summary.exposed:
        name, idle_ns = row.name, float(row.exposed_ns)
        if name in (ROLLOUT, _GENERATE):
            generates = True
            trainer.append((ROLLOUT, idle_ns))
        elif name in _SCORING:
            trainer.append((name, idle_ns))
            rollout.append((name, idle_ns))
        elif name and not name.startswith(WAIT):
            trains = True
            rollout.append((name if name in _APART else TRAINING, idle_ns))
        else:
            trainer.append((name.removeprefix(WAIT), idle_ns))
            rollout.append((NO_REQUESTS if name else "", idle_ns))
    step_ns = summary.duration_ns
    return (
        _largest(trainer, step_ns) if trains and step_ns else None,
        _largest(rollout, step_ns) if generates and step_ns else None,
    )


def _largest(parts: Iterable[tuple[str, float]], step_ns: int) -> Idle:
    """Return the total idle time of some causes (ns) in a step, and the largest cause."""
    lengths: dict[str, float] = {}
    for name, length_ns in parts:
        lengths[name] = lengths.get(name, 0.0) + length_ns
    cause = max(lengths, key=lengths.__getitem__)
    return _idle(sum(lengths.values()) / step_ns, cause, lengths[cause] / step_ns)


def _idle(share: float, cause: str, cause_share: float) -> Idle:
    """Return an idle time with shares rounded to 0.01%; a cause with a share of 0 is left out."""
    part = _rounded(cause_share)
    return Idle(_rounded(share), cause if part else "", part)


def _rounded(share: float) -> float:
    return round(1e4 * max(0.0, share)) / 1e4


def _since(times: Floats, weight: Floats, cuts: Floats) -> Floats:
    """Return for each cut the sum of the weighted distances to the ``times`` before it."""
    at = np.searchsorted(cuts, times)
    many, total = (
        np.bincount(at, each, cuts.size)[: cuts.size].cumsum() for each in (weight, weight * times)
    )
    return np.asarray(many * cuts - total)
