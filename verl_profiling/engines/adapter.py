"""The interface of an engine adapter, which third parties may implement.

All code for the API and versions of one engine is in its adapter.

On an Ascend NPU, the processes of an engine record with torch_npu, which writes a folder per rank.
The engine sets most options of torch_npu; docs/engines.md lists the options that remain.
"""

from __future__ import annotations

import dataclasses
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn
from uuid import uuid4

import msgspec

from verl_profiling.capture.protocol import CaptureStart, cannot_be_had
from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig, RolloutOptions
from verl_profiling.settings.roles import RoleConfig
from verl_profiling.tools import TOOLS, Tool
from verl_profiling.tools.base import remove_folder

SPOOL_PARENT = ".engines"

OptionValues = Mapping[str, tuple[object, ...]]
"""Allowed values of restricted options; messages suggest the last value."""


class ReplayedEngine(NamedTuple):
    """An engine to which ``replay`` sends requests.

    Attributes:
        engine: The engine, which ``shutdown()`` ends.
        generate: Serves a request, given its id, its prompt, and the exact number of new tokens.
        reset: Empties the prefix cache, as an update of the weights does.
        vocabulary: Number of token ids of the model.
        config: The model's configuration, as Hugging Face writes it.
        tokenizer: The model's tokenizer of transformers; ``None`` without one.
    """

    engine: Any
    generate: Callable[[str, list[int], int], Awaitable[None]]
    reset: Callable[[], Awaitable[Any]]
    vocabulary: int
    config: Mapping[str, Any]
    tokenizer: Any


