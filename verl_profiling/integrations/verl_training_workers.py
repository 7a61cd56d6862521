"""Capture methods and stages for verl's training workers.

The methods are registered for verl's dispatch, so that worker groups have them. The base classes of a
worker do not change. Stages are put around verl's methods, whose bodies do not change either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from verl_profiling.capture.messages import CaptureRequest, StartReply, StopReply
from verl_profiling.capture.session import process_session, stage
from verl_profiling.integrations.hooks import misfits
from verl_profiling.integrations.wrapping import wrap
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.watch.reading import WatchReading
from verl_profiling.workers import CaptureMixin, CaptureTimers, FSDPCaptureMixin, MegatronCaptureMixin

__all__ = [
    "WORKER_STAGES",
    "hook_actor_stages",
    "hook_checkpoints",
    "hook_critic_stages",
    "hook_fsdp_engine",
    "hook_fsdp_offloading",
    "hook_megatron_offloading",
    "hook_mini_batches",
    "hook_workers",
]

_OLD, _REFERENCE = "old_log_prob", "ref_log_prob"
_CHECKPOINTS = ("save_checkpoint", "load_checkpoint")
_ACTOR_STAGES = {
    "compute_ref_log_prob": _REFERENCE,
    "update_actor": "update_actor",
    "update_weights": "update_weights",
}
_CRITIC_STAGES = {"infer_batch": "values", "train_mini_batch": "update_critic"}
_MINI_BATCH, _MICRO_BATCH = "mini_batch", "micro_batch"
_CRITIC_MODEL = "value_model"
_WITHOUT_ADAPTER = "no_lora_adapter"
_OFFLOADING = {
    "load_{}_model_to_gpu": "load_model",
    "load_{}_optimizer": "load_optimizer",
    "offload_{}_model_to_cpu": "offload_model",
    "offload_{}_optimizer": "offload_optimizer",
}

WORKER_STAGES = frozenset(
    {_OLD, _REFERENCE, _MINI_BATCH, _MICRO_BATCH, *_CHECKPOINTS}
    | {*_ACTOR_STAGES.values(), *_CRITIC_STAGES.values(), *_OFFLOADING.values()}
)
"""The stages of verl's training workers."""


def hook_workers(module: Any) -> None:
    """Give ``ActorRolloutRefWorker`` and ``TrainingWorker`` the capture methods."""
    for worker_class in (module.ActorRolloutRefWorker, module.TrainingWorker):
        _add_methods(worker_class)


def hook_actor_stages(module: Any) -> None:
    """Mark the stages of the actor and the reference model."""
    for name, stage_name in _ACTOR_STAGES.items():
        wrap(module.ActorRolloutRefWorker, name, stage(stage_name))
    wrap(module.ActorRolloutRefWorker, "compute_log_prob", _log_prob_stage)


def hook_critic_stages(module: Any) -> None:
    """Mark the stages of ``TrainingWorker`` if it is a critic."""
    for name, stage_name in _CRITIC_STAGES.items():
        wrap(module.TrainingWorker, name, functools.partial(_critic_stage, stage_name))


def hook_checkpoints(module: Any) -> None:
    """Mark the saving and loading of checkpoints; an actor's are those of the worker around it."""
    for name in _CHECKPOINTS:
        wrap(module.ActorRolloutRefWorker, name, stage(name))
        wrap(module.TrainingWorker, name, functools.partial(_critic_stage, name))


def hook_mini_batches(module: Any) -> None:
    """Mark the mini-batches of ``TrainingWorker``, actor or critic."""
    wrap(module.TrainingWorker, "train_batch", _counted_mini_batch)


def hook_fsdp_engine(module: Any) -> None:
    """Mark the micro-batches of FSDP engines as stages."""
    wrap(module, "prepare_micro_batches", _marked_micro_batches)


def _marked_micro_batches(prepare: Callable[..., Any]) -> Callable[..., Any]:
    def prepare_micro_batches(*args: Any, **kwargs: Any) -> Any:
        prepared = prepare(*args, **kwargs)
        if not process_session().recording:
            return prepared
        micro_batches, *rest = prepared
        return _MarkedMicroBatches(micro_batches), *rest

    return prepare_micro_batches


def hook_fsdp_offloading(module: Any) -> None:
    """Mark what moves models and optimizers of FSDP engines to the device and away from it."""
    _mark_offloading(module, "fsdp")


def hook_megatron_offloading(module: Any) -> None:
    """Mark the same of Megatron engines."""
    _mark_offloading(module, "megatron")


