"""The SGLang adapter: ``Engine``, an object with a ``tokenizer_manager``, or a server's URL.

Its profiler is started with all options of the capture, and writes to the folder given in that call.
What each version offers is read from its own code; docs/engines.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from verl_profiling.engines.ascend import (
    check_sglang_reaches_torch_npu,
    is_recording,
    rank_of_recording,
)
from verl_profiling.engines.base import (
    EngineAdapter,
    EngineTrace,
    FolderTool,
    TraceTool,
    new_spool,
    refuse_option,
)
from verl_profiling.engines.death import how_processes_ended
from verl_profiling.engines.sglang_transport import HTTPCalls, ManagerCalls, SGLangCalls
from verl_profiling.errors import CaptureStateError, ConfigError
from verl_profiling.identity import WorkerIdentity
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.settings.rollout import EngineStage, RolloutOptions

__all__ = ["SGLangAdapter", "check_sglang", "manager_of"]

_ACTIVITIES = {"cpu": "CPU", "cuda": "GPU", "xpu": "XPU", "npu": "GPU"}
_STAGES: dict[str, EngineStage] = {"EXTEND": "prefill", "DECODE": "decode"}
_TRACE = re.compile(
    r"-TP-(?P<tp>\d+)(?:-DP-(?P<dp>\d+))?(?:-PP-(?P<pp>\d+))?(?:-EP-\d+)?"
    r"(?:-(?P<stage>EXTEND|DECODE))?\.trace\.json\.gz$"
)


class SGLangAdapter(EngineAdapter):
    """Drives the profilers of SGLang's schedulers.

    Args:
        engine: An ``Engine``, an object with a ``tokenizer_manager``, or a server's URL.
        config: All settings.
        identity: The replica.
        tool: What records it.

    Raises:
        CaptureStateError: The engine has no tokenizer manager, or the server does not answer.
        ConfigError: The settings ask for something that SGLang does not have, or that would end it.
        ToolUnavailableError: This SGLang is too old.
    """

    name: ClassVar[str] = "SGLang"

    def __init__(
        self,
        engine: Any,
        config: ProfilingConfig,
        identity: WorkerIdentity,
        tool: TraceTool | FolderTool,
    ) -> None:
        self.window = config.rollout.with_stacks() if tool.options.stack else config.rollout
        self._identity = identity
        manager = manager_of(engine, identity)
        self._calls: SGLangCalls = HTTPCalls(engine) if manager is None else ManagerCalls(manager)
        self.spool = new_spool(config.local_folder)
        if self.window.by_stage:
            self.stages = self.window.sglang.stages or ("prefill", "decode")
        server = self._calls.server_args
        self.device = str(server.get("device") or "cuda")
        self._tp, self._pp = int(server.get("tp_size") or 1), int(server.get("pp_size") or 1)
        dp = int(server.get("dp_size") or 1)
        self._dp = 1 if server.get("enable_dp_attention") else dp
        self.ranks = self._tp * self._pp * self._dp
        if manager is not None:  # behind a URL, devices are those of another process's environment
            self.device_numbers = _device_numbers(server, self.ranks)
        self._on_npu = isinstance(tool, FolderTool)
        if self._on_npu:
            check_sglang_reaches_torch_npu()
        self._options = self._start_options(tool, identity.role)

    async def start(self, label: str) -> None:
        options = {**self._options, "output_dir": str(self.spool)}
        if self._takes_label:
            options["profile_prefix"] = label
        try:
            await self._calls.start(options)
        except RuntimeError as error:
            if "already in progress" in str(error):
                raise CaptureStateError(
                    f"start_capture: something else started SGLang's profiler ({self._identity}); "
                    "call the engine's stop_profile() first"
                ) from error
            raise

    async def stop(self) -> None:
        stopped = await self._calls.stop()
        if self.window.by_stage or (self.window.bounded and not stopped):
            await self._disarm()

    def died(self) -> str:
        return how_processes_ended(self._calls.ended())

    def identify(self, path: Path, label: str) -> EngineTrace | None:
        if self._on_npu:
            return EngineTrace(rank_of_recording(path)) if is_recording(path) else None
        found = _TRACE.search(path.name)
        if found is None or (self._takes_label and not path.name.startswith(label)):
            return None
        tp, dp, pp = (int(found[name] or 0) for name in ("tp", "dp", "pp"))
        rank = ((dp if self._dp > 1 else 0) * self._pp + pp) * self._tp + tp
        return EngineTrace(rank, self._stage(path, found["stage"]))

    def extra_suffix(self, path: Path) -> str:
        merged = self.window.sglang.merge and path.name.startswith("merged-")
        return ".sglang-merged.json.gz" if merged else ""

    @property
    def _takes_label(self) -> bool:
        # With a prefix, SGLang's merge finds none of the files to merge.
        # On an NPU it names nothing by it.
        offered = "profile_prefix" in self._calls.offers
        return offered and not self.window.sglang.merge and not self._on_npu

    async def _disarm(self) -> None:
        """Cancel a window that was not reached; it would open later, in another capture or outside any.

        Only stopping a recording clears the window, so an empty one is made and discarded.
        """
        await self._calls.start(
            {
                "output_dir": str(self.spool / "discarded"),
                "activities": ["CPU"],
                "with_stack": False,
                "record_shapes": False,
            }
        )
        await self._calls.stop()

    def _stage(self, path: Path, stage: str | None) -> EngineStage | None:
        """Return a trace's stage. The name of one that the stop cut short does not have it."""
        if not self.window.by_stage:
            return None
        if stage is not None:
            return _STAGES[stage]
        prefill = path.with_name(path.name.replace(".trace.json.gz", "-EXTEND.trace.json.gz"))
        return "decode" if prefill.exists() else "prefill"

    def _start_options(self, tool: TraceTool | FolderTool, role: str) -> dict[str, Any]:
        """Return the options that ``start_profile`` gets in every capture."""
        rollout, options = self.window, tool.options
        check_sglang(tool, rollout, role, device=self.device, dp_ranks=self._dp)
        arguments: dict[str, Any] = {
            "activities": [_ACTIVITIES[name] for name in _activities(tool, self.device)],
            "with_stack": options.stack,
            "record_shapes": options.shapes,
        }
        if rollout.by_stage:
            arguments["profile_by_stage"] = True
            arguments["num_steps"] = rollout.count
            if "profile_stages" in self._calls.offers:
                arguments["profile_stages"] = list(self.stages)
        elif rollout.bounded:
            # From a start step on, num_steps is exact in every version; without one, versions
            # before 0.5.16 record one forward pass less. 1 is always the next one.
            arguments["start_step"] = rollout.sglang.start_step or 1
            if rollout.count is not None:
                arguments["num_steps"] = rollout.count
        if rollout.sglang.merge:
            arguments["merge_profiles"] = True
        for name, key in _KEYS.items():
            if name in arguments and name not in self._calls.offers:
                raise ConfigError(key, f"this SGLang has no {name}; install a newer one, or leave it out")
        return arguments


