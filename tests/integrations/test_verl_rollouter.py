"""The rollouter of verl's fully asynchronous trainer: its real class,
without engines and without Ray.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest

from verl_profiling.files.trajectory_log import TrajectoryLog
from verl_profiling.tools.trajectories import OpenLog
from verl_profiling.trajectories.spans import start_log, stop_log

pytestmark = [pytest.mark.verl, pytest.mark.timeout(300)]

MODULE = "verl.experimental.fully_async_policy"
MOST = 12


def actor_class(module: str, name: str) -> type[Any]:
    """Return the class that Ray makes actors of, as it arrives in their process:
    pickled by value.
    """
    import verl_profiling.integrations.verl  # noqa: F401

    found = getattr(pytest.importorskip(f"{MODULE}.{module}"), name)
    from ray import cloudpickle

    made: type[Any] = cloudpickle.loads(cloudpickle.dumps(found.__ray_metadata__.modified_class))
    return made


class Queue:
    def __init__(self) -> None:
        self.samples: list[bytes] = []

    async def get_statistics(self) -> dict[str, int]:
        return {"queue_size": len(self.samples)}

    async def get_queue_size(self) -> int:
        return len(self.samples)

    async def put_sample(self, sample: bytes) -> bool:
        self.samples.append(sample)
        return True


class Batch(list[int]):
    def __init__(self) -> None:
        super().__init__([0])
        self.non_tensor_batch: dict[str, Any] = {}


class AgentLoops:
    """Makes a batch of a prompt in no time."""

    async def generate_sequences_single(self, prompts: Any) -> Any:
        return prompts


def rollouter() -> Any:
    """Return a rollouter that has been set up by hand."""
    made = object.__new__(actor_class("fully_async_rollouter", "FullyAsyncRollouter"))
    numbers = dict.fromkeys(
        (
            "total_generated_samples",
            "dropped_stale_samples",
            "processed_sample_count",
            "staleness_samples",
        ),
        0,
    )
    now = time.time()
    vars(made).update(
        numbers,
        message_queue_client=Queue(),
        async_rollout_manager=AgentLoops(),
        pending_queue=asyncio.Queue(),
        active_tasks=set(),
        paused=False,
        lock=asyncio.Lock(),
        _resume_event=asyncio.Event(),
        max_required_samples=MOST,
        required_samples=4,
        staleness_threshold=0.5,
        max_queue_size=MOST,
        max_concurrent_samples=MOST,
        step_start_time=now,
        idle_start_time=now,
        _step_generated_samples=0,
        _completed_steps=1,
        _STEP_HISTORY_SIZE=10,
        _step_samples_history=[],
        _active_count_history=[(now, 0, 0)],
    )
    return made


async def recorded(work: Any) -> TrajectoryLog:
    log = OpenLog(1_000)
    start_log(log)
    await work
    log.end()
    stop_log(log)
    return log.close("rollouter_rank0")


async def test_a_pause_lasts_until_the_weights_are_new() -> None:
    """From when too many samples are stale until the trainer has reset that;
    asking again changes nothing.
    """
    made = rollouter()

    async def work() -> None:
        assert not await made._should_pause_generation()
        made.staleness_samples = MOST
        assert await made._should_pause_generation()
        assert await made._should_pause_generation()
        await asyncio.sleep(0.01)
        assert "fully_async/rollouter/idle_ratio" in await made.reset_staleness()
        assert not await made._should_pause_generation()

    log = await recorded(work())
    assert [span.name for span in log.spans] == ["pause", "reset_staleness"]
    pause, reset = log.spans
    assert not pause.open
    assert pause.facts == {"staleness_samples": MOST, "most": MOST}
    assert pause.end_ns - pause.begin_ns > 10e6
    assert reset.begin_ns <= reset.end_ns <= pause.end_ns


async def test_a_pause_that_began_before_is_shown_from_the_begin() -> None:
    """When a capture starts, the rollouter says how it stands."""
    made = rollouter()
    made.staleness_samples, made.paused = MOST, True
    assert await made._should_pause_generation(), "nothing records yet"
    made._verl_profiling = SimpleNamespace(start_capture=lambda request: request)

    async def work() -> None:
        assert made.start_capture("request") == "request"

    log = await recorded(work())
    assert [(span.name, span.open) for span in log.spans] == [("pause", True)]
    assert {count.name: count.value for count in log.counts} == {
        "samples in flight": 0,
        "staleness samples": MOST,
    }
    await made.reset_staleness()  # a pause that goes on is in later logs of this process


async def test_samples_and_the_queue_are_recorded() -> None:
    """Each sample is a span with the group of its trajectories,
    and leaves the length of the queue.
    """
    made = rollouter()

    async def work() -> None:
        for number in range(2):
            sample = SimpleNamespace(
                sample_id=f"sample_0_{number}", full_batch=Batch(), rollout_status={}
            )
            await made._process_single_sample_streaming(sample)

    log = await recorded(work())
    assert [(span.name, span.facts["group"]) for span in log.spans] == [
        ("sample", "uid_sample_0_0"),
        ("sample", "uid_sample_0_1"),
    ]
    assert [c.value for c in log.counts if c.name == "message queue"] == [0, 1]
    assert made.total_generated_samples == 2
