"""Who holds memory that grows, which suspect got no CPU, and what the kernel says of a process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Mapping
from multiprocessing import shared_memory
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from quiet_steps import summary

from verl_profiling.files import cpu_waits, host_use
from verl_profiling.files.host_use import HostReader, MachineUse, ProcessUse, machine_use, unread
from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.suspicion import Suspicion

MIB = 1 << 20
WAITED = (10**8, 4 * 10**8)
"""CPU time of a thread, and its wait for a CPU (ns)."""


def step(number: int, kinds: Mapping[str, int], machine: Mapping[str, int]) -> StepSummary:
    """Return a step of two actors, of which the second has these kinds of memory (bytes)."""
    of_machine = MachineUse(host="node7", limit_bytes=16 << 30, used_bytes=4 << 30, **machine)
    uses = [ProcessUse(at_ns=2 * number), ProcessUse(at_ns=2 * number + 1, **kinds)]
    workers = [
        RankUse(lane=f"actor_rank{rank}", role="actor", rank=rank, host_use=(use, of_machine))
        for rank, use in enumerate(uses)
    ]
    return StepSummary(step=number, begin_ns=0, end_ns=10**9, workers=workers)


@pytest.mark.parametrize(
    ("kind", "holder"),
    [
        ("own", "host memory of actor_rank1"),
        ("shared", "shared memory of actor_rank1"),
        ("children", "child processes of actor_rank1"),
        ("shared_bytes", "shared memory and tmpfs of node7"),
        ("store_bytes", "Ray's object store on node7"),
        ("cache_bytes", ""),
    ],
)
def test_the_holder_of_memory_that_grows_is_named(kind: str, holder: str) -> None:
    """Within twenty steps of 32 MiB, with the steps until the machine is full; what others map of
    it does not hide it; page cache is no leak, nor is memory that comes back or levels off.
    """
    detector = Detector(Anomaly())
    found: list[Suspicion] = []
    for number in range(1, 25):
        grown = 32 * MIB * max(0, number - 5)
        kinds = {"own": 800 * MIB + (number % 9) * 90 * MIB, "pinned": 300 * MIB}
        kinds["pinned"] += int(500 * MIB * (1 - 0.9**number))
        machine: dict[str, int] = {}
        if kind.endswith("_bytes"):
            machine[kind] = grown
            machine["shared_bytes"] = grown * (kind != "cache_bytes")
        else:
            kinds[kind] = 300 * MIB + grown
            machine["shared_bytes"] = grown * (kind == "shared")
        suspicion = detector.observe(step(number, kinds, machine))
        if suspicion is not None:
            found.append(suspicion)
    assert [one.sign for one in found] == ["memory"] * bool(holder)
    for one in found:
        assert f": {holder} has grown by " in one.reason
        assert "; at this pace node7 is full (17.2 GB) in 3" in one.reason
        assert one.suspects == ["actor_rank1"] * ("actor" in holder)


def test_a_suspect_that_got_no_cpu_is_told_from_one_that_computes() -> None:
    """In the reason, with the waits of the others, and why."""
    detector = Detector(Anomaly())
    found = []
    for number in range(1, 10):
        slow = summary(number, slow={"actor_rank3": 1.6})
        for use in slow.workers:
            waits = 0.6 if use.lane == "actor_rank3" else 0.02
            of_process = ProcessUse(at_ns=number, no_cpu=waits, why="its container was throttled")
            slow.workers[slow.workers.index(use)] = replace(
                use, host_use=(of_process, MachineUse(host="node7"))
            )
        found.append(detector.observe(slow))
    [one] = [one for one in found if one is not None]
    assert one.suspects == ["actor_rank3"]
    assert one.reason.endswith(
        "; actor_rank3 was ready to run and got no CPU for 60% of the time (others: up to 2%): "
        "its container was throttled"
    )


@pytest.mark.parametrize("waits", [0.02, 0.9])
def test_without_a_suspect_the_process_that_got_least_cpu_is_said(waits: float) -> None:
    """All were as long in the stage; one of them got no CPU."""
    detector = Detector(Anomaly())
    found = []
    for number in range(1, 30):
        times = {"rollout": 500.0, "update_actor": 300.0 if number < 20 else 900.0}
        slow = summary(number, times)
        for use in slow.workers:
            share = waits if use.lane == "actor_rank2" else 0.01
            of_process = ProcessUse(at_ns=number, no_cpu=share, why="other processes used the CPUs")
            slow.workers[slow.workers.index(use)] = replace(
                use, host_use=(of_process, MachineUse(host="node7"))
            )
        found.append(detector.observe(slow))
    [one] = [one for one in found if one is not None]
    assert one.suspects == []
    sentence = "; actor_rank2 was ready to run and got no CPU for 90% of the time"
    assert (sentence in one.reason) is (waits > 0.5)


@pytest.mark.parametrize(
    ("throttled_s", "why"),
    [(0.1, "other processes used"), (0.4, ""), (0.4 * 64, "its container had used up")],
)
def test_cpus_are_throttled_in_the_whole_container(
    throttled_s: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel adds up all CPUs: 0.4 s may be this thread's wait, or that of 64 others."""
    (tmp_path / "cgroup").mkdir()
    statistics = tmp_path / "cgroup" / "cpu.stat"
    statistics.write_text("throttled_usec 0\n")
    monkeypatch.setattr(cpu_waits, "cgroups", lambda controller: [(tmp_path / "cgroup", True)])
    monkeypatch.setattr(cpu_waits, "_STATISTICS", tmp_path / "no stat")
    monkeypatch.setattr(cpu_waits, "_times_ns", iter([{1: (0, 0)}, {1: WAITED}]).__next__)
    monkeypatch.setattr(cpu_waits.os, "cpu_count", lambda: 64)
    reader = HostReader(tmp_path)
    statistics.write_text(f"throttled_usec {round(throttled_s * 1e6)}\n")
    said = reader.process().why
    assert said.startswith(why)
    assert bool(said) == bool(why)