class EngineAdapter(ABC):
    """Starts and stops the profiler of an engine that records in processes of its own.

    The class methods are also used before an engine is started, and for engines that compute in
    this process. These are recorded by the session, so their adapter has no instances.

    Args:
        engine: The engine, e.g. vLLM's ``AsyncLLM``.
        config: All settings.
        identity: Role, rank and host of the replica.
        tool: The tool that records the engine.

    Attributes:
        name: Name of the engine.
        window_options: Settings of ``rollout`` that only some engines have.
        profilers: The profilers of the engine by ``Tool.engine_profiler``, each with the allowed
            values of restricted options, e.g. ``{"torch": {"memory": (False,)}}``.
        identity: Role, rank and host of the replica.
        tool: The tool that records the engine.
        window: The part of a rollout to record (``rollout.start``, ``rollout.count``).
        spool: Folder into which the engine writes its traces of all steps.
        ranks: Number of ranks that write a trace.
        data_ranks: Number of groups of them that have requests and weights of their own.
        number_bytes: Bytes of a loaded weight; 0 if they are quantized, ``None`` if unknown.
        parts: Names of the parts of a rank's recording, each with a trace of its own.
        device: Device type of the engine in torch, e.g. ``cuda``.
        device_numbers: Visible device number of each rank from rank 0 on; empty if unknown.
    """

    name: ClassVar[str]
    profilers: ClassVar[Mapping[str, OptionValues]] = {}
    window_options: ClassVar[Sequence[str]] = ()
    identity: WorkerIdentity
    tool: Tool
    window: RolloutOptions
    spool: Path
    ranks: int = 1
    data_ranks: int = 1
    number_bytes: int | None = None
    parts: Sequence[str] = ("",)
    device: str = "cuda"
    device_numbers: Sequence[int] = ()

    def __init__(
        self, engine: Any, config: ProfilingConfig, identity: WorkerIdentity, tool: Tool
    ) -> None:
        self.identity = identity
        self.tool = tool
        self.window = config.rollout
        self.spool = new_spool(config.local_folder)
        self.on_npu = tool.engine_profiler == "npu"

    @classmethod
    def accepts(cls, engine: Any) -> bool:
        """Return whether an object of no class of the engine's package stands for an engine.

        An example is the URL of a server.
        """
        return False

    @classmethod
    def node_rank(cls, engine: Any) -> int:
        """Return the index of this node in a replica that spans several nodes."""
        return 0

    @classmethod
    def computes_here(cls, engine: Any) -> bool:
        """Return whether an engine computes in this process, and so is recorded by the session."""
        return False

    @classmethod
    def watch(cls, engine: Any, log: RequestLog, identity: WorkerIdentity) -> None:
        """Log the requests of an engine by wrapping its methods.

        Raises:
            CaptureStateError: The engine lacks the object that takes its requests.
        """

    @classmethod
    def engine_args(cls, config: ProfilingConfig, role: str) -> dict[str, Any]:
        """Return the arguments of the engine's constructor that allow captures.

        Raises:
            ConfigError: The installed engine does not support one of the options.
            ToolUnavailableError: The engine is not installed.
        """
        return {}

    @classmethod
    def for_replay(cls, options: Mapping[str, Any], recorded: Mapping[str, Any]) -> ReplayedEngine:
        """Return a new engine for a replay.

        Args:
            options: Options of the engine, as users wrote them.
            recorded: Its :meth:`engine_args`.

        Raises:
            ConfigError: The engine has no such option, or cannot be replayed on.
            ToolUnavailableError: The engine is not installed.
        """
        raise ConfigError("--engine", f"{cls.name} serves no replay; use vllm or sglang")

    @classmethod
    def check(
        cls, tool: Tool, window: RolloutOptions, role: str, arguments: Mapping[str, Any]
    ) -> None:
        """Refuse settings that no version of the engine supports, before an engine is started.

        Args:
            tool: The tool that records the engine.
            window: The part of a rollout to record.
            role: Role of the server.
            arguments: Arguments of the engine's constructor, as far as they are known.

        Raises:
            ConfigError: The engine does not support the settings.
        """
        for name in ("profile_by_stage", "merge_profiles"):
            if getattr(window, name) and name not in cls.window_options:
                raise ConfigError(f"rollout.{name}", f"{cls.name} does not have it; leave it out")
        if tool.starts_process and window.start:
            raise ConfigError(
                "rollout.start",
                f"{tool.name} expects a range of each rollout, and a short one would have none; "
                "set it to 0",
            )

    @classmethod
    def tool_of(cls, role: RoleConfig) -> Tool | None:
        """Return the tool that records the processes of an engine, or ``None``.

        Args:
            role: Settings of the server's role.

        Raises:
            ConfigError: The engine does not support the tool or one of its options, or there are
                two tools.
        """
        writing = [tool for tool in role.tools if tool.suffix]
        if not writing:
            return None
        tool = writing[0]
        if len(writing) > 1 or tool.engine_profiler not in cls.profilers:
            names = " and ".join(tool.name for tool in writing) + " at once" * (len(writing) > 1)
            raise ConfigError(
                f"roles.{role.role}.tool",
                f"{cls.name} engines do not record with {names}; set the tool to "
                f"{', '.join(cls.profilers)} or spans",
            )
        restricted = {"mini_batches": (None,), **cls.profilers[tool.engine_profiler]}
        for option, values in restricted.items():
            cls._check_option(tool, option, values, role.role)
        return tool

    @classmethod
    def _check_option(cls, tool: Tool, option: str, values: tuple[object, ...], role: str) -> None:
        value = getattr(tool.options, option, values[-1])
        if (sorted(value) if isinstance(value, tuple) else value) in values:
            return
        why = f"{cls.name} sets this option itself"
        if option == "mini_batches" or value is True:
            why = f"{cls.name} does not record {option}"
        if tool.engine_profiler == "npu":
            why += " on an NPU"
        neutral = msgspec.json.encode(values[-1]).decode().replace('"', "")
        refuse_option(tool, role, option, neutral, why)

    @classmethod
    def check_device(cls, tool: Tool, device: str, role: str) -> None:
        """Check that a tool can record on the device of an engine: ``npu`` on an NPU, the others
        elsewhere.

        Raises:
            ConfigError: The tool cannot record there.
        """
        if (device == "npu") != (tool.engine_profiler == "npu"):
            right = "npu" if device == "npu" else "torch"
            raise ConfigError(
                f"roles.{role}.tool",
                f"{tool.name} records nothing of {cls.name} on {device}; set tool {right}",
            )

    @abstractmethod
    async def start(self) -> None:
        """Start the profiler of the engine, now or at the iteration ``rollout.start``.

        Raises:
            Exception: The exception of the engine, e.g. because its profiler is on already. The
                engine may record all the same, or begin to later.
        """

    @abstractmethod
    async def stop(self) -> str | None:
        """Stop the profiler of the engine, and return once the traces are written.

        The call is also valid if the profiler has stopped by itself (``rollout.count``), or never
        started.

        Returns:
            ``None``; or why a trace may be missing, if the engine's answer does not tell.
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
        ``None`` if it is not a trace.
        """

    def part_of(self, path: Path) -> str | None:
        """Return the part of a recording that a trace has; ``None`` if its name does not tell."""
        return ""

    def merged_in(self, paths: Iterable[Path]) -> Path | None:
        """Return the file among the paths that has all ranks, if the engine wrote such a file."""
        return None

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


