"""The collectives that a process entered, as torch's flight recorder has them."""

from __future__ import annotations

from verl_profiling.step_summary import RankUse, StageUse, StepSummary
from verl_profiling.watch.collectives import with_lateness

MS = 1_000_000


def late(*of_ranks: list[float], begins: tuple[float, ...] = (0.0, 0.0)) -> list[int | None]:
    """Return how late each of two ranks was in its stage (ms), from the times at which they entered."""
    workers = [
        RankUse(
            lane=f"actor_rank{rank}",
            role="actor",
            rank=rank,
            stages=[StageUse("update_actor", int((1000 - begin) * MS), 1, int(begin * MS))],
            collectives={"0 2": {number: int(at * MS) for number, at in enumerate(entered)}},
        )
        for rank, (entered, begin) in enumerate(zip(of_ranks, begins, strict=True))
    ]
    found = with_lateness(StepSummary(step=1, begin_ns=0, end_ns=1000 * MS, workers=workers))
    return [one.stages[0].late_ns for one in found.workers]


def test_lateness_adds_up_where_the_others_waited() -> None:
    """A rank that is slow in each of four mini-batches is late four times."""
    assert late([100, 200, 300, 400], [130, 230, 330, 430]) == [0, 120 * MS]


def test_the_same_lateness_counts_once() -> None:
    """The other rank entered all of its collectives before the late one came: it waited at their end."""
    assert late([100, 101, 102, 103], [150, 151, 152, 153]) == [0, 50 * MS]


def test_a_late_begin_of_a_stage_is_no_lateness_in_it() -> None:
    """Rank 1 begins 80 ms later, and is 20 ms slower up to the first collective; then both are alike."""
    assert late([100, 300], [200, 300], begins=(0.0, 80.0)) == [0, 20 * MS]