_KEYS = {
    "profile_by_stage": "rollout.by_stage",
    "start_step": "rollout.count",
    "merge_profiles": "rollout.sglang.merge",
}


def _device_numbers(server: Mapping[str, Any], ranks: int) -> range:
    """Return which visible device each rank on this node uses, as SGLang's launcher numbers them."""
    first, step = int(server.get("base_gpu_id") or 0), int(server.get("gpu_id_step") or 1)
    here = ranks // max(int(server.get("nnodes") or 1), 1)
    return range(first, first + here * step, step)


def check_sglang(
    tool: TraceTool | FolderTool,
    window: RolloutOptions,
    role: str,
    *,
    device: str = "cuda",
    dp_ranks: int = 1,
) -> None:
    """Refuse what no SGLang records, before one is started.

    Args:
        tool: What is to record it.
        window: What is to be recorded of a rollout.
        role: Role of the server.
        device: What it runs on.
        dp_ranks: Number of its data-parallel ranks, if each has schedulers of its own.

    Raises:
        ConfigError: The settings ask for something that SGLang does not have, or that would end it.
    """
    if isinstance(tool, FolderTool):
        _check_npu_window(window, role, dp_ranks)
    for name in ("memory", "flops"):
        if getattr(tool.options, name, False):
            refuse_option(role, name, "false", f"SGLang does not record {name}")
    if window.start:
        raise ConfigError(
            "rollout.start",
            "SGLang counts iterations from the engine's start and does not publish the count; "
            "leave it out, or set rollout.sglang.start_step to an absolute number",
        )
    for name in _activities(tool, device):
        if isinstance(tool, TraceTool) and name not in _offered(device):
            refuse_option(role, "activities", "null", f"{name} ends an SGLang that runs on {device}")


def _check_npu_window(window: RolloutOptions, role: str, dp_ranks: int) -> None:
    """Refuse what cannot be told apart in torch_npu's folders, which name the rank only."""
    why = "the recordings of torch_npu do not say which is which"
    if window.by_stage:
        raise ConfigError("rollout.by_stage", f"{why}; set it to false on an NPU")
    if window.sglang.merge:
        raise ConfigError("rollout.sglang.merge", "SGLang merges no recordings of torch_npu; set it to false")
    if dp_ranks > 1:
        raise ConfigError(
            f"roles.{role}.tool",
            f"SGLang has data-parallel ranks, and {why}; set it to spans, or use enable_dp_attention",
        )


def _activities(tool: TraceTool | FolderTool, device: str) -> tuple[str, ...]:
    return _offered(device) if tool.options.activities is None else tool.options.activities


def _offered(device: str) -> tuple[str, ...]:
    """Return what SGLang records on a device with torch's own profiler."""
    return {"cpu": ("cpu",), "xpu": ("cpu", "xpu")}.get(device, ("cpu", "cuda"))


def manager_of(engine: Any, identity: WorkerIdentity) -> Any | None:
    """Return an engine's tokenizer manager; ``None`` for the URL of a server.

    Raises:
        CaptureStateError: The engine has none.
    """
    if isinstance(engine, str):
        return None
    manager = getattr(engine, "tokenizer_manager", None)
    if manager is None:
        raise CaptureStateError(
            f"init_capture: this {type(engine).__name__} has no tokenizer manager ({identity}); "
            "on the nodes of a replica other than its first, pass node_rank"
        )
    return manager