def check_options(arguments: type, options: Iterable[str], engine: str) -> None:
    """Check options of an engine for a replay.

    Raises:
        ConfigError: The engine has no such option.
    """
    names = {field.name for field in dataclasses.fields(arguments)}
    for name in options:
        if name not in names:
            raise ConfigError(f"--set {name}", f"{engine} has no such option")


def how_processes_ended(codes: Mapping[str, int | None]) -> str:
    """Return how processes ended, from their exit codes: ``EngineCore ended with SIGKILL``."""
    ends = []
    for name, code in codes.items():
        if code is not None:
            how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            ends.append(f"{name} ended with {how}")
    return ", ".join(ends)


def new_spool(folder: Path) -> Path:
    """Return a folder for the raw traces of one engine, on the file system of the step folders."""
    return folder / SPOOL_PARENT / uuid4().hex[:12]


def refusal(config: ProfilingConfig, role: str, request: CaptureStart, engine: str) -> str:
    """Return why an engine cannot make a capture with the tool that it was started with;
    empty if it can. It can always log its requests alone.
    """
    try:
        own, new = (config.for_role(role, selection) for selection in (None, request.selection))
    except ConfigError as error:
        return cannot_be_had(request, error)
    tools, others = (
        [(tool.name, tool.options) for tool in it.tools if tool.suffix] for it in (own, new)
    )
    if not new.enable or others in ([], tools):
        return ""
    names = ", ".join(name for name, _ in tools)
    how = f"to record with {names} alone" if names else "to write no trace"
    return cannot_be_had(request, f"roles.{role}.tool: {engine} was started {how}")


def refuse_option(tool: Tool, role: str, option: str, neutral: str, why: str) -> NoReturn:
    """Refuse a tool's option that an engine does not support.

    Raises:
        ConfigError: Always, with the key of the option and a value that the engine supports.
    """
    name = tool.name
    if name not in TOOLS:  # settings name it by its class
        name = f"{type(tool).__module__}:{type(tool).__qualname__}"
    key = f"tools.{name}.{option}"
    raise ConfigError(key, f"{why}; set roles.{role}.{key}={neutral}")


def at_least(package: str, oldest: str, missing: bool = False) -> bool:
    """Return whether a package has version ``oldest`` or later; ``missing`` if not installed."""
    installed = installed_version(package)
    return version_numbers(installed) >= version_numbers(oldest) if installed else missing


def installed_version(package: str) -> str:
    """Return the version of an installed package; empty if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the first three numbers of a version."""
    return tuple(map(int, re.findall(r"\d+", version)[:3]))
