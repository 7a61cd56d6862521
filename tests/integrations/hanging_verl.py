"""A plugin for verl: while a file is there, the next call of a tool takes it,
and waits until it is gone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from wrapt import register_post_import_hook

FOLDER = "HANGING_VERL_FOLDER"
SWITCH, TAKEN = "tool", "tool.taken"


def hang_in_a_tool(module: Any) -> None:
    """Let one call of verl's tools that are functions wait."""
    call: Callable[..., Any] = module.FunctionTool.call

    async def called(self: Any, *args: Any, **kwargs: Any) -> Any:
        switch = Path(os.environ[FOLDER], SWITCH)
        with suppress(FileNotFoundError):
            taken = switch.rename(switch.with_name(TAKEN))
            while taken.exists():
                await asyncio.sleep(0.05)
        return await call(self, *args, **kwargs)

    module.FunctionTool.call = called


register_post_import_hook(hang_in_a_tool, "verl.tools.function_tool")
