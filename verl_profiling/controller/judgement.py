"""The judgement of step summaries: what follows from the stages of all processes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain

from verl_profiling.files.step_summary import StepSummary
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.manifest import WEIGHT_SYNC
from verl_profiling.watch.hand_offs import add_device_memory
from verl_profiling.watch.idle import idle_in, made_in
from verl_profiling.watch.lessons import lessons_in
from verl_profiling.watch.savings import times_in
from verl_profiling.watch.stage_numbers import exposed_in
from verl_profiling.watch.step_slices import StepSlices


def judge(
    summaries: Sequence[StepSummary],
    has_workers: bool,
    roles: Collection[str] = (),
    engines: set[str] | None = None,
) -> None:
    """Add to step summaries what follows from the stages, such as idle time and exposed time.

    All steps have the same processes.

    Args:
        summaries: Summaries of the steps.
        has_workers: Whether the loop calls workers.
        roles: Roles of these workers, as far as they are known.
        engines: Lanes of the engines that generated in earlier steps; those of these steps are
            added.
    """
    is_silent = not {use.role for use in summaries[0].workers}.issuperset(roles)
    slices = StepSlices(summaries)
    for summary, rows in zip(summaries, exposed_in(slices, has_workers, is_silent), strict=True):
        summary.exposed = rows
    engines = set() if engines is None else engines
    for use in chain.from_iterable(summary.workers for summary in summaries):
        if use.role == ROLLOUT_ROLE and use.stages not in ("", WEIGHT_SYNC):
            engines.add(use.lane)
    sides, times = idle_in(slices, has_workers, engines), times_in(slices)
    for number, summary in enumerate(summaries):
        summary.trainer_idle, summary.rollout_idle = sides[number]
        step_times = times[number]
        # without the replies of workers, what a stage would save is not known
        is_read = summary.workers or summary.loop[1:] or not has_workers
        summary.helps = step_times.largest() if step_times is not None and is_read else None
        summary.add_up()
        summary.lessons = lessons_in(summary)
        add_device_memory(summary)
        if summary.spans:
            summary.samples, summary.tokens = made_in(summary)
