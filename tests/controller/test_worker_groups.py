"""Worker groups that bind their methods themselves, and numbers that come after the step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.example_loops import settings
from verl_profiling import ProfilingCallback
from verl_profiling.run_files import read_manifest
from verl_profiling.workers import CaptureMixin


class Group:
    """A group as verl's ``spawn`` makes it: the actors know its methods under a prefixed name only."""

    def __init__(self, worker: CaptureMixin) -> None:
        self.workers = [worker]
        self._worker = worker
        self.start_capture = self._bound("start_capture")
        self.stop_capture = self._bound("stop_capture")

    def execute_all_async(self, method: str, *arguments: Any) -> list[Any]:
        raise AttributeError(f"the actor has no {method}, only actor_{method}")

    def _bound(self, method: str) -> Callable[..., list[Any]]:
        return lambda *arguments: [getattr(self._worker, method)(*arguments)]


def run_step(config: Any, group: Group) -> ProfilingCallback:
    """Run one profiled step."""
    callback = ProfilingCallback(config)
    callback.add_workers("actor", group)
    callback.on_train_begin()
    callback.on_step_begin(1)
    callback.on_step_end({"loss": 1.0})
    return callback


def make_group(config: Any) -> Group:
    """Return a group of one worker."""
    worker = CaptureMixin()
    worker.init_capture(config, role="actor")
    return Group(worker)


def test_methods_that_a_group_binds_are_used(tmp_path: Path) -> None:
    """Colocated workers are called through the group's own methods, whatever the actors call them."""
    config = settings(tool="spans", save_path=str(tmp_path))
    callback = run_step(config, make_group(config))
    assert callback.last_folder is not None
    assert [worker.status for worker in read_manifest(callback.last_folder).workers] == ["ok"]


def test_all_names_of_a_group_are_in_its_result(tmp_path: Path) -> None:
    """A group that was added under two roles is called once, and its result names both."""
    config = settings(tool="spans", save_path=str(tmp_path))
    group = make_group(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", group)
    callback.add_workers("ref", group)
    callback.on_step_begin(1)
    callback.on_step_end()
    assert callback.last_folder is not None
    manifest = read_manifest(callback.last_folder)
    assert [worker.roles for worker in manifest.workers] == [["actor", "ref"]]
    assert [rpc.method for rpc in manifest.rpcs] == ["start_capture", "stop_capture"]
