"""What an engine adapter is: the only place that knows an engine's API and its versions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, NoReturn
from uuid import uuid4

from verl_profiling.engines.request_log import RequestLog
from verl_profiling.errors import ConfigError
from verl_profiling.settings.config import RoleConfig
from verl_profiling.settings.rollout import EngineStage, RolloutOptions
from verl_profiling.tools.nsys import NsysTool
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool

__all__ = [
    "EngineAdapter",
    "EngineTrace",
    "new_spool",
    "records_with_nsys",
    "refuse_option",
    "torch_options",
]

SPOOL_PARENT = ".engines"


@dataclass(frozen=True)
class EngineTrace:
    """What a file that an engine wrote is.

    Attributes:
        rank: Rank inside the replica.
        stage: ``prefill`` or ``decode`` when the engine records these apart.
    """

    rank: int
    stage: EngineStage | None = None


class EngineAdapter(ABC):
    """Drives the profiler of an engine that records in processes of its own.

    Attributes:
        name: Name of the engine.
        window: How much of a rollout is recorded.
        spool: Folder into which the engine writes its traces, whatever the step.
        ranks: How many ranks write a trace.
        stages: What is recorded apart; ``(None,)`` for one trace per rank.
    """

    name: ClassVar[str]
    window: RolloutOptions
    spool: Path
    ranks: int
    stages: tuple[EngineStage | None, ...] = (None,)

    @abstractmethod
    async def start(self, label: str) -> None:
        """Open the recording window.

        Args:
            label: Names the capture in file names where the engine allows it.

        Raises:
            CaptureStateError: The engine's profiler is on already.
            Exception: Whatever the engine raised.
        """

    @abstractmethod
    async def stop(self) -> None:
        """Close the window and return when the traces are written.

        Safe after the engine closed it by itself, and when it was never reached.
        """

    @abstractmethod
    def identify(self, path: Path, label: str) -> EngineTrace | None:
        """Return what a new file in the spool folder is, or ``None`` if it is no trace of this capture."""

    def extra_suffix(self, path: Path) -> str:
        """Return what to call a file that is no rank's trace and was asked for; empty for any other."""
        return ""

    @abstractmethod
    def watch(self, log: RequestLog) -> None:
        """Have the engine's requests noted in ``log``."""


def new_spool(save_path: str) -> Path:
    """Return a folder name for one engine's raw traces, on the file system of the step folders."""
    return Path(save_path).absolute() / SPOOL_PARENT / uuid4().hex[:12]


def records_with_nsys(role: RoleConfig) -> bool:
    """Return whether Nsight Systems is to record an engine.

    Raises:
        ConfigError: Another tool is, too.
    """
    writing = {tool.name for tool in role.tools if tool.suffix}
    if not any(isinstance(tool, NsysTool) for tool in role.tools):
        return False
    if others := sorted(writing - {NsysTool.name}):
        raise ConfigError(
            f"roles.{role.role}.tool", f"an engine that nsys records does not record with {others[0]!r}, too"
        )
    return True


def torch_options(role: RoleConfig, engine: str) -> TorchOptions | None:
    """Return the options of the ``torch`` tool, or ``None`` when an engine is to record nothing.

    Raises:
        ConfigError: Another tool is asked of the engine, or an option that engines do not have.
    """
    found: TorchOptions | None = None
    for tool in role.tools:
        if isinstance(tool, TorchTool):
            found = tool.options
        elif tool.suffix:
            raise ConfigError(
                f"roles.{role.role}.tool",
                f"{engine} engines do not record with {tool.name!r}; set it to torch or spans",
            )
    if found is not None and found.mini_batches is not None:
        refuse_option(
            role.role, "mini_batches", "null", f"{engine} engines have no mini-batches (see rollout.count)"
        )
    return found


def refuse_option(role: str, option: str, neutral: object, why: str) -> NoReturn:
    """Refuse an option of the ``torch`` tool that an engine does not have.

    Raises:
        ConfigError: Always; it names the key, and the role's own key that switches it off.
    """
    raise ConfigError(f"tools.torch.{option}", f"{why}; set roles.{role}.tools.torch.{option}={neutral}")
