"""The interface of an engine adapter: all code for the API and versions of one engine is in its
adapter.

On an Ascend NPU, the processes of an engine record with torch_npu, which writes a folder per rank.
The engine sets most options of torch_npu; docs/engines.md lists the options that remain.
"""

from __future__ import annotations

import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import ClassVar, NoReturn
from uuid import uuid4

import msgspec

from verl_profiling.capture.protocol import CaptureRequest, cannot_be_had
from verl_profiling.errors import ConfigError
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.settings.rollout import RolloutOptions
from verl_profiling.tools.base import remove_folder
from verl_profiling.tools.npu import NpuTool
from verl_profiling.tools.nsys import NsysTool
from verl_profiling.tools.torch_profiler import TorchTool

SPOOL_PARENT = ".engines"

EngineTool = TorchTool | NpuTool | NsysTool
"""The tools that can record in an engine's own processes."""

ENGINE_OPTIONS: dict[tuple[str, str], dict[str, tuple[object, ...]]] = {
    ("vLLM", "npu"): {
        "activities": (["cpu", "npu"],),
        "level": ("level1",),
        "aic_metrics": ("PipeUtilization", None),
        "stack": (False,),
        "shapes": (False,),
    },
    ("SGLang", "npu"): {
        "level": ("level1",),
        "aic_metrics": ("PipeUtilization", None),
        "memory": (False,),
        "modules": (False,),
    },
    ("SGLang", "torch"): {"memory": (False,)},
}
"""Allowed values of restricted options by engine and tool; messages suggest the last value."""

_INFO = re.compile(r"profiler_info_(\d+)\.json")


class EngineAdapter(ABC):
    """Starts and stops the profiler of an engine that records in processes of its own.

    Attributes:
        name: Name of the engine.
        window: The part of a rollout to record.
        spool: Folder into which the engine writes its traces of all steps.
        ranks: Number of ranks that write a trace.
        device: Device type of the engine in torch, e.g. ``cuda``.
        device_numbers: Visible device number of each rank from rank 0 on; empty if unknown.
    """

    name: ClassVar[str]
    window: RolloutOptions
    spool: Path
    ranks: int
    device: str
    device_numbers: Sequence[int] = ()

    @abstractmethod
    async def start(self) -> None:
        """Open the recording window.

        Raises:
            Exception: The exception of the engine, e.g. because its profiler is on already. The
                engine may record all the same, or begin to later.
        """

    @abstractmethod
    async def stop(self) -> str | None:
        """Close the window, and return once the traces are written.

        The call is also valid if the engine has closed the window by itself, or never opened it.

        Returns:
            Reason for a missing trace, if the answer leaves open why there may be none.
        """

    async def settle(self) -> None:
        """Make sure that the engine does not record, after a start or stop with an unknown outcome.

        Raises:
            Exception: The exception of the engine; it may still record.
        """
        await self.stop()

    @abstractmethod
    def identify(self, path: Path) -> int | None:
        """Return the rank in the replica that wrote a file or folder of the spool;
        ``None`` for no trace.
        """

    def remove_spool(self) -> None:
        """Remove the spool with all its files,
        unless it is a user's folder (see :func:`new_spool`).
        """
        if self.spool.parent.name == SPOOL_PARENT:
            remove_folder(self.spool)

    def died(self) -> str:
        """Return how the engine's processes ended, if this process can detect that;
        empty while they live.
        """
        return ""


def how_processes_ended(codes: Mapping[str, int]) -> str:
    """Return how processes ended, from their exit codes: ``EngineCore ended with SIGKILL``."""
    return ", ".join(f"{name} ended with {_code(code)}" for name, code in codes.items())


