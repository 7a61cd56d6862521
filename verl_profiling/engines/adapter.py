"""The interface of an engine adapter, the only place that knows an engine's API and its versions.

On an Ascend NPU an engine's processes record with torch_npu, which writes a folder for each rank. The engine
fixes most options of torch_npu; docs/engines.md lists the free ones.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import ClassVar, NamedTuple, NoReturn
from uuid import uuid4

import msgspec

from verl_profiling.capture.messages import CaptureRequest
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.settings.config import ProfilingConfig, RoleConfig
from verl_profiling.settings.rollout import EngineStage, RolloutOptions
from verl_profiling.tools.base import remove_folder
from verl_profiling.tools.npu import NpuTool
from verl_profiling.tools.nsys import NsysTool
from verl_profiling.tools.torch_profiler import TorchTool

SPOOL_PARENT = ".engines"

EngineTool = TorchTool | NpuTool | NsysTool
"""The tools with which an engine's own processes record."""

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
"""Options of a tool that an engine restricts, and the values it allows, the default last."""

_PACKAGE = "vllm-ascend"
_OLDEST = (0, 16)  # names the rank in the folder
_COUNTING = (0, 20)  # counts iterations as vLLM does
_PATCHES = "_apply_patches"
_PATCHING = (0, 5, 23)  # the last SGLang that was read
_INFO = re.compile(r"profiler_info_(\d+)\.json")


class EngineTrace(NamedTuple):
    """The rank and stage of a trace, a file or a folder, that an engine wrote.

    Attributes:
        rank: Rank inside the replica.
        stage: ``prefill`` or ``decode`` if the engine records them in separate traces.
    """

    rank: int
    stage: EngineStage | None = None


class EngineAdapter(ABC):
    """Drives the profiler of an engine that records in processes of its own.

    Attributes:
        name: Name of the engine.
        window: The part of a rollout to record.
        spool: Folder into which the engine writes its traces of all steps.
        ranks: Number of ranks that write a trace.
        stages: Stages with separate traces; ``(None,)`` for one trace per rank.
        device: Its device type in torch, e.g. ``cuda``.
        device_numbers: Visible device number of each rank from rank 0 on; empty if unknown.
    """

    name: ClassVar[str]
    window: RolloutOptions
    spool: Path
    ranks: int
    stages: tuple[EngineStage | None, ...] = (None,)
    device: str
    device_numbers: Sequence[int] = ()

    @abstractmethod
    async def start(self, label: str) -> None:
        """Open the recording window.

        Args:
            label: Name of the capture, used in file names if the engine allows it.

        Raises:
            CaptureStateError: The engine's profiler is on already.
            Exception: Whatever the engine raised.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Close the window, and return once the traces are written.

        Also valid if the engine has closed the window by itself, or never reached it.
        """

    @abstractmethod
    def identify(self, path: Path, label: str) -> EngineTrace | None:
        """Return the rank and stage of a new file or folder in the spool, or ``None`` if it is no trace."""

    def remove_spool(self) -> None:
        """Remove the spool with all its files, if :func:`new_spool` named it."""
        if self.spool.parent.name == SPOOL_PARENT:
            remove_folder(self.spool)

    def died(self) -> str:
        """Return how the engine's processes ended, if this process can detect it; empty while they live."""
        return ""


def how_processes_ended(codes: Mapping[str, int]) -> str:
    """Return how processes ended, from their exit codes: ``EngineCore ended with SIGKILL``."""
    return ", ".join(f"{name} ended with {_code(code)}" for name, code in codes.items())


def _code(code: int) -> str:
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"exit code {code}"


def new_spool(folder: Path) -> Path:
    """Return a folder name for one engine's raw traces, on the file system of the step folders."""
    return folder / SPOOL_PARENT / uuid4().hex[:12]


def engine_tool(role: RoleConfig, engine: str) -> EngineTool | None:
    """Return the tool that records an engine's processes, or ``None``.

    Args:
        role: Settings of the server's role.
        engine: Name of the engine.

    Raises:
        ConfigError: The engine does not support the tool or one of its options, or there are two tools.
    """
    key = f"roles.{role.role}.tool"
    writing = [tool for tool in role.tools if tool.suffix]
    if not writing:
        return None
    tool = writing[0]
    if not isinstance(tool, TorchTool | NpuTool) and not (engine == "vLLM" and isinstance(tool, NsysTool)):
        raise ConfigError(
            key,
            f"{engine} engines do not record with {tool.name!r}; set it to torch, to npu on an NPU, "
            "or to spans",
        )
    if len(writing) > 1:
        raise ConfigError(key, f"{engine} engines record with one tool, not with {writing[1].name!r} too")
    if getattr(tool.options, "mini_batches", None) is not None:
        why = f"{engine} engines have no mini-batches (see rollout.count)"
        refuse_option(role.role, "mini_batches", "null", why, tool=tool.name)
    where = " on an NPU" if isinstance(tool, NpuTool) else ""
    for name, possible in ENGINE_OPTIONS.get((engine, tool.name), {}).items():
        value = getattr(tool.options, name)
        if (sorted(value) if isinstance(value, tuple) else value) in possible:
            continue
        why = f"{engine} does not record {name}" if value is True else f"{engine} chooses it"
        neutral = msgspec.json.encode(possible[-1]).decode().replace('"', "")
        refuse_option(role.role, name, neutral, why + where, tool=tool.name)
    return tool