def _mark_offloading(module: Any, framework: str) -> None:
    for name, stage_name in _OFFLOADING.items():
        wrap(module, name.format(framework), stage(stage_name))


class _MarkedMicroBatches(list[Any]):
    """Micro-batches; in a loop over them each pass of the body is a stage."""

    def __iter__(self) -> Iterator[Any]:
        micro_batch = stage(_MICRO_BATCH)
        for item in super().__iter__():
            with micro_batch:
                yield item


def _log_prob_stage(method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark ``compute_log_prob`` by what it computes: without its LoRA adapter the actor is the reference."""
    of_actor, of_reference = stage(_OLD)(method), stage(_REFERENCE)(method)

    def compute_log_prob(self: Any, data: Any) -> Any:
        return (of_reference if _without_adapter(data) else of_actor)(self, data)

    return compute_log_prob


def _without_adapter(data: Any) -> bool:
    """Return whether the trainer wants the model without adapter: V1 says so beside the batch, V0 in it."""
    if isinstance(facts := getattr(data, "extra_info", None), dict):
        return bool(facts.get(_WITHOUT_ADAPTER, False))
    if _WITHOUT_ADAPTER not in getattr(data, "keys", tuple)():
        return False
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get(data, _WITHOUT_ADAPTER))


def _critic_stage(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a method of ``TrainingWorker`` as a stage if the worker is a critic.

    In an actor the same class is a part of ``ActorRolloutRefWorker``, whose methods are marked already.
    """
    marked = stage(name)(method)

    def critic_method(self: Any, *args: Any, **kwargs: Any) -> Any:
        is_critic = self.config.model_type == _CRITIC_MODEL
        return (marked if is_critic else method)(self, *args, **kwargs)

    return critic_method


def _counted_mini_batch(train_batch: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a mini-batch as a stage, and count it for the ``mini_batches`` window of the ``torch`` tool."""
    mini_batch = stage(_MINI_BATCH)

    def train_mini_batch(self: Any, *args: Any, **kwargs: Any) -> Any:
        with mini_batch:
            output = train_batch(self, *args, **kwargs)
        process_session().step()
        return output

    return train_mini_batch


def _add_methods(worker_class: type[Any]) -> None:
    """Add the methods so that worker groups bind them; a group waits only for the set-up."""
    from verl.single_controller.base.decorator import Dispatch, register

    everywhere = functools.partial(register, dispatch_mode=Dispatch.ONE_TO_ALL)
    worker_class.init_capture = everywhere()(_init_capture)
    worker_class.start_capture = everywhere(blocking=False)(_start_capture)
    worker_class.stop_capture = everywhere(blocking=False)(_stop_capture)
    worker_class.read_watch = everywhere(blocking=False)(_read_watch)


def _init_capture(self: Any, settings: ProfilingConfig, role: str) -> list[str]:
    """Set this worker up under the first role of its process that is profiled; return what does not fit."""
    engine = self.engine if hasattr(self, "engine") else (self.actor or self.ref).engine
    if engine.engine_config.strategy == "megatron":
        megatron = MegatronCaptureMixin()
        megatron.init_capture(settings, role=role)
        _show_schedule(engine)
        self._verl_profiling = megatron
        return misfits()
    capture = FSDPCaptureMixin()
    mesh = getattr(engine, "device_mesh", None)
    capture.init_capture(settings, role=role, rank=self.rank, world_size=self.world_size, mesh=mesh)
    self._verl_profiling = capture
    return misfits()


def _show_schedule(engine: Any) -> None:
    """Mark the micro-batches of Megatron's schedule, which loops over them itself."""
    from megatron.core.utils import get_model_config

    for chunk in engine.module:
        config = get_model_config(chunk)
        if not isinstance(config.timers, CaptureTimers):
            config.timers = CaptureTimers(config.timers)


def _start_capture(self: Any, request: CaptureRequest) -> StartReply:
    """Start, arm or join a capture. The callback calls this."""
    capture: CaptureMixin = self._verl_profiling
    return capture.start_capture(request)


def _stop_capture(self: Any, capture_id: str | None = None, finish_s: float = 0.0) -> StopReply:
    """Stop a capture. The callback calls this."""
    capture: CaptureMixin = self._verl_profiling
    return capture.stop_capture(capture_id, finish_s)


def _read_watch(self: Any, since_ns: int | None = None) -> WatchReading | None:
    """Return what the watch keeps of this process. The callback calls this."""
    capture: CaptureMixin = self._verl_profiling
    return capture.read_watch(since_ns)
