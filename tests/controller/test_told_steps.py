"""What ranks tell rank 0 of their steps: late, broken, of another training, and of a thousand ranks."""

from __future__ import annotations

import gc
import time
from typing import Any

import msgspec
import pytest
import torch.distributed as dist

from verl_profiling.controller.spmd import Ranks
from verl_profiling.controller.told_steps import Hearing, Telling, ToldSteps
from verl_profiling.step_account import RankUse, StageUse, StepAccount


class Post(Ranks):
    """A rank that leaves word for rank 0 in a store, and listens to nothing else."""

    def __init__(self, store: Any, rank: int, world: int = 1) -> None:
        self.others = range(1, world)
        self._store, self.rank = store, rank


def account(step: int, rank: int, begin_ns: int = 1_000) -> StepAccount:
    """Return a step of a rank, in whose middle it was in one stage."""
    use = RankUse(
        lane=f"actor_rank{rank}",
        role="actor",
        rank=rank,
        stages=[StageUse("update_actor", 40 + rank, 1, begin_ns + 10)],
        held_bytes=100 * rank,
    )
    return StepAccount(step=step, begin_ns=begin_ns, end_ns=begin_ns + 100, loop=[use])


def lanes(found: StepAccount) -> list[str]:
    """Return the ranks that an account has."""
    return [use.lane for use in found.loop]


def whole(rank_0: Hearing, number: int) -> list[StepAccount]:
    """Look as later steps do, a millisecond each, until so many accounts are whole."""
    found: list[StepAccount] = []
    deadline = time.monotonic() + 30
    while len(found) < number and time.monotonic() < deadline:
        found += rank_0.whole()
    return found


@pytest.fixture
def channel() -> Any:
    """A store that the ranks share."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True)


def test_the_steps_of_all_ranks_are_in_the_accounts_of_rank_0(channel: Any) -> None:
    """Whatever their clocks are: a step begins for all when it begins for rank 0."""
    rank_0 = Hearing(Post(channel, 0, world=3), 10, 60.0)
    others = [Telling(Post(channel, rank, world=3), 10) for rank in (1, 2)]
    rank_0.take([account(1, 0), account(2, 0, 2_000)])
    assert list(rank_0.whole()) == []
    for rank, other in enumerate(others, 1):
        other.take([account(1, rank, 10**15 * rank), account(2, rank, 10**15 * rank + 5)])
        assert [found.step for found in other.whole()] == [1, 2], "a rank has its own at once"
    found = whole(rank_0, 2)
    assert [(one.step, lanes(one)) for one in found] == [
        (step, ["actor_rank0", "actor_rank1", "actor_rank2"]) for step in (1, 2)
    ]
    assert [use.stages[0].begin_ns for use in found[1].loop] == [2_010] * 3
    assert [use.held_bytes for use in found[1].loop] == [0, 100, 200]


def test_a_rank_that_has_no_room_tells_later(channel: Any) -> None:
    """What rank 0 has not taken is not overwritten; what does not fit is told with the next steps."""
    rank_0, other = Hearing(Post(channel, 0, world=2), 10, 60.0), Telling(Post(channel, 1), 3)
    for step in range(1, 7):
        other.take([account(step, 1)])
    rank_0.take([account(step, 0) for step in range(1, 7)])
    assert [(one.step, len(one.loop)) for one in rank_0.whole()] == [(1, 2)]
    other.take([account(7, 1)])
    rank_0.take([account(7, 0)])
    found = {one.step: len(one.loop) for one in whole(rank_0, 6)}
    assert found == {2: 1, 3: 1, 4: 1, 5: 2, 6: 2, 7: 2}, "three steps are kept at most"


def test_a_step_is_told_once(channel: Any) -> None:
    """Also where more steps are complete before the loop has taken its accounts of the others."""
    telling = Telling(Post(channel, 1), 10)
    telling.take([account(1, 1)])
    for step in (2, 3):
        telling.take([account(step, 1)])
    told = []
    for _ in range(2):
        data = Post(channel, 0).take("watch/1")
        assert data is not None
        told += [step.step for step in msgspec.msgpack.decode(data, type=ToldSteps).steps]
        telling.take([])
    assert told == [1, 2, 3]


def test_a_loop_that_counts_anew_has_all_ranks_in_every_account(channel: Any) -> None:
    """Its steps have the numbers of the epoch before, also in one telling, and also where a rank is late."""
    rank_0, other = Hearing(Post(channel, 0, world=2), 10, 60.0), Telling(Post(channel, 1), 10)
    found: list[StepAccount] = []
    for steps, late in (((0, 1, 2), False), ((3, 0, 1), False), ((2, 3, 4), True), ((0, 1), True)):
        own, others = ([account(step, rank) for step in steps] for rank in (0, 1))
        if not late:
            other.take(others)
        rank_0.take(own)
        found += rank_0.whole()
        if late:
            other.take(others)
        for _ in steps:
            found += rank_0.whole()
    assert [one.step for one in found] == [0, 1, 2, 3, 0, 1, 2, 3, 4, 0, 1]
    assert {tuple(lanes(one)) for one in found} == {("actor_rank0", "actor_rank1")}


def test_a_rank_that_counts_otherwise_fills_no_memory(channel: Any) -> None:
    """Steps of numbers that rank 0 never comes to are kept for a while, and not all of them."""
    rank_0, other = Hearing(Post(channel, 0, world=2), 5, 60.0), Telling(Post(channel, 1), 5)
    for step in range(40):
        other.take([account(10**6 + step, 1)])
        rank_0.take([account(step, 0)])
        assert [lanes(one) for one in rank_0.whole()] == [["actor_rank0"]]
    [known] = rank_0._ranks.values()
    assert len(known.steps) == 5


def test_a_late_rank_is_named_once_and_taken_in_when_it_tells(
    channel: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The accounts are whole without it until then."""
    rank_0, other = Hearing(Post(channel, 0, world=2), 10, 0.02), Telling(Post(channel, 1), 10)
    found: list[StepAccount] = []
    for step in range(1, 4):
        rank_0.take([account(step, 0)])
        found += rank_0.whole()
        time.sleep(0.03)
        found += rank_0.whole()
    assert [lanes(one) for one in found] == [["actor_rank0"]] * 3
    [said] = [record.message for record in caplog.records]
    assert said.startswith("watch: rank 1 has told nothing of its steps for ")
    other.take([account(3, 1), account(4, 1)])
    rank_0.take([account(4, 0)])
    [joined] = rank_0.whole()
    assert lanes(joined) == ["actor_rank0", "actor_rank1"]


