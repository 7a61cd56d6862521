"""The collectives that a process entered, as torch's flight recorder has them."""

from __future__ import annotations

from quiet_steps import with_stages

from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.watch.collectives import with_lateness

MS = 1_000_000


def late(*of_ranks: list[float], begins: tuple[float, ...] = (0.0, 0.0)) -> list[int]:
    """Return how late each of two ranks was in its stage (ms),
    from the times at which they entered.
    """
    workers = [
        with_stages(
            RankUse(
                lane=f"actor_rank{rank}",
                role="actor",
                rank=rank,
                collectives={"0 2": {number: int(at * MS) for number, at in enumerate(entered)}},
            ),
            {"update_actor": [(int(begin * MS), 1000 * MS)]},
        )
        for rank, (entered, begin) in enumerate(zip(of_ranks, begins, strict=True))
    ]
    found = with_lateness(StepSummary(step=1, begin_ns=0, end_ns=1000 * MS, workers=workers))
    return [one.late_ns["update_actor"] for one in found.workers if one.late_ns is not None]


def test_lateness_is_what_the_others_waited_for() -> None:
    """Each time they waited, once where they came together before."""
    assert late([100, 200, 300, 400], [130, 230, 330, 430]) == [0, 120 * MS]
    assert late([100, 101, 102, 103], [150, 151, 152, 153]) == [0, 50 * MS]
    assert late([100, 300], [200, 300], begins=(0.0, 80.0)) == [0, 20 * MS]
