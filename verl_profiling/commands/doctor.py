"""Prints what this machine has (packages, accelerators, engines) and which tools can record on it.

example: verl-profiling doctor
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata

import msgspec

from verl_profiling.commands.common import add_json, show
from verl_profiling.engines import DISTRIBUTIONS
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.device_clocks import unread_clocks
from verl_profiling.files.host_use import cpu_pressure, unread
from verl_profiling.files.machine import injected_cupti, memory_limit
from verl_profiling.settings.roles import load_tool
from verl_profiling.tools import TOOLS
from verl_profiling.units import byte_size


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_json(parser)


def run(arguments: argparse.Namespace) -> bool:
    """Print the diagnosis of the machine; return true, as a missing tool is not a failure."""
    machine = examine_machine()
    show(arguments, {"machine": machine}, map(Diagnosis.line, machine))
    return True


_PACKAGES = ("torch", "ray", "verl", "torch-npu", "megatron-core", "nvtx", "mindstudio-probe")


class Diagnosis(msgspec.Struct, frozen=True):
    """One line of the diagnosis.

    Attributes:
        subject: The examined part, e.g. ``accelerators`` or ``tool nsys``.
        state: The finding.
        problem: Whether the finding keeps a tool from working.
    """

    subject: str
    state: str
    problem: bool = False

    def line(self) -> str:
        """Return the diagnosis as text."""
        return f"{'!' if self.problem else ' '} {self.subject:<18}  {self.state}"


def examine_machine() -> list[Diagnosis]:
    """Return a diagnosis for each part of this machine: packages, accelerators, tools."""
    return [*_system(), *_packages(), *_accelerators(), *_tools()]


def _system() -> Iterator[Diagnosis]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    state = (
        f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {memory} GiB of memory"
    )
    yield Diagnosis("machine", state)
    yield Diagnosis("python", platform.python_version())
    room = f"{byte_size(memory_limit())} for this container"
    pressure = cpu_pressure()
    if pressure:
        room += f"; processes waited for CPUs in {pressure}% of the last 10 s"
    yield Diagnosis("host", "; ".join([room, *unread()]))


def _packages() -> Iterator[Diagnosis]:
    for group, names in (("packages", _PACKAGES), ("engines", DISTRIBUTIONS)):
        installed = []
        for name in names:
            with suppress(metadata.PackageNotFoundError):
                installed.append(f"{name} {metadata.version(name)}")
        yield Diagnosis(group, ", ".join(installed) or "none")
    if not metadata.entry_points(group="vllm.general_plugins", name="verl_profiling"):
        state = "not installed, only on the path: engines mark neither start nor sleep and wake"
        yield Diagnosis("engine plugin", state)


def _accelerators() -> Iterator[Diagnosis]:
    if importlib.util.find_spec("torch") is None:
        yield Diagnosis("accelerators", "unknown: torch is not installed", problem=True)
        return
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Diagnosis("accelerators", ", ".join(names) or "no CUDA or ROCm device")
    yield Diagnosis("device clocks", unread_clocks() or "read by NVML")
    if wrong := injected_cupti():
        yield Diagnosis("CUPTI", wrong, problem=True)


def _tools() -> Iterator[Diagnosis]:
    for name in TOOLS:
        tool_class = load_tool(name)
        state = "available"
        try:
            tool_class(tool_class.options_class()).check_machine()
        except ToolUnavailableError as error:
            state = f"unavailable: {error}"
        yield Diagnosis(f"tool {name}", state)
