"""Savings: by how much a change of one stage would shorten a step, from its critical path.

A loop without generation in the background is one chain, so what a stage saves, the step saves.
With it, the step is as long as the longer one of two chains. One is the training. The other is the
generation, with the stages that have to end before it begins.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from math import inf
from typing import Literal, NamedTuple

import numpy as np

from verl_profiling.files.step_summary import Saving
from verl_profiling.manifest import WAIT
from verl_profiling.slices.slices import Floats, Slices
from verl_profiling.watch.step_slices import StepSlices

LEAST_SHARE = 0.01
"""Least saving, and least wait for the background, as a share of the step: less is noise."""

_HALF = 0.5
_CHANGES: tuple[Literal["half", "even"], ...] = ("half", "even")


class StageTimes(NamedTuple):
    """The time of the critical path in a stage (ns).

    Attributes:
        work: Time in stages of workers; without any, the whole time.
        uneven: Time that the stage would save if its workers all took the mean; 0 if unclear.
        slack: The most that it can save: what ran beside it would end last then.
    """

    work: float
    uneven: float
    slack: float = inf


class Background(NamedTuple):
    """Generation in the background of a step, for which the training waits at one place.

    Attributes:
        name: Name of its stage; empty if there is none.
        generation_ns: Time in the stage.
        wait_ns: Wait of the training for its end.
        slack_ns: How long before that wait it ended.
        before: Stages of the training that have to end before it begins.
    """

    name: str = ""
    generation_ns: float = 0.0
    wait_ns: float = 0.0
    slack_ns: float = 0.0
    before: frozenset[str] = frozenset()


class StepTimes(NamedTuple):
    """A step as chains of stages: the training, and generation in the background.

    Attributes:
        step_ns: Duration of the step.
        stages: Times of the stages that are no waits.
        background: Generation in the background.
    """

    step_ns: float
    stages: Mapping[str, StageTimes]
    background: Background

    def saved_ns(self, scale: Mapping[str, float], balance: Collection[str] = ()) -> float:
        """Return by how much the step would be shorter; negative if longer.

        Args:
            scale: Factors of the times of stages.
            balance: Stages whose workers would all take the mean.
        """
        background = self.background
        training = 0.0
        generation = (1.0 - scale.get(background.name, 1.0)) * background.generation_ns
        for name, times in self.stages.items():
            even = times.uneven if name in balance else 0.0
            saved = even + (1.0 - scale.get(name, 1.0)) * (times.work - even)
            saved = min(saved, times.slack)
            training += saved
            if name in background.before:
                generation += saved
        return self._with_chains(training, generation)

    def _with_chains(self, training_ns: float, generation_ns: float) -> float:
        """Return how much shorter the step would be with chains shorter by the given times."""
        background = self.background
        if not background.name:
            return training_ns
        return min(background.wait_ns + training_ns, background.slack_ns + generation_ns)

    def largest(self) -> Saving | None:
        """Return the change of one stage that would save most; ``None`` if none saves much."""
        background = self.background
        most_ns = self._with_chains(0.0, _HALF * background.generation_ns)
        stage, change = background.name, _CHANGES[0]
        for name, times in self.stages.items():
            for kind, saved_ns in zip(_CHANGES, (_HALF * times.work, times.uneven), strict=True):
                saved_ns = min(saved_ns, times.slack)
                also_ns = saved_ns if name in background.before else 0.0
                whole_ns = self._with_chains(saved_ns, also_ns)
                if saved_ns and whole_ns > most_ns:
                    stage, change, most_ns = name, kind, whole_ns
        if not stage or most_ns < LEAST_SHARE * self.step_ns:
            return None
        return Saving(stage, change, round(most_ns))


def times_in(slices: StepSlices) -> list[StepTimes | None]:
    """Return the chains of each step, whose summaries already have their exposed times.

    ``None`` where the chains are unknown: the awaited stage does not end in the wait, the loop
    waits at several places, or a worker began before the stage that waits for it.
    """
    spine, called = slices.spine, slices.called
    waits = slices.waits
    is_clipped = called.begin == spine.begin[called.parent]  # it was under way before the stage
    has_wait = {*slices.step(spine)[waits].tolist()}
    has_earlier_work = {*slices.step(called)[is_clipped].tolist()}
    chains: list[StepTimes | None] = []
    for step, summary in enumerate(slices.summaries):
        background: Background | None = Background()
        if step in has_wait or summary.background:
            background = _background(slices, step)
        elif step in has_earlier_work:
            background = None
        if background is None or not summary.duration_ns:
            chains.append(None)
        else:
            stages = _stages(slices, step)
            chains.append(StepTimes(float(summary.duration_ns), stages, background))
    return chains


def _stages(slices: StepSlices, step: int) -> dict[str, StageTimes]:
    """Return the times of the stages of a step that are no waits."""
    stages = {}
    slack_ns = _slack(slices, step)
    for row in slices.summaries[step].exposed:
        if row.name and not row.name.startswith(WAIT):
            calls_ns = slices.path_in_calls.get((step, row.name), {})
            of_role_ns = calls_ns.get(row.role, 0.0) if row.leader else 0.0
            uneven = of_role_ns * (1.0 - 1.0 / row.imbalance)
            work = sum(calls_ns.values()) or float(row.exposed_ns)
            stages[row.name] = StageTimes(work, uneven, slack_ns.get(row.name, inf))
    return stages


def _slack(slices: StepSlices, step: int) -> dict[str, float]:
    """Return how much earlier each stage could end until another one, beside it in its process, is
    the last to end (ns); only of steps in which stages overlap.
    """
    spine, each = (slices.in_step(table, step) for table in (slices.spine, slices.whole_loop))
    each = each.at(~slices.named(each, *slices.summaries[step].background))
    slack_ns: dict[str, float] = {}
    if np.array_equal(np.sort(spine.end), np.sort(each.end)):
        return slack_ns
    for row, (_, name) in enumerate(slices.stages(spine.name)):
        is_beside = (each.who == spine.who[row]) & (each.end < spine.end[row])
        least = each.end[is_beside].max(initial=spine.begin[row])
        slack_ns[name] = slack_ns.get(name, 0.0) + float(spine.end[row] - least)
    return slack_ns


def _background(slices: StepSlices, step: int) -> Background | None:
    """Return the generation in the background of a step that has or waits for it; ``None`` if the
    wait is not known.
    """
    spine = slices.in_step(slices.spine, step)
    waits = [name for _, name in slices.stages(np.unique(spine.name)) if name.startswith(WAIT)]
    if len(waits) != 1:
        return None
    name = waits[0].removeprefix(WAIT)
    if name not in slices.summaries[step].background:
        return None
    wait = spine.at(slices.named(spine, waits[0]))
    if (np.diff(wait.who) == 0).any():  # it waits at several places
        return None
    loop = slices.in_step(slices.whole_loop, step)
    generation = loop.at(slices.named(loop, name)).by_name()
    begin, end = float(wait.begin[0]), float(wait.end[-1])
    step_begin, step_end = float(slices.begins[step]), float(slices.ends[step])
    slack_ns = 0.0
    if end - begin > LEAST_SHARE * (step_end - step_begin):
        # Batches without a gap between them are one slice, so the awaited end may be hidden.
        if not ((generation.begin < end) & (generation.end > begin)).any():
            return None
    else:
        ends = generation.end[generation.end < step_end]
        if not ends.size:
            return None
        slack_ns = begin - float(ends[-1])
        if slack_ns < 0:  # it ended after this step's wait, so before the next one's
            slack_ns += step_end - step_begin
    return Background(
        name=name,
        generation_ns=float((generation.end - generation.begin).sum()),
        wait_ns=end - begin,
        slack_ns=slack_ns,
        before=_before_it_begins(
            slices, spine, end, generation.begin[generation.begin > step_begin]
        ),
    )


def _before_it_begins(
    slices: StepSlices, spine: Slices, wait_end: float, begins: Floats
) -> frozenset[str]:
    """Return the stages between the wait for one batch and the begin of the next one."""
    launch = float(begins.max(initial=-1.0))
    if launch < 0:  # batches follow each other at once
        return frozenset()
    is_after, is_before = spine.begin >= wait_end, spine.end <= launch
    between = is_after & is_before if launch >= wait_end else is_after | is_before
    return frozenset(name for _, name in slices.stages(spine.name[between]))