def _code(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"


def new_spool(folder: Path) -> Path:
    """Return a folder for the raw traces of one engine, on the file system of the step folders."""
    return folder / SPOOL_PARENT / uuid4().hex[:12]


def engine_tool(role: RoleConfig, engine: str) -> EngineTool | None:
    """Return the tool that records an engine's processes, or ``None``.

    Args:
        role: Settings of the server's role.
        engine: Name of the engine.

    Raises:
        ConfigError: The engine does not support the tool or one of its options, or there are two
            tools.
    """
    writing = [tool for tool in role.tools if tool.suffix]
    if not writing:
        return None
    tool, lacks_it = writing[0], engine != "vLLM" and isinstance(writing[0], NsysTool)
    if len(writing) > 1 or lacks_it or not isinstance(tool, TorchTool | NpuTool | NsysTool):
        names = " and ".join(tool.name for tool in writing) + " at once" * (len(writing) > 1)
        raise ConfigError(
            f"roles.{role.role}.tool",
            f"{engine} engines do not record with {names}; set the tool to torch, npu (on "
            "an NPU) or spans",
        )
    where = " on an NPU" if isinstance(tool, NpuTool) else ""
    for name, possible in {
        "mini_batches": (None,),
        **ENGINE_OPTIONS.get((engine, tool.name), {}),
    }.items():
        value = getattr(tool.options, name, None)
        if (sorted(value) if isinstance(value, tuple) else value) in possible:
            continue
        lacks = name == "mini_batches" or value is True
        why = f"{engine} does not record {name}" if lacks else f"{engine} sets this option itself"
        neutral = msgspec.json.encode(possible[-1]).decode().replace('"', "")
        refuse_option(role.role, name, neutral, why + where, tool=tool.name)
    return tool


def refusal(config: ProfilingConfig, role: str, request: CaptureRequest, engine: str) -> str:
    """Return why an engine cannot make a capture with the tool that it was started with;
    empty if it can.
    """
    try:
        own, new = (config.for_role(role, selection) for selection in (None, request.selection))
    except ConfigError as error:
        return cannot_be_had(request, error)
    tools, others = (
        [(tool.name, tool.options) for tool in it.tools if tool.suffix] for it in (own, new)
    )
    if not new.enable or tools == others:
        return ""
    names = ", ".join(name for name, _ in tools)
    how = f"to record with {names} alone" if names else "to write no trace"
    return cannot_be_had(request, f"roles.{role}.tool: {engine} was started {how}")


def check_device(tool: EngineTool, engine: str, device: str, role: str) -> None:
    """Check that a tool can record on the device of an engine: ``npu`` on an NPU, the others
    elsewhere.

    Raises:
        ConfigError: The tool cannot record there.
    """
    if (device == "npu") != isinstance(tool, NpuTool):
        right = NpuTool.name if device == "npu" else TorchTool.name
        raise ConfigError(
            f"roles.{role}.tool",
            f"{tool.name} records nothing of {engine} on {device}; set tool {right}",
        )


def refuse_option(
    role: str, option: str, neutral: object, why: str, *, tool: str = TorchTool.name
) -> NoReturn:
    """Refuse a tool's option that an engine does not support.

    Raises:
        ConfigError: Always, with the key of the option and a value that the engine supports.
    """
    raise ConfigError(
        f"tools.{tool}.{option}", f"{why}; set roles.{role}.tools.{tool}.{option}={neutral}"
    )


def is_recording(path: Path) -> bool:
    """Return whether a path in an engine's folder is a recording of torch_npu."""
    return path.name.endswith("_ascend_pt") and path.is_dir()


def rank_of_recording(path: Path) -> int:
    """Return the rank in the file names of a torch_npu recording; 0 without a rank."""
    return next(
        (int(found[1]) for file in path.iterdir() if (found := _INFO.fullmatch(file.name))), 0
    )


def at_least(package: str, oldest: str, missing: bool = False) -> bool:
    """Return whether a package has at least some version;
    ``missing`` if the package is not installed.
    """
    try:
        installed = metadata.version(package)
    except metadata.PackageNotFoundError:
        return missing
    numbers, wanted = (
        tuple(map(int, re.findall(r"\d+", text)[:3])) for text in (installed, oldest)
    )
    return numbers >= wanted
