"""The tools, by name. A new tool is one module here and one line in ``TOOLS``."""

from __future__ import annotations

from importlib import import_module

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.tools.base import Destination, NoOptions, Output, Recording, Tool

__all__ = ["TOOLS", "Destination", "NoOptions", "Output", "Recording", "Tool", "load_tool"]

TOOLS = {
    "torch": "verl_profiling.tools.torch_profiler:TorchTool",
    "torch_memory": "verl_profiling.tools.torch_memory:TorchMemoryTool",
    "nsys": "verl_profiling.tools.nsys:NsysTool",
    "npu": "verl_profiling.tools.npu:NpuTool",
    "precision": "verl_profiling.tools.precision:PrecisionTool",
    "spans": "verl_profiling.tools.spans:SpansTool",
}


def load_tool(name: str, key: str = "tool") -> type[Tool]:
    """Return the class of a tool.

    Args:
        name: A name from :data:`TOOLS`, or ``"package.module:Class"`` for a tool of your own.
        key: Configuration key to name in an error.

    Raises:
        ConfigError: There is no such tool.
    """
    location = TOOLS.get(name, name)
    module_name, separator, class_name = location.partition(":")
    if not separator:
        raise ConfigError(
            key, f"unknown tool {name!r}; {choices_hint(name, TOOLS)}, or 'package.module:Class'"
        )
    try:
        found = getattr(import_module(module_name), class_name)
    except Exception as error:  # importing a module may raise anything
        raise ConfigError(key, f"tool {name!r} cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Tool)):
        raise ConfigError(key, f"{name!r} is not a subclass of verl_profiling.tools.Tool")
    return found