def role_of_capture(config: ProfilingConfig, role: str, request: CaptureRequest, engine: str) -> RoleConfig:
    """Return the settings of one capture of an engine, whose tool is fixed when the engine starts.

    Raises:
        ConfigError: The selection of the capture has another tool.
    """
    own, aimed = (config.for_role(role, selection) for selection in (None, request.selection))
    tools, wanted = ([(tool.name, tool.options) for tool in one.tools if tool.suffix] for one in (own, aimed))
    if aimed.enable and tools != wanted:
        names = ", ".join(name for name, _ in tools)
        how = f"to record with {names} alone" if names else "to be recorded without a trace"
        raise ConfigError(f"roles.{role}.tool", f"{engine} was started {how}")
    return aimed


def check_device(tool: EngineTool, engine: str, device: str, role: str) -> None:
    """Check that a tool can record on the device of an engine: ``npu`` on an NPU, the others elsewhere.

    Raises:
        ConfigError: The tool cannot.
    """
    if (device == "npu") != isinstance(tool, NpuTool):
        right = NpuTool.name if device == "npu" else TorchTool.name
        raise ConfigError(
            f"roles.{role}.tool", f"{tool.name} records nothing of {engine} on {device}; set it to {right}"
        )


def refuse_option(
    role: str, option: str, neutral: object, why: str, *, tool: str = TorchTool.name
) -> NoReturn:
    """Refuse a tool's option that an engine does not support.

    Raises:
        ConfigError: Always, with the option's key and the role's key that switches the option off.
    """
    raise ConfigError(f"tools.{tool}.{option}", f"{why}; set roles.{role}.tools.{tool}.{option}={neutral}")


def is_recording(path: Path) -> bool:
    """Return whether a path in an engine's folder is a recording of torch_npu."""
    return path.name.endswith("_ascend_pt") and path.is_dir()


def rank_of_recording(path: Path) -> int:
    """Return the rank in the file names of a torch_npu recording; 0 if there is none."""
    return next((int(found[1]) for file in path.iterdir() if (found := _INFO.fullmatch(file.name))), 0)


def check_vllm_ascend() -> None:
    """Check that the vllm-ascend of this machine can be captured.

    Raises:
        ToolUnavailableError: vllm-ascend is missing or too old, or its msMonitor profiler is switched on.
    """
    installed = _installed(_PACKAGE)
    if installed is None:
        raise ToolUnavailableError(
            f"engine_args: vLLM records on an NPU with {_PACKAGE}, which is not installed; "
            f"pip install '{_requirement(_OLDEST)}', or set roles.rollout.tool to torch"
        )
    if installed < _OLDEST:
        raise ToolUnavailableError(
            f"engine_args: {_PACKAGE} {metadata.version(_PACKAGE)} does not name the ranks of its "
            f"recordings; install {_requirement(_OLDEST)}"
        )
    if os.environ.get("MSMONITOR_USE_DAEMON", "0") != "0":
        raise ToolUnavailableError(
            f"engine_args: MSMONITOR_USE_DAEMON is set, with which {_PACKAGE} refuses to profile; unset it"
        )


def check_sglang_reaches_torch_npu() -> None:
    """Check that SGLang can use the profiler of torch_npu.

    Raises:
        ToolUnavailableError: SGLang uses a function that the installed torch_npu does not have. Starting
            its profiler would raise, which ends all its processes.
    """
    torch_npu = sys.modules.get("torch_npu")
    if torch_npu is None or hasattr(torch_npu, _PATCHES):
        return
    installed = _installed("sglang")
    if installed is not None and installed <= _PATCHING:
        raise ToolUnavailableError(
            f"init_capture: SGLang {metadata.version('sglang')} gets at torch_npu's profiler by {_PATCHES}, "
            f"which torch_npu {torch_npu.__version__} does not have; install the torch_npu that this SGLang "
            "names, or set roles.rollout.tool to spans"
        )


def why_not_counted() -> tuple[str, str] | None:
    """Return a vllm-ascend that counts no iterations, and the version to install; ``None`` if it counts."""
    installed = _installed(_PACKAGE)
    if installed is None or installed >= _COUNTING:
        return None
    return f"{_PACKAGE} {metadata.version(_PACKAGE)}", _requirement(_COUNTING)


def _installed(package: str) -> tuple[int, ...] | None:
    try:
        return tuple(map(int, re.findall(r"\d+", metadata.version(package))[:3]))
    except metadata.PackageNotFoundError:
        return None


def _requirement(oldest: tuple[int, int]) -> str:
    return f"{_PACKAGE}>={oldest[0]}.{oldest[1]}"
