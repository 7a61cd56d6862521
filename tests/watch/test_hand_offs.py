"""Who held a device when the least of it was free, and the parts of a process's memory."""

from __future__ import annotations

import weakref
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from verl_profiling.files.device_use import parts_of
from verl_profiling.files.step_summary import (
    BEGIN,
    END,
    DeviceHolder,
    DeviceReadings,
    RankUse,
    SpanTotal,
    StepSummary,
)
from verl_profiling.report.hand_offs import device_table, hand_off_sentence
from verl_profiling.watch.hand_offs import add_device_memory
from verl_profiling.watch.log_writer import values_of

GB = 10**9
MS = 10**6


def read(lane: str, *rows: tuple[int, int, int, int], pid: int = 0, **parts: int) -> RankUse:
    """Return a process, from rows of time (ms), edge, free, and held memory (GB) in one stage."""
    numbers = []
    for at_ms, edge, free, held in rows:
        sizes = [free * GB, held * GB, held * GB, held * GB]
        numbers += [at_ms * MS, 0, edge, *sizes, parts.get("optimizer", 0) * GB, 0, 0]
    stage = f"stage_of_{lane}"
    readings = DeviceReadings(
        "gpu", pid or hash(lane), 80 * GB, stage, array("q", numbers).tobytes()
    )
    return RankUse(lane=lane, role=lane.partition("_")[0], device=readings)


def step(number: int, *processes: RankUse, **facts: Any) -> StepSummary:
    summary = StepSummary(step=number, begin_ns=0, end_ns=10**9, workers=[*processes], **facts)
    add_device_memory(summary)
    return summary


TRAINER = ((0, BEGIN, 70, 5), (100, END, 20, 45), (900, BEGIN, 4, 45), (950, END, 40, 5))


def test_what_was_held_twice_by_a_trainer_and_an_engine() -> None:
    """Above the least of each: 40 GB of the trainer, and 26 of the engine and of others. With the
    optimizer's 30 GB on the host, or a smaller engine, it fits.
    """
    wakes = [SpanTotal("wake/reserve", 1, 10**8)]
    summary = step(7, read("actor_rank0", *TRAINER, optimizer=30), spans=wakes)
    assert summary.hand_off is not None
    assert summary.hand_off.overlap is not None
    assert summary.hand_off.overlap.size_bytes == 26 * GB
    assert summary.hand_off.overlap.most_ns == 850 * MS
    numbers = {name.rpartition("device/")[2]: value for name, value in values_of(summary).items()}
    assert numbers["actor/stage_of_actor_rank0/peak_bytes"] == 45 * GB
    assert numbers["least_free_bytes"] == 4 * GB
    assert hand_off_sentence([step(6), summary]) == (
        "least free 4 GB of 80 GB in step 7, in stage_of_actor_rank0: actor_rank0 45 GB (optimizer "
        "30 GB), others 31 GB; actor_rank0 and others held 26 GB twice, for 0 s to 850 ms: offload "
        "the optimizer of actor_rank0 before stage_of_actor_rank0, or lower gpu_memory_utilization "
        "by 0.33, and 30 GB are free"
    )


def test_of_an_engine_that_did_not_wake_up_nothing_is_said() -> None:
    sentence = hand_off_sentence([step(7, read("actor_rank0", *TRAINER))])
    assert "gpu_memory_utilization" not in sentence
    assert ": release them in actor_rank0 before " in sentence


def test_what_others_held_is_unknown_if_a_process_changed_meanwhile() -> None:
    """The reference was read before and after, with two numbers: it may be either."""
    reference = read("ref_rank0", (100, BEGIN, 30, 10), (930, END, 30, 30))
    summary = step(7, read("actor_rank0", *TRAINER), reference)
    assert summary.hand_off is not None
    assert summary.hand_off.unread == ["ref_rank0"]
    assert summary.hand_off.holders == [DeviceHolder("actor_rank0", 45 * GB)]
    assert "others" not in hand_off_sentence([summary])
    steady = read("ref_rank0", (100, BEGIN, 30, 10), (930, END, 30, 10))
    summary = step(7, read("actor_rank0", *TRAINER), steady)
    assert summary.hand_off is not None
    held = {holder.lane: holder.held_bytes // GB for holder in summary.hand_off.holders}
    assert held == {"actor_rank0": 45, "ref_rank0": 10, "": 21}


def test_a_worker_in_the_loops_process_holds_its_memory_once() -> None:
    worker = read("actor_rank0", *TRAINER, pid=7)
    loop = read("controller", (400, END, 18, 45), pid=7)
    summary = StepSummary(step=1, begin_ns=0, end_ns=10**9, workers=[worker], loop=[loop])
    add_device_memory(summary)
    assert summary.hand_off is not None
    held = {holder.lane: holder.held_bytes // GB for holder in summary.hand_off.holders}
    assert held == {"actor_rank0": 45, "": 31}


def test_a_step_without_devices_has_no_table() -> None:
    summary = step(1, RankUse(lane="actor_rank0", role="actor"))
    assert (hand_off_sentence([summary]), device_table([summary]).row_count) == ("", 0)


def test_growth_is_shown_by_stage() -> None:
    steps = [step(n, read("actor_rank0", (0, BEGIN, 9, 5), (9, END, 9, 5 + n))) for n in (1, 3, 5)]
    [*cells] = [column._cells[0].plain for column in device_table(steps).columns]  # type: ignore[union-attr]
    assert cells == ["actor", "stage_of_actor_rank0", "5 GB", "10 GB", "10 GB", "+1 GB"]


class Worker:
    """Holds its modules as verl's does: in an engine in an actor."""

    def __init__(self) -> None:
        module = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        module[1].weight = module[0].weight  # tied
        optimizer = torch.optim.Adam(module.parameters())
        self.actor = SimpleNamespace(engine=Engine(module, optimizer))
        self.chunks = [nn.Linear(10, 10, bias=False)]


class Engine:
    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.module, self.optimizer = module, optimizer

    def train(self) -> None:
        self.module(torch.ones(1, 100)).sum().backward()
        self.optimizer.step()


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_the_parts_of_a_workers_memory(is_offloaded: bool) -> None:
    """Each storage once, on this kind of device: here the CPU, and ``meta`` instead of the host."""
    worker = Worker()
    engine = worker.actor.engine
    weights = 4 * (100 * 100 + 2 * 100)
    chunk = 4 * 100
    owners: list[Callable[[], object]] = [weakref.ref(worker), lambda: None]
    assert parts_of(owners, "cpu") == {
        "optimizer": 0,
        "gradients": 0,
        "parameters": weights + chunk,
    }
    engine.train()
    if is_offloaded:
        for state in engine.optimizer.state.values():
            state["exp_avg"] = state["exp_avg"].to("meta")
    moments = weights * (1 if is_offloaded else 2) + 4 * 3  # a step counter for each tensor
    assert parts_of(owners, "cpu") == {
        "optimizer": moments,
        "gradients": weights,
        "parameters": weights + chunk,
    }
    assert not any(parts_of(owners, "cuda").values())
