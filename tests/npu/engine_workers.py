"""Processes of an engine on an NPU: they compute on the CPU,
and record with the engine's own code.
"""

from __future__ import annotations

import ast
import importlib.util
import multiprocessing
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch


def compute() -> None:
    """Do something that a profiler sees: one product of matrices."""
    square = torch.ones(32, 32)
    torch.matmul(square, square)


class Processes:
    """Two or more processes, one for each rank, that do the same things at the same time."""

    def __init__(self, make: Callable[[int], Any], ranks: int, *, daemon: bool) -> None:
        context = multiprocessing.get_context("fork")  # torch and torch_npu are imported once
        self._pipes = []
        self._processes = []
        for rank in range(ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(make, rank, theirs), daemon=daemon)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of each worker; return what they returned."""
        for pipe in self._pipes:
            pipe.send((method, arguments))
        replies = [pipe.recv() for pipe in self._pipes]
        if errors := [reply for reply in replies if isinstance(reply, Exception)]:
            raise errors[0]
        return replies

    def end(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)  # closing it is no end: processes that were forked later have it, too
        for process in self._processes:
            process.join()


def _serve(make: Callable[[int], Any], rank: int, pipe: Any) -> None:
    worker = make(rank)
    while (call := pipe.recv()) is not None:
        method, arguments = call
        try:
            pipe.send(getattr(worker, method)(*arguments))
        except Exception as error:
            pipe.send(error)


class VllmWorker:
    def __init__(self, profiler_config: Any, rank: int) -> None:
        self.rank = rank
        self.profiler_config = profiler_config
        self.profiler: Any = None
        self.profile = _method_of_vllm_ascend("NPUWorker", "profile").__get__(self)

    def execute_model(self) -> None:
        if self.profiler is not None:
            self.profiler.step()
        compute()


def _method_of_vllm_ascend(class_name: str, method: str) -> Any:
    """Return a method of vllm-ascend's worker, whose module imports more than there is."""
    from vllm_ascend.profiler.torch_npu_profiler import TorchNPUProfilerWrapper

    spec = importlib.util.find_spec("vllm_ascend")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / "worker" / "worker.py"
    tree = ast.parse(path.read_text())
    (found,) = (
        node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name
    )
    body = [
        node for node in found.body if isinstance(node, ast.FunctionDef) and node.name == method
    ]
    names: dict[str, Any] = {
        "TorchNPUProfilerWrapper": TorchNPUProfilerWrapper,
        "logger": _Silent(),
    }
    exec(compile(ast.Module(body, []), str(path), "exec"), names)  # type: ignore[arg-type]
    return names[method]


class _Silent:
    def debug(self, *arguments: Any) -> None:
        """Log nothing."""

    warning = debug


def make_scheduler(store: Path, ranks: int, rank: int) -> Any:
    """Return what SGLang's scheduler is to its profiler."""
    import torch_npu

    # The public name that SGLang knows; newer versions of torch_npu keep the function elsewhere.
    if not hasattr(torch_npu, "_apply_patches"):
        torch_npu._apply_patches = sys.modules[
            "torch_npu._init.patches.monkey_patches"
        ]._apply_patches
    from sglang.srt.managers.scheduler_profiler_mixin import SchedulerProfilerMixin
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=ranks
    )

    class Scheduler(SchedulerProfilerMixin):
        def __init__(self) -> None:
            self.tp_rank = rank
            self.dp_tp_cpu_group = None
            self.forward_ct = 0
            self.init_profiler()

        def run_batch(self) -> None:
            self.forward_ct += 1
            self._profile_batch_predicate(SimpleNamespace(forward_mode=ForwardMode.DECODE))
            compute()

    return Scheduler()
