"""What to capture: one batch of requests."""

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from verl_profiling import AsyncProfilingCallback


class Server(Protocol):
    """A server with a capture mixin, and this method."""

    async def generate(self, prompt: str, tokens: int) -> None:
        """Serve one request."""


async def capture_batch(server: Server, profiling: Mapping[str, Any]) -> None:
    """Capture eight requests as step 1; their lengths differ, to show a tail."""
    async with AsyncProfilingCallback(profiling) as callback:
        callback.add_rollout(server)
        await callback.on_step_begin(1)
        await asyncio.gather(*[server.generate("Count down from ten:", 8 * n) for n in range(1, 9)])
        await callback.on_step_end()
    print(f"verl-profiling report {callback.last_folder}")
