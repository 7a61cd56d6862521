"""A plugin for verl: writes the name of every tool that ran into a file,
by the tool's own class.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

FILE = "COUNTED_TOOLS_FILE"


def counted(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that says the name of its tool before it runs."""

    @functools.wraps(method)
    async def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with Path(os.environ[FILE]).open("a") as file:
            file.write(f"{self.name}\n")
        return await method(self, *args, **kwargs)

    return call


def count_functions(module: Any) -> None:
    """Count the calls of tools that are functions."""
    module.FunctionTool.call = counted(module.FunctionTool.call)


def count_classes(module: Any) -> None:
    """Count the calls of tools that are classes."""
    module.Sandbox.execute = counted(module.Sandbox.execute)


register_post_import_hook(count_functions, "verl.tools.function_tool")
register_post_import_hook(count_classes, "recipes.verl_agent_cpu.sandbox")