def test_a_wait_of_a_thread_that_slept_is_no_lack_of_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that adds a thread's sleep to its wait, and a thread that computes beside it."""
    readings = iter([{1: (0, 0), 2: (0, 0)}, {1: (10**6, 10**12), 2: (10**9, 0)}])
    monkeypatch.setattr(cpu_waits, "_times_ns", readings.__next__)
    assert HostReader(tmp_path).process().no_cpu == 0


def hold(size: int, ready: multiprocessing.synchronize.Event) -> None:
    kept = np.ones(size, np.uint8)
    ready.set()
    multiprocessing.Event().wait(60)
    del kept


@pytest.mark.parametrize(
    ("stolen_s", "why"), [(0.4, "other processes used"), (0.4 * 64, "the hypervisor gave")]
)
def test_cpus_are_stolen_from_the_whole_machine(
    stolen_s: float, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel adds up all CPUs: 0.4 s of 64 do not explain the wait of one thread."""
    statistics = tmp_path / "stat"
    statistics.write_text("cpu  0 0 0 0 0 0 0 0 0 0\n")
    monkeypatch.setattr(cpu_waits, "_STATISTICS", statistics)
    monkeypatch.setattr(cpu_waits, "_times_ns", iter([{1: (0, 0)}, {1: WAITED}]).__next__)
    monkeypatch.setattr(cpu_waits, "throttled_ns", lambda: 0)
    monkeypatch.setattr(cpu_waits.os, "cpu_count", lambda: 64)
    reader = HostReader(tmp_path)
    ticks = round(stolen_s * os.sysconf("SC_CLK_TCK"))
    statistics.write_text(f"cpu  0 0 0 0 0 0 0 {ticks} 0 0\n")
    assert reader.process().why.startswith(why)


def test_a_machine_without_free_memory_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_use, "available_bytes", lambda: 0)
    full = machine_use()
    assert full.used_bytes == full.limit_bytes


def test_memory_is_read_by_kind(tmp_path: Path) -> None:
    """Real memory: own, shared, and of a child process, unless that is watched itself."""
    reader = HostReader(tmp_path)
    before, machine = reader.process(), machine_use()
    kept = np.ones(64 * MIB, np.uint8)
    segment = shared_memory.SharedMemory(create=True, size=32 * MIB)
    segment.buf[:] = bytes(32 * MIB)
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=hold, args=(48 * MIB, ready), daemon=True)
    child.start()
    assert ready.wait(30)
    try:
        after = reader.process()
        grown = machine_use().shared_bytes - machine.shared_bytes
        assert 64 * MIB <= after.own - before.own < 128 * MIB
        assert 32 * MIB <= after.shared - before.shared < 40 * MIB
        assert grown == 0 or grown > 16 * MIB  # others use this machine, too
        assert after.children - before.children >= 48 * MIB
        assert after.no_cpu is None or 0 <= after.no_cpu <= 1
        (tmp_path / f"actor_rank0.host.{child.pid}.json").touch()
        assert reader.process().children - before.children < 48 * MIB
    finally:
        child.kill()
        child.join()
        segment.close()
        segment.unlink()
    assert kept.nbytes == 64 * MIB
    assert all(" " in sentence for sentence in unread())
