"""Reports on a user's accelerator: versions, device, test results, and the cost of a capture."""

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
from typing import Any, Literal

import msgspec

import verl_profiling
from verl_profiling import stage
from verl_profiling.commands.doctor import Diagnosis, examine_machine
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.testing import record_step
from verl_profiling.tools.npu import import_torch_npu

__all__ = ["Costs", "Device", "DeviceReport", "Outcomes", "device_report", "main", "read_tests"]

_STAGES = 2_000
_ROUNDS = 5
_PRODUCTS = 2_000


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The accelerators of this machine.

    Attributes:
        kind: The name that torch has for them.
        names: One name per device.
        memory_bytes: Memory of the first one.
        runtime: Version of CUDA, ROCm or torch_npu.
    """

    kind: Literal["cuda", "npu"]
    names: list[str]
    memory_bytes: int
    runtime: str


class Outcomes(msgspec.Struct, frozen=True, kw_only=True):
    """The test results of a JUnit report; ``skipped`` holds the reason of each skipped test."""

    passed: list[str]
    failed: list[str]
    skipped: dict[str, str]


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """What recording costs here: medians.

    Attributes:
        idle_stage_ns: A stage while nothing is recorded.
        recorded_stage_ns: A stage that the tool ``spans`` records.
        stop_ms: The pause at the stop of a small capture with the tool of the device; ``None``
            without torch.
        plain_stop_ms: ``stop`` and export of that profiler by itself, around the same work.
    """

    idle_stage_ns: float
    recorded_stage_ns: float
    stop_ms: float | None = None
    plain_stop_ms: float | None = None


class DeviceReport(msgspec.Struct, frozen=True, kw_only=True):
    """What ``python -m tests.device_report`` prints.

    Attributes:
        format: Version of this form.
        verl_profiling: Version of the package.
        machine: What the doctor says about the machine.
        device: Its accelerators; ``None`` if torch sees none.
        tests: Results of the tests; ``None`` if no report of them was given.
        costs: What recording costs.
    """

    format: int = 1
    verl_profiling: str
    machine: list[Diagnosis]
    device: Device | None
    tests: Outcomes | None
    costs: Costs

    def lines(self) -> list[str]:
        """Return the report as lines of text."""
        lines = [f"{one.subject:<18}  {one.state}" for one in self.machine]
        lines.append(f"{'device':<18}  {_described(self.device)}")
        if self.tests is not None:
            counts = (len(self.tests.passed), len(self.tests.failed), len(self.tests.skipped))
            lines.append("{:<18}  {} passed, {} failed, {} skipped".format("tests", *counts))
            lines += [f"  FAILED  {name}" for name in self.tests.failed]
            lines += [f"  skipped  {name}: {reason}" for name, reason in self.tests.skipped.items()]
        costs = self.costs
        lines.append(
            f"{'stage':<18}  {costs.idle_stage_ns:.0f} ns idle, {costs.recorded_stage_ns:.0f} ns recorded"
        )
        if costs.stop_ms is not None:
            lines.append(
                f"{'pause at stop':<18}  {costs.stop_ms:.1f} ms; the plain profiler, with its export: "
                f"{costs.plain_stop_ms:.1f} ms"
            )
        return lines


def device_report(junit: Path | None = None) -> DeviceReport:
    """Look at the machine and its device, and measure what recording costs.

    Args:
        junit: The JUnit report of a test run on this machine.

    Raises:
        ConfigError: The file is not a JUnit report.
    """
    tests = None if junit is None else read_tests(junit)
    device = _device()
    return DeviceReport(
        verl_profiling=verl_profiling.__version__,
        machine=examine_machine(),
        device=device,
        tests=tests,
        costs=_costs(device.kind if device else "cpu"),
    )


def read_tests(junit: Path) -> Outcomes:
    """Return the results of the tests of a JUnit report.

    Raises:
        ConfigError: The file cannot be read, or is not a JUnit report.
    """
    try:
        cases = list(ET.parse(junit).iter("testcase"))
    except OSError as error:
        raise ConfigError(str(junit), f"cannot be read ({error.strerror})") from error
    except (ET.ParseError, ValueError) as error:
        raise ConfigError(str(junit), f"is not a JUnit report: {error}") from error
    if not cases:
        raise ConfigError(str(junit), "is not a JUnit report: it names no test")
    tests = Outcomes(passed=[], failed=[], skipped={})
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            tests.failed.append(name)
        elif skipped is not None:
            tests.skipped[name] = skipped.get("message", "")
        else:
            tests.passed.append(name)
    return tests


def _described(device: Device | None) -> str:
    if device is None:
        return "none: torch sees no accelerator, so nothing below was measured on one"
    names = ", ".join(device.names)
    return f"{names} ({device.memory_bytes >> 30} GiB), {device.kind} {device.runtime}"


def _device() -> Device | None:
    if importlib.util.find_spec("torch") is None:
        return None
    import torch

    if torch.cuda.is_available():
        runtime = torch.version.cuda or f"ROCm {torch.version.hip}"
        return _described_by(torch.cuda, "cuda", runtime)
    try:
        torch_npu = import_torch_npu()
    except ToolUnavailableError:
        return None
    if not torch_npu.npu.is_available():
        return None
    return _described_by(torch_npu.npu, "npu", torch_npu.__version__)


def _described_by(backend: Any, kind: Literal["cuda", "npu"], runtime: str) -> Device:
    names = [backend.get_device_name(index) for index in range(backend.device_count())]
    memory = backend.get_device_properties(0).total_memory
    return Device(kind=kind, names=names, memory_bytes=memory, runtime=runtime)


def _costs(kind: Literal["cpu", "cuda", "npu"]) -> Costs:
    with tempfile.TemporaryDirectory() as folder:
        idle = statistics.median(_stage_ns() for _ in range(_ROUNDS))
        with record_step({"enable": True, "tool": "spans"}, Path(folder)):
            recorded = statistics.median(_stage_ns() for _ in range(_ROUNDS))
        costs = Costs(idle_stage_ns=idle, recorded_stage_ns=recorded)
        if importlib.util.find_spec("torch") is None:
            return costs
        ours, plain = [], []
        for number in range(_ROUNDS):
            ours.append(_our_stop_ms(kind, Path(folder, str(number))))
            plain.append(_plain_stop_ms(kind, Path(folder, f"plain{number}")))
        return msgspec.structs.replace(
            costs, stop_ms=statistics.median(ours), plain_stop_ms=statistics.median(plain)
        )


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
    profiler = import_torch_npu().profiler
    handler = profiler.tensorboard_trace_handler(str(folder))
    return profiler.profile(on_trace_ready=handler), lambda: None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the report; exit 1 without a device, or where a test failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.device_report", description=__doc__)
    parser.add_argument("--junit", type=Path, metavar="FILE", help="the JUnit report of the device's tests")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    try:
        report = device_report(arguments.junit)
    except ConfigError as error:
        parser.error(str(error))
    if arguments.json:
        print(msgspec.json.format(msgspec.json.encode(report), indent=2).decode())
    else:
        print(*report.lines(), sep="\n")
    return int(report.device is None or bool(report.tests and report.tests.failed))


if __name__ == "__main__":
    sys.exit(main())
