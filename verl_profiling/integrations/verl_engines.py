"""Hooks in the processes in which vLLM computes, which import verl as well."""

from __future__ import annotations

import functools
from typing import Any

from verl_profiling.engines.adapter import is_spool

__all__ = ["hook_vllm_profiler"]


def hook_vllm_profiler(module: Any) -> None:
    """Have vLLM's profiler print no table of operators when it stops, if it records for this package.

    Where only the CPU is recorded, vLLM computes one, which takes ten times as long as writing the trace,
    and has no setting against it.
    """
    wrapper = getattr(module, "TorchProfilerWrapper", None)
    if wrapper is None:
        return
    original = wrapper.__init__

    @functools.wraps(original)
    def init(self: Any, profiler_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, profiler_config, *args, **kwargs)
        if is_spool(profiler_config.torch_profiler_dir):
            self.dump_cpu_time_total = False

    wrapper.__init__ = init