def test_the_last_steps_are_waited_for_but_not_for_those_that_never_tell(channel: Any) -> None:
    """When training ends there is always room; a rank whose process is gone is not waited for either."""
    rank_0 = Hearing(Post(channel, 0, world=4), 10, 60.0)
    there, gone = (Telling(Post(channel, rank), 10) for rank in (1, 2))
    there.take([account(1, 1)])
    there.take([account(2, 1)])
    there.wait(1.0)
    gone.take([account(1, 2)])
    told = msgspec.msgpack.decode(Post(channel, 0).get("watch/2") or b"", type=ToldSteps)
    process = msgspec.structs.replace(told.process, started="1")
    Post(channel, 0).put("watch/2", msgspec.msgpack.encode(msgspec.structs.replace(told, process=process)))
    rank_0.take([account(1, 0), account(2, 0)])
    begin_s = time.monotonic()
    rank_0.wait(0.3)  # for rank 3
    assert time.monotonic() - begin_s < 10
    assert [len(one.loop) for one in rank_0.whole()] == [3, 2]
    begin_s = time.monotonic()
    there_alone = Hearing(Post(channel, 0, world=1), 10, 60.0)
    there_alone.wait(60.0)
    assert time.monotonic() - begin_s < 10


def test_what_a_rank_tells_just_before_its_last_word_is_not_lost(channel: Any) -> None:
    """Both may come between the look for the first, and that for the last."""
    other = Telling(Post(channel, 1), 10)

    class Between(Post):
        def told(self, rank: int, last: bool = False) -> bytes | None:
            found = super().told(rank, last)
            if not last and not list(other.whole()):
                other.take([account(1, 1)])
                other.wait(1.0)
            return found

    rank_0 = Hearing(Between(channel, 0, world=2), 10, 60.0)
    rank_0.take([account(1, 0)])
    rank_0.wait(30.0)
    [joined] = rank_0.whole()
    assert lanes(joined) == ["actor_rank0", "actor_rank1"]


def _many_stages() -> bytes:
    use = RankUse(lane="actor_rank1", role="actor", stages=[StageUse(str(n), 1) for n in range(1000)])
    told = StepAccount(step=1, begin_ns=0, end_ns=1, loop=[use])
    return msgspec.msgpack.encode(ToldSteps.of([told]))


@pytest.mark.parametrize(
    "said",
    [b"", b"\xff" * 1000, msgspec.msgpack.encode([1, 2]), b"\x91" * 100_000, _many_stages()],
    ids=["empty", "bytes", "other", "deep", "many"],
)
def test_what_is_no_word_of_a_rank_is_named_and_holds_up_nothing(
    channel: Any, caplog: pytest.LogCaptureFixture, said: bytes
) -> None:
    """The other ranks take part."""
    rank_0, other = Hearing(Post(channel, 0, world=3), 10, 0.01), Telling(Post(channel, 2), 10)
    Post(channel, 1).put("watch/1", said)
    rank_0.take([account(1, 0)])
    other.take([account(1, 2)])
    time.sleep(0.02)
    found = whole(rank_0, 1)
    assert [lanes(one) for one in found] == [["actor_rank0", "actor_rank2"]]
    [message] = [record.message for record in caplog.records]
    assert message.startswith("watch: rank 1 has told nothing ")


def test_of_a_thousand_ranks_a_step_takes_a_part(channel: Any) -> None:
    """No step is held up for long, the accounts have all ranks in the end, and one is late for all."""
    world = 1024
    rank_0 = Hearing(Post(channel, 0, world), 10, 60.0)
    rank_0.take([account(step, 0) for step in (1, 2, 3)])
    for rank in range(1, world):
        Telling(Post(channel, rank), 10).take([account(step, rank) for step in (1, 2, 3)])
    found: list[StepAccount] = []
    took: list[float] = []
    gc.freeze()  # or one of the steps looks for garbage in all that this process has imported
    while len(found) < 3 and len(took) < 10_000:
        begin_s = time.thread_time()
        found += rank_0.whole()
        took.append(time.thread_time() - begin_s)
    gc.unfreeze()
    assert [len(one.loop) for one in found] == [world] * 3
    assert len(took) > 10
    assert max(took) < 0.1
