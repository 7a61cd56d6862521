"""The recording tools by their names in settings.

A new tool needs one module in this folder and one line in ``TOOLS``.
"""

from __future__ import annotations

from verl_profiling.tools.base import Destination, Marks, NoOptions, Output, Recording, Tool

__all__ = ["TOOLS", "Destination", "Marks", "NoOptions", "Output", "Recording", "Tool"]

TOOLS = {
    "torch": "verl_profiling.tools.torch_profiler:TorchTool",
    "torch_memory": "verl_profiling.tools.torch_memory:TorchMemoryTool",
    "nsys": "verl_profiling.tools.nsys:NsysTool",
    "npu": "verl_profiling.tools.npu:NpuTool",
    "precision": "verl_profiling.tools.precision:PrecisionTool",
    "spans": "verl_profiling.tools.base:SpansTool",
    "trajectories": "verl_profiling.tools.trajectories:TrajectoriesTool",
}
