"""Reports on a user's accelerator as JSON: versions, device, test results, and the cost of a capture."""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

import verl_profiling
from verl_profiling import stage
from verl_profiling.commands.doctor import examine_machine
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.testing import record_step
from verl_profiling.tools.base import imported

_STAGES = 2_000
_ROUNDS = 5
_PRODUCTS = 2_000


def device_report(junit: Path | None = None) -> dict[str, Any]:
    """Look at the machine and its device, and measure what recording costs."""
    tests = None if junit is None else read_tests(junit)
    device = _device()
    return {
        "format": 1,
        "verl_profiling": verl_profiling.__version__,
        "machine": examine_machine(),
        "device": device,
        "tests": tests,
        "costs": _costs(device["kind"] if device else "cpu"),
    }


def read_tests(junit: Path) -> dict[str, Any]:
    """Return the tests of a JUnit report that passed and failed, and why others were skipped."""
    tests: dict[str, Any] = {"passed": [], "failed": [], "skipped": {}}
    for case in ET.parse(junit).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            tests["failed"].append(name)
        elif skipped is not None:
            tests["skipped"][name] = skipped.get("message", "")
        else:
            tests["passed"].append(name)
    return tests


def _device() -> dict[str, Any] | None:
    """Return kind, names, memory and runtime of this machine's accelerators."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.cuda.is_available():
        kind, backend, runtime = "cuda", torch.cuda, torch.version.cuda or f"ROCm {torch.version.hip}"
    else:
        try:
            torch_npu = imported("torch_npu", "npu")
        except ToolUnavailableError:
            return None
        if not torch_npu.npu.is_available():
            return None
        kind, backend, runtime = "npu", torch_npu.npu, torch_npu.__version__
    return {
        "kind": kind,
        "names": [backend.get_device_name(index) for index in range(backend.device_count())],
        "memory_bytes": backend.get_device_properties(0).total_memory,
        "runtime": runtime,
    }


def _costs(kind: str) -> dict[str, float | None]:
    """Return medians: an idle and a recorded stage, the pause at a stop, and the plain profiler's."""
    with tempfile.TemporaryDirectory() as folder:
        idle = statistics.median(_stage_ns() for _ in range(_ROUNDS))
        with record_step({"enable": True, "tool": "spans"}, Path(folder)):
            recorded = statistics.median(_stage_ns() for _ in range(_ROUNDS))
        ours, plain = [], []
        for number in range(_ROUNDS if importlib.util.find_spec("torch") is not None else 0):
            ours.append(_our_stop_ms(kind, Path(folder, str(number))))
            plain.append(_plain_stop_ms(kind, Path(folder, f"plain{number}")))
    return {
        "idle_stage_ns": idle,
        "recorded_stage_ns": recorded,
        "stop_ms": statistics.median(ours) if ours else None,
        "plain_stop_ms": statistics.median(plain) if plain else None,
    }


def _stage_ns() -> float:
    begin = time.perf_counter_ns()
    for _ in range(_STAGES):
        with stage("update_actor"):
            pass
    return (time.perf_counter_ns() - begin) / _STAGES


def _work(kind: str) -> Callable[[], None]:
    """Return matrix products on the device, waited for."""
    import torch

    square = torch.ones(256, 256, device=kind)
    wait = getattr(torch, kind).synchronize

    def products() -> None:
        for _ in range(_PRODUCTS):
            square @ square
        wait()

    return products


def _our_stop_ms(kind: str, folder: Path) -> float:
    work = _work(kind)
    tool = "npu" if kind == "npu" else "torch"
    with record_step({"enable": True, "tool": tool}, folder) as recorded:
        work()
    result = recorded.result
    if result is None or result.status != "ok":
        raise ToolUnavailableError(f"tool {tool!r}: the small capture failed: {result and result.reason}")
    return result.cost.stop_s * 1e3


def _plain_stop_ms(kind: str, folder: Path) -> float:
    work = _work(kind)
    folder.mkdir()
    profiler, export = _plain_npu(folder) if kind == "npu" else _plain_torch(kind, folder)
    profiler.start()
    work()
    begin = time.perf_counter()
    profiler.stop()
    export()
    return (time.perf_counter() - begin) * 1e3


def _plain_torch(kind: str, folder: Path) -> tuple[Any, Callable[[], object]]:
    from torch.profiler import ProfilerActivity, profile

    activities: Iterable[ProfilerActivity] = [ProfilerActivity.CPU]
    if kind == "cuda":
        activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    profiler = profile(activities=activities)
    return profiler, lambda: profiler.export_chrome_trace(str(folder / "plain.json"))


def _plain_npu(folder: Path) -> tuple[Any, Callable[[], object]]:
    """Return torch_npu's profiler, whose ``stop`` exports by itself."""
    profiler = imported("torch_npu", "npu").profiler
    handler = profiler.tensorboard_trace_handler(str(folder))
    return profiler.profile(on_trace_ready=handler), lambda: None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit 1 without a device, or where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.device_report", description=__doc__)
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the JUnit report of the device's tests")
    report = device_report(parser.parse_args(argv).junit)
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    return int(report["device"] is None or bool(report["tests"] and report["tests"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
