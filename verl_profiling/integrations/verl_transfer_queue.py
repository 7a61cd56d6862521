"""Waiting for TransferQueue: stages in the trainer and its workers, spans in agent loops."""

from __future__ import annotations

from functools import partial
from typing import Any

from verl_profiling.capture.session import stage
from verl_profiling.integrations.verl_profiler import trainer_stage
from verl_profiling.integrations.wrapping import around, around_async, wrap
from verl_profiling.trajectories import span

__all__ = ["hook_bridge", "hook_transfer_queue"]

_GET, _PUT = "transfer_queue_get", "transfer_queue_put"
_TRAINER = {
    "kv_batch_get": _GET,
    "kv_batch_put": _PUT,
    "kv_clear": "transfer_queue_clear",
    "kv_list": "transfer_queue_list",
}
_AGENT_LOOPS = {"async_kv_batch_get": "wait:get_response", "async_kv_batch_put": "wait:put_response"}
_TRAINING_WORKERS = {
    "kv_batch_meta2batch_meta": _GET,
    "_meta_to_realdata": _GET,
    "_update_meta_with_output": _PUT,
    "batch_meta2kv_batch_meta": _PUT,
}


def hook_transfer_queue(module: Any) -> None:
    """Mark the calls of the trainer and of agent loops."""
    for name, marked in _TRAINER.items():
        wrap(module, name, around(partial(trainer_stage, marked)))
    for name, waits in _AGENT_LOOPS.items():
        wrap(module, name, around_async(partial(span, waits)))


def hook_bridge(module: Any) -> None:
    """Mark what training workers get and put around the methods that the trainer calls."""
    for name, marked in _TRAINING_WORKERS.items():
        wrap(module, name, around(partial(stage, marked)))
