"""Lets vLLM's mode for Nsight Systems run on a CPU:
what it calls of the CUDA profiler is noted in a file.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType

from wrapt import register_post_import_hook


def stand_in(wrapper: ModuleType) -> None:
    """Have vLLM take a CPU for a device with a CUDA profiler."""
    import torch

    wrapper._SUPPORTED_PROFILER_KINDS["cpu"] = frozenset(("torch", "cuda"))
    torch.cuda.profiler.start = note("start")
    torch.cuda.profiler.stop = note("stop")
    torch.cuda.nvtx.range = nullcontext


def note(call: str) -> Callable[[], None]:

    def called() -> None:
        with Path(os.environ["CUDA_CALLS"]).open("a") as calls:
            calls.write(f"{call}\n")

    return called


register_post_import_hook(stand_in, "vllm.profiler.wrapper")
