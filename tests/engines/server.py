"""The part of a rollout server that the tests of every engine share."""

from __future__ import annotations

import asyncio
import multiprocessing
from pathlib import Path
from typing import Any

PROMPT = [5, 6, 7, 8]
SGLANG_ON_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "dtype": "float32",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.3,
    "log_level": "warning",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
    "skip_server_warmup": True,
}


class EngineServer:
    """Has the helpers of the contract; a subclass adds a capture mixin,
    ``self.engine`` and ``_one``.
    """

    sees_requests = True

    def __init__(self, save_path: Path, replica: int = 0) -> None:
        self.save_path = save_path
        self.replica = replica
        self._others = set(multiprocessing.active_children())

    def close(self) -> None:
        self.engine.shutdown()
        for process in set(multiprocessing.active_children()) - self._others:
            process.join(30)

    def reconfigure(self, **changes: Any) -> None:
        self.init_capture(settings(self.save_path, **changes), replica=self.replica)

    async def generate(self, requests: int, tokens: int) -> int:
        """Serve requests at once; return how many tokens were made."""
        return sum(await asyncio.gather(*[self._one(PROMPT, tokens) for _ in range(requests)]))

    async def generate_too_long(self) -> int:
        return await self._one([5] * 5000, 1)


def settings(save_path: Path, **changes: Any) -> dict[str, Any]:
    return {"enable": True, "save_path": str(save_path), **changes}
