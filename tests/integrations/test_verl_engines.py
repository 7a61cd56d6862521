"""What verl's plugin changes in the processes in which vLLM computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from verl_profiling.engines.adapter import new_spool
from verl_profiling.integrations.verl.servers import hook_vllm_profiler


class Wrapper:
    """What the hook relies on of vLLM's class."""

    def __init__(self, profiler_config: Any, worker_name: str, *, local_rank: int = 0) -> None:
        self.profiler_config = profiler_config
        self.seen = (worker_name, local_rank)
        self.dump_cpu_time_total = True


@pytest.mark.parametrize("ours", [True, False])
def test_only_an_engine_that_is_captured_here_computes_no_table(tmp_path: Path, ours: bool) -> None:
    """One that somebody else profiles keeps it, and whatever else it was made with."""
    wrapper = type("TorchProfilerWrapper", (Wrapper,), {})
    hook_vllm_profiler(SimpleNamespace(TorchProfilerWrapper=wrapper))
    folder = new_spool(tmp_path) if ours else tmp_path / "traces"
    made = wrapper(SimpleNamespace(torch_profiler_dir=str(folder)), "worker", local_rank=3)
    assert made.dump_cpu_time_total is not ours
    assert made.seen == ("worker", 3)
    assert made.profiler_config.torch_profiler_dir == str(folder)


def test_another_vllm_runs_as_it_is() -> None:
    """A vLLM that has no such class is imported all the same."""
    module = ModuleType("vllm.profiler.wrapper")
    hook_vllm_profiler(module)
    assert not hasattr(module, "TorchProfilerWrapper")


PROGRAM = """
import sys, torch
import verl_profiling.integrations.verl
from vllm.config import ProfilerConfig
from vllm.profiler.wrapper import TorchProfilerWrapper

class Averages:
    def table(self, **_):
        tables.append(1)

torch.profiler.profile.key_averages = lambda self, **_: Averages()
settings = {"torch_profiler_use_gzip": False, "torch_profiler_dump_cuda_time_total": False}
for folder in sys.argv[1:]:
    tables = []
    config = ProfilerConfig(profiler="torch", torch_profiler_dir=folder, **settings)
    profiler = TorchProfilerWrapper(config, worker_name="w", local_rank=0, activities=["CPU"])
    profiler.start()
    torch.ones(2) + 1
    profiler.stop()
    print("tables:", len(tables))
"""


@pytest.mark.verl
def test_the_real_profiler_computes_none(tmp_path: Path) -> None:
    """The trace is written all the same."""
    folders = [new_spool(tmp_path), tmp_path / "others"]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, folders)], capture_output=True, text=True, check=False
    )
    said = [line for line in run.stdout.splitlines() if line.startswith("tables:")]
    assert said == ["tables: 0", "tables: 1"], run.stderr[-2000:]
    assert all(list(folder.glob("*.pt.trace.json")) for folder in folders)
