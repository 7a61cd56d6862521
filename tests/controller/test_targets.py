"""Targets: one way of calling whatever a loop has for workers."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from conftest import Pool
from example_loops import settings

from verl_profiling import ConfigError, ProfilingCallback
from verl_profiling.controller.calls import Call, wait_for
from verl_profiling.controller.targets import make_targets
from verl_profiling.workers import CaptureMixin


class Local:
    """A worker with an ordinary method and a coroutine."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def start_capture(self, value: Any = None) -> Any:
        """Return what was given, or raise it."""
        self.calls.append(value)
        if isinstance(value, Exception):
            raise value
        return value

    async def later(self, value: Any) -> Any:
        """Return it, a little later."""
        await asyncio.sleep(0.01)
        return value


def outcome(call: Call, waited_s: float = 1.0) -> Any:
    """Wait for a call and return its answer, or why there is none."""
    call.timeout_s = waited_s
    wait_for([call])
    return call.reply() if call.reply() is not None else call.problem()


@pytest.mark.parametrize("workers", [[], (), object(), 3, [Local(), object()]])
def test_what_has_no_capture_methods_is_refused(workers: Any) -> None:
    """The error names the role, and the worker's class."""
    with pytest.raises(ConfigError, match="role 'actor'"):
        make_targets("actor", workers)


def test_ray_actors_are_called_all_at_once(pool: Pool, tmp_path: Path) -> None:
    """The last one is called before the first one answers."""
    config = settings(tool="spans", save_path=str(tmp_path))
    (switch := tmp_path / "work").touch()
    ray.get([actor.set_up.remote(config, switches=tmp_path) for actor in pool.sync])
    targets = make_targets("actor", pool.sync)
    calls = [call for target in targets for call in target.call("work", ["a"])]
    switch.unlink()
    for call in calls:
        call.timeout_s = 120
    wait_for(calls)
    assert [call.problem() for call in calls if not call.returned_ns] == []
    assert max(call.sent_ns for call in calls) < min(call.returned_ns for call in calls)


def test_a_round_waits_no_longer_than_told(pool: Pool, tmp_path: Path) -> None:
    """A late worker is described, not waited for; its answer still comes."""
    switches = tmp_path / "switches"
    switches.mkdir()
    config = settings(tool="spans", save_path=str(tmp_path))
    ray.get(pool.sync[0].set_up.remote(config, switches=switches))
    (switches / "work").touch()
    [target] = make_targets("actor", pool.sync[0])
    [call] = target.call("work", [])
    begin = time.monotonic()
    assert outcome(call, 0.2) == "work did not return within 0.2 s; is the worker hung or busy?"
    assert time.monotonic() - begin < 10
    (switches / "work").unlink()
    outcome(call, 10)
    assert call.future.done()


@pytest.mark.parametrize(("first", "second"), [("my/role", "my role"), ("x" * 80 + "a", "x" * 80 + "b")])
def test_roles_whose_files_would_have_the_same_names_are_refused(first: str, second: str) -> None:
    """When they are added, before one overwrites the other's traces."""
    callback = ProfilingCallback({"enable": True, "tool": "spans"})
    callback.add_workers(first, CaptureMixin())
    with pytest.raises(ConfigError, match="files of the same names"):
        callback.add_workers(second, CaptureMixin())
