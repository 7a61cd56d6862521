"""Reports on a user's accelerator as JSON: versions, device, test results,
and the cost of a capture.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

import verl_profiling
from verl_profiling.commands.doctor import examine_machine
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.testing import record_step
from verl_profiling.tools.base import imported

_ROUNDS = 5
_PRODUCTS = 2_000


def device_report(junit: Path | None = None) -> dict[str, Any]:
    """Look at the machine and its device, and measure what a capture costs."""
    tests = None if junit is None else read_tests(junit)
    device = _device()
    return {
        "format": 1,
        "verl_profiling": verl_profiling.__version__,
        "machine": examine_machine(),
        "device": device,
        "tests": tests,
        "costs": {"stop_ms": _stop_ms(device["kind"] if device else "cpu")},
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
        kind, backend, runtime = (
            "cuda",
            torch.cuda,
            torch.version.cuda or f"ROCm {torch.version.hip}",
        )
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


def _stop_ms(kind: str) -> float | None:
    """Return the median pause at the stop of a small capture; none without torch."""
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    square = torch.ones(256, 256, device=kind)
    config = {"enable": True, "tool": "npu" if kind == "npu" else "torch"}
    took = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(_ROUNDS):
            with record_step(config, Path(folder, str(number))) as recorded:
                for _ in range(_PRODUCTS):
                    square @ square
                getattr(torch, kind).synchronize()
            result = recorded.result
            if result is None or result.status != "ok":
                raise ToolUnavailableError(f"the small capture failed: {result and result.reason}")
            took.append(result.cost_s("stop") * 1e3)
    return statistics.median(took)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit 1 without a device, or where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.device_report", description=__doc__)
    parser.add_argument(
        "--junit", type=Path, metavar="FILE", help="the JUnit report of the device's tests"
    )
    report = device_report(parser.parse_args(argv).junit)
    print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    return int(report["device"] is None or bool(report["tests"] and report["tests"]["failed"]))


if __name__ == "__main__":
    sys.exit(main())
