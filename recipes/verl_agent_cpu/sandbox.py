"""A stateful tool of verl: each call starts a sandbox of its own,
which takes longer than using it.
"""

from __future__ import annotations

import asyncio
from typing import Any
from uuid import uuid4

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

_START_S, _RUN_S = 0.3, 0.05


class Sandbox(BaseTool):
    """Runs commands in a sandbox."""

    async def create(
        self, instance_id: str | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Start a sandbox."""
        await asyncio.sleep(_START_S)
        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a command."""
        await asyncio.sleep(_RUN_S)
        return ToolResponse(text="done"), 0.0, {}
