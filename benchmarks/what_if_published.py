"""Predictions from published stage times alone: a step as a coarse graph, without requests.

Run: ``what_if_published.py``. ``PUBLISHED`` has the stage times of one configuration, and measured steps of
others. The model is that of ``verl-profiling what-if``; nothing of it is fitted to what is published.

On other devices, a rollout takes a time between the published one and one in proportion, likely halfway. The
training does, too, and is likely in proportion. Colocated devices are a split with rollouts zero steps ahead,
in which training and rollout have as many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations
from math import ceil, floor
from typing import NamedTuple

from verl_profiling.predict.changes import Changes
from verl_profiling.predict.graph import WORK, Graph, Segment
from verl_profiling.predict.prediction import predict

__all__ = ["Interval", "Other", "Published", "coarse", "predicted"]


class Interval(NamedTuple):
    """A predicted step (s)."""

    low: float
    likely: float
    high: float


class Other(NamedTuple):
    """A configuration whose step is measured.

    Attributes:
        name: Name of the configuration.
        training: Devices of the training.
        rollout: Devices of the rollout.
        ahead: Most steps that a rollout is ahead of the training.
        measured_s: The measured step (s).
        without: A stage that it does not have.
    """

    name: str
    training: int
    rollout: int
    ahead: float
    measured_s: float
    without: str = ""


class Published(NamedTuple):
    """A configuration whose stage times are published, and measured steps of others.

    Attributes:
        name: Name of the configuration.
        stages_s: Time (s) of each stage, one after another; the responses are made in ``rollout``.
        training: Devices of the training.
        rollout: Devices of the rollout; the same ones if colocated.
        others: The other configurations.
    """

    name: str
    stages_s: Mapping[str, float]
    training: int
    rollout: int
    others: Sequence[Other]


STREAMED = 0.75
"""Steps that a trainer is behind because a rollout is taken in four parts, without stale samples."""


def colocated(
    name: str, devices: int, step_s: float, stages_s: Sequence[float], others: Sequence[Other]
) -> Published:
    """Return a colocated configuration.

    Args:
        name: Name of the configuration.
        devices: Number of devices.
        step_s: Measured step (s).
        stages_s: ``gen``, ``old_log_prob`` and ``update_actor`` (s); the rest of the step is training, too.
        others: The other configurations.
    """
    named = dict(zip(("rollout", "old_log_prob", "update_actor"), stages_s, strict=True))
    named["other"] = max(step_s - sum(stages_s), 0.0)
    return Published(f"{name} on {devices}", named, devices, devices, others)


def stale(training: int, rollout: int, staleness: float, measured_s: float) -> Other:
    """Return a split that streams its rollouts, with stale samples; it has no stage ``old_log_prob``.

    Args:
        training: Devices of the training.
        rollout: Devices of the rollout.
        staleness: Share of stale samples that is allowed.
        measured_s: The measured step (s).
    """
    name = f"{training}:{rollout}, staleness {staleness:g}"
    return Other(name, training, rollout, STREAMED + staleness, measured_s, "old_log_prob")


PUBLISHED = [
    colocated("7B, FSDP2", 16, 749, (321, 88, 286), [Other("12:4, one step off", 12, 4, 1, 520)]),
    colocated("7B, Megatron", 16, 699, (207, 119, 344), [Other("12:4, one step off", 12, 4, 1, 566)]),
    colocated(
        "7B, 28K tokens",
        32,
        790.10,
        (357.41, 107.71, 269.80),
        [
            *(Other("64", 64, 64, 0, 365.28), Other("128", 128, 128, 0, 356.30)),
            *(stale(16, 16, 0.5, 294.77), stale(32, 32, 0.5, 189.26), stale(64, 64, 0.5, 150.63)),
        ],
    ),
    colocated("7B, 28K tokens", 64, 365.28, (150.72, 70.26, 133.41), [stale(32, 32, 0.5, 189.26)]),
    colocated(
        "7B, 28K tokens",
        128,
        356.30,
        (177.85, 53.92, 113.81),
        [
            *(stale(64, 64, 0, 231.34), stale(64, 64, 0.1, 171.30)),
            *(stale(64, 64, 0.3, 146.11), stale(64, 64, 0.5, 150.63)),
        ],
    ),
    colocated(
        "7B, 28K tokens, 300 steps",
        128,
        356.30,
        (177.85, 53.92, 113.81),
        [
            Other("64:64, require_batches 1", 64, 64, 15 / 16 + 0.5, 203.47, "old_log_prob"),
            Other("64:64, require_batches 2", 64, 64, 7 / 8 + 0.5, 158.72, "old_log_prob"),
            Other("64:64, require_batches 4", 64, 64, STREAMED + 0.5, 124.64, "old_log_prob"),
        ],
    ),
    colocated(
        "30B-A3B, 8K tokens", 128, 497.89, (348.05, 28.73 + 20.86, 86.27), [stale(32, 96, 0.5, 282.75)]
    ),
    colocated("7B, tools", 32, 375.47, (228.03, 35.19, 111.84), [stale(16, 16, 1, 221.36)]),
    colocated("7B, 10K tokens", 16, 484.623, (52.939, 0, 430.263), [stale(8, 8, 0.5, 489.953)]),
]
"""Figures of verl's documentation, ``docs/advance/one_step_off.md`` (the first two) and ``fully_async.md``.

Splits are training:rollout. The 30B model's ``old_log_prob`` has the reference model's time in it.
"""


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
        graph.segments.append(Segment(WORK, begin_ns, end_ns, who, (stage,), (stage,), after))
        begin_ns = end_ns
    graph.segments.append(Segment("own code", begin_ns, begin_ns, "controller", after=[len(stages_s) - 1]))
    graph.last = len(stages_s)
    graph.close()
    return graph


def predicted(graph: Graph, other: Other) -> Interval:
    """Return the step with other devices; between two whole numbers of steps ahead, what both give.

    Args:
        graph: The step with published stage times.
        other: The other configuration; 0 steps ahead are training and rollout one after the other.
    """
    scale = {other.without: 0.0} if other.without else {}
    found = [
        predict(graph, Changes(scale=scale, steps_ahead=steps, split=(other.training, other.rollout)))
        for steps in (floor(other.ahead), ceil(other.ahead))
    ]
    low, high = (
        pick(getattr(one, f"{end}_us") for one in found) for pick, end in ((min, "low"), (max, "high"))
    )
    share = other.ahead - floor(other.ahead)
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
        for other in one.others:
            found = predicted(graph, other)
            holds = found.low <= other.measured_s <= found.high
            steps.append((found.likely, other.measured_s))
            held, rows = held + holds, rows + 1
            print(
                f"| {one.name} | {other.name} | {found.likely:.0f} s | {found.low:.0f} to {found.high:.0f} s "
                f"| {other.measured_s:.0f} s | {'yes' if holds else 'no'} |"
            )
        for (likely, measured), (other_likely, other_measured) in combinations(steps, 2):
            pairs += 1
            right += (likely < other_likely) == (measured < other_measured)
    print(f"\n{held} of {rows} intervals hold the published step; {right} of {pairs} orders are right.")


if __name__ == "__main__":
    main()
