"""Draws how exposed time adds up: ``python docs/draw_exposed.py docs/images/exposed.png``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from verl_profiling.files.step_summary import ExposedStage, RankUse, StepSummary
from verl_profiling.watch.process_sums import packed_stages
from verl_profiling.watch.stage_numbers import exposed

S = 1_000_000_000
COLORS = {
    "generate": "#d9822b",
    "forward": "#1f5fbf",
    "backward": "#2e8b57",
    "rollout": "#d9822b",
    "reward": "#8e6bbf",
    "update_actor": "#1f5fbf",
    "": "#c8c8c8",
}


STAGES = ("generate", "forward", "backward")


def use(lane: str, role: str, *stages: tuple[str, float, float]) -> RankUse:
    """Return a process with stages: name, begin and length in seconds."""
    names, runs = packed_stages(
        {name: [(int(begin * S), int((begin + length) * S))] for name, begin, length in stages}
    )
    return RankUse(lane=lane, role=role, stages=names, runs=runs)


def ranks_of_one_program() -> StepSummary:
    """Return a step of three ranks that run one program; rank 2 is late,
    and the others wait for it.
    """
    durations = ((10, 9, 6), (10, 9, 6), (14, 5, 6))
    return StepSummary(
        step=1,
        begin_ns=0,
        end_ns=26 * S,
        loop=[
            use(
                f"actor_rank{rank}", "actor", *zip(STAGES, accumulate((0, *row)), row, strict=False)
            )
            for rank, row in enumerate(durations)
        ],
    )


def loop_that_calls_workers() -> StepSummary:
    """Return a step of a controller: a slow replica in its rollout, a slow rank in its update."""
    return StepSummary(
        step=1,
        begin_ns=0,
        end_ns=26 * S,
        loop=[
            use(
                "controller",
                "controller",
                ("rollout", 0.5, 13),
                ("reward", 14, 2),
                ("update_actor", 16.5, 9),
            )
        ],
        workers=[
            use("rollout0_rank0", "rollout", ("rollout", 0.7, 8)),
            use("rollout1_rank0", "rollout", ("rollout", 0.7, 12.7)),
            use("rollout2_rank0", "rollout", ("rollout", 0.7, 8.4)),
            use("actor_rank0", "actor", ("update_actor", 16.7, 6)),
            use("actor_rank1", "actor", ("update_actor", 16.7, 8.7)),
        ],
    )


def draw_lanes(axes: Axes, lanes: Sequence[RankUse]) -> None:
    """Draw processes with their stages."""
    for place, lane in enumerate(lanes):
        for name, begin_ns, _, took_ns in lane.each_run():
            begin, length = begin_ns / S, took_ns / S
            axes.barh(
                -place, length, 0.62, left=begin, color=COLORS[name], edgecolor="white", lw=0.8
            )
    axes.set_yticks([-place for place in range(len(lanes))], [use.lane for use in lanes])
    axes.tick_params(length=0)


def draw_rows(axes: Axes, place: float, rows: Sequence[ExposedStage]) -> None:
    """Draw the exposed time of a step as one bar, and who led below it."""
    begin = 0.0
    for row in rows:
        length = row.exposed_ns / S
        axes.barh(place, length, 0.8, left=begin, color=COLORS[row.name], edgecolor="black", lw=1)
        middle = begin + length / 2
        if row.name:
            text = f"{row.name}\n{length:g} s"
            axes.text(middle, place, text, ha="center", va="center", color="white", fontsize=7.5)
            leads = f"{row.leader} +{row.lead_ns / S:.2g} s" if row.leader else "nobody leads"
            axes.text(middle, place - 0.72, leads, ha="center", va="center", fontsize=7.5)
        else:
            axes.text(middle, place, f"{length:g} s", ha="center", va="center", fontsize=7.5)
        begin += length


def draw(picture: Path) -> None:
    """Draw both kinds of loop above each other."""
    figure, (program, calls) = plt.subplots(
        2, 1, figsize=(8, 5.4), dpi=150, layout="constrained", height_ratios=(4.9, 7.9)
    )
    summary = ranks_of_one_program()
    rows = exposed(summary)
    program.set_title("Ranks of one program: how far the furthest is", fontsize=9, loc="left")
    draw_lanes(program, summary.loop)
    draw_rows(program, -3.2, rows)
    front = 0.0
    for row in rows[:-1]:
        front += row.exposed_ns / S
        program.plot([front, front], [-3.6, 0.45], color="black", lw=1, ls=":")

    summary = loop_that_calls_workers()
    calls.set_title("A loop that calls workers: who worked in its stages", fontsize=9, loc="left")
    draw_lanes(calls, [*summary.loop, *summary.workers])
    draw_rows(calls, -6.2, exposed(summary))
    for axes, place in ((program, -3.2), (calls, -6.2)):
        ticks, labels = (
            list(axes.get_yticks()),
            [text.get_text() for text in axes.get_yticklabels()],
        )
        axes.set_yticks([*ticks, place], [*labels, "exposed"])
        axes.set(xlim=(0, 26), ylim=(place - 1.05, 0.5))
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(labelsize=8)
    calls.set_xlabel("seconds of the step", fontsize=8)
    figure.savefig(picture)


if __name__ == "__main__":
    draw(Path(sys.argv[1]))
