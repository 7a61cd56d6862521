"""Engines on an Ascend NPU. Their processes record with torch_npu, which writes a folder for each rank.

How they record is mostly their own choice; docs/engines.md says what can be chosen.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from verl_profiling.errors import ToolUnavailableError

RECORDED_OPTIONS: dict[str, dict[str, tuple[object, ...]]] = {
    "vLLM": {
        "activities": (["cpu", "npu"],),
        "level": ("level1",),
        "aic_metrics": ("PipeUtilization", None),
        "stack": (False,),
        "shapes": (False,),
    },
    "SGLang": {
        "level": ("level1",),
        "aic_metrics": ("PipeUtilization", None),
        "memory": (False,),
        "modules": (False,),
    },
}
"""Options of the ``npu`` tool that an engine restricts, and the values that are left, the default last."""

_PACKAGE = "vllm-ascend"
_OLDEST = (0, 16)  # names the rank in the folder
_COUNTING = (0, 20)  # counts iterations as vLLM does
_PATCHES = "_apply_patches"
_PATCHING = (0, 5, 23)  # the last SGLang that was read
_INFO = re.compile(r"profiler_info_(\d+)\.json")


def is_recording(path: Path) -> bool:
    """Return whether a path in an engine's folder is a recording of torch_npu."""
    return path.name.endswith("_ascend_pt") and path.is_dir()


def rank_of_recording(path: Path) -> int:
    """Return the rank that torch_npu noted in a recording: that of ``torch.distributed``, else 0."""
    return next((int(found[1]) for file in path.iterdir() if (found := _INFO.fullmatch(file.name))), 0)


def check_vllm_ascend() -> None:
    """Check that the vllm-ascend of this machine can be captured.

    Raises:
        ToolUnavailableError: There is none, it is too old, or another profiler was chosen for it.
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
    """Check that SGLang gets at the profiler of torch_npu.

    Raises:
        ToolUnavailableError: It uses a name that the installed torch_npu does not have. Its next start of the
            profiler would raise, which ends all its processes.
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
    """Return the vllm-ascend that counts no iterations, and what to install instead; ``None`` if it does."""
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
