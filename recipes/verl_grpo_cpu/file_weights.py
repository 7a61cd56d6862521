"""Transfers weights by file, for a trainer and engines on the same machine without an accelerator.

verl's asynchronous trainer with separate engines (``separate_async``) transfers weights with NCCL
or NIXL. This checkpoint engine needs neither; name it in
``rollout.checkpoint_engine.custom_backend_module``, with ``backend=file``.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import torch
from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry

_POLL_S = 0.02


@CheckpointEngineRegistry.register("file")
class FileCheckpointEngine(CheckpointEngine):
    """Writes all weights to one file on the trainer's first rank, and reads it in every engine.

    Args:
        bucket_size: Size of a message in bytes; a file has none.
        is_master: Whether this is the trainer's first rank.
    """

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._path = Path()
        self._is_master = is_master

    def prepare(self) -> dict[str, Any]:
        """Return a name for the file; that of the trainer's first rank is used."""
        return {"path": str(Path(tempfile.gettempdir()) / f"verl-weights-{os.getpid()}.pt")}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return the file's name to every rank."""
        path = metadata[0]["path"]
        return {"path": [path] * actor_wg_world_size}, {"path": [path] * rollout_world_size}

    def init_process_group(self, path: str) -> None:
        """Keep the file's name."""
        self._path = Path(path)

    def finalize(self) -> None:
        """Remove the file, if no other process has done so."""
        self._path.unlink(missing_ok=True)

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> None:
        """Write the weights; every rank iterates over them, because gathering is collective."""
        # The tensors may share storage that is used again for the next ones.
        named = [(name, tensor.detach().clone()) for name, tensor in weights]
        if self._is_master:
            part = self._path.with_suffix(".part")
            torch.save(named, part)
            part.replace(self._path)

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncIterator[tuple[str, torch.Tensor]]:
        """Yield the weights once they have been written."""
        while not self._path.exists():
            await asyncio.sleep(_POLL_S)
        for name, tensor in torch.load(self._path):
            yield name, tensor
