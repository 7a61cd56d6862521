"""Predictions from published stage times alone: a step as a coarse graph, without requests.

Run: ``what_if_published.py``. ``PUBLISHED`` has the stage times of one configuration, and measured steps of
others. The model is that of ``verl-profiling what-if``; nothing of it is fitted to what is published.

A rollout on other devices takes between as long as before and a time in proportion, and halfway is likely. So
does the training, whose likely time is in proportion. Colocated devices are a split with rollouts zero steps
ahead, in which training and rollout have as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, floor
from typing import NamedTuple

from verl_profiling.predict.graph import WORK, Graph, Segment
from verl_profiling.predict.what_if import Changes, predict

__all__ = ["Interval", "Published", "coarse", "predicted"]


class Interval(NamedTuple):
    """A predicted step (s)."""

    low: float
    likely: float
    high: float


class Published(NamedTuple):
    """A configuration whose stage times are published, and measured steps of others.

    Attributes:
        name: Name of the configuration.
        stages_s: Time (s) of each stage, one after another; the responses are made in ``rollout``.
        training: Devices of the training.
        rollout: Devices of the rollout; the same ones if colocated.
        others: Name, devices of training and rollout, steps ahead, and the measured step (s).
    """

    name: str
    stages_s: Mapping[str, float]
    training: int
    rollout: int
    others: Sequence[tuple[str, int, int, float, float]]


PUBLISHED: Sequence[Published] = ()


def coarse(stages_s: Mapping[str, float], training: int, rollout: int) -> Graph:
    """Return a step whose stages follow each other; each replica has one device.

    Args:
        stages_s: Time (s) of each stage, in order. ``rollout`` and ``update_weights`` have their meaning; all
            others are training.
        training: Devices of the training.
        rollout: Devices of the rollout.
    """
    engines = {f"rollout{number}" for number in range(rollout)}
    graph = Graph(0, round(sum(stages_s.values()) * 1e9), engines=engines)
    graph.devices = {name: {name} for name in engines}
    graph.devices["actor_rank0"] = {f"actor_rank0 {number}" for number in range(training)}
    begin_ns = 0
    for stage, seconds in stages_s.items():
        who = "rollout0" if stage == "rollout" else "actor_rank0"
        end_ns, after = begin_ns + round(seconds * 1e9), [len(graph.segments) - 1] if graph.segments else []
        graph.segments.append(Segment(who, (stage,), WORK, begin_ns, end_ns, after, (stage,)))
        begin_ns = end_ns
    graph.segments.append(Segment("controller", (), "own code", begin_ns, begin_ns, [len(stages_s) - 1], ()))
    graph.last = len(stages_s)
    graph.close()
    return graph


def predicted(graph: Graph, training: int, rollout: int, ahead: float) -> Interval:
    """Return the step with other devices; between two whole numbers of steps ahead, what both give.

    Args:
        graph: The step with published stage times.
        training: Devices of the training.
        rollout: Devices of the rollout.
        ahead: Most steps that a rollout is ahead of the training; 0 for one after the other.
    """
    found = [
        predict(graph, Changes(steps_ahead=steps, split=(training, rollout)))
        for steps in (floor(ahead), ceil(ahead))
    ]
    low, high = (
        pick(getattr(one, f"{end}_us") for one in found) for pick, end in ((min, "low"), (max, "high"))
    )
    share = ahead - floor(ahead)
    likely = found[0].predicted_us * (1 - share) + found[1].predicted_us * share
    return Interval(low / 1e6, likely / 1e6, high / 1e6)


def main() -> None:
    """Print the table, and how often the order of two configurations is right."""
    right, pairs, held, rows = 0, 0, 0, 0
    print("| from | of | predicted | interval | published | holds |")
    print("|---|---|---|---|---|---|")
    for one in PUBLISHED:
        graph = coarse(one.stages_s, one.training, one.rollout)
        recorded_s = sum(one.stages_s.values())
        steps = [(recorded_s, recorded_s)]
        for name, training, rollout, ahead, measured_s in one.others:
            found = predicted(graph, training, rollout, ahead)
            holds = found.low <= measured_s <= found.high
            steps.append((found.likely, measured_s))
            held, rows = held + holds, rows + 1
            print(
                f"| {one.name} | {name} | {found.likely:.0f} s | {found.low:.0f} to {found.high:.0f} s "
                f"| {measured_s:.0f} s | {'yes' if holds else 'no'} |"
            )
        for (likely, measured), (other_likely, other_measured) in combinations(steps, 2):
            pairs += 1
            right += (likely < other_likely) == (measured < other_measured)
    print(f"\n{held} of {rows} intervals hold the published step; {right} of {pairs} orders are right.")


if __name__ == "__main__":
    main()
