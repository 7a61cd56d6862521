"""Capture methods and stages for verl's training workers.

The methods are registered for verl's dispatch, so that worker groups have them. Stages are put around verl's
methods. Neither the methods' bodies nor the base classes of a worker change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from verl_profiling.capture.session import process_session, stage
from verl_profiling.integrations.hooks import mark, misfits, wrap
from verl_profiling.integrations.verl.actors import add_capture_methods
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import CaptureTimers, FSDPCaptureMixin, MegatronCaptureMixin

_OLD, _REFERENCE = "old_log_prob", "ref_log_prob"
_CHECKPOINTS = {name: name for name in ("save_checkpoint", "load_checkpoint")}
_ACTOR_STAGES = {
    "compute_ref_log_prob": _REFERENCE,
    "update_actor": "update_actor",
    "update_weights": "update_weights",
    **_CHECKPOINTS,
}
_CRITIC_STAGES = {"infer_batch": "values", "train_mini_batch": "update_critic", **_CHECKPOINTS}
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
    {_OLD, _MINI_BATCH, _MICRO_BATCH}
    | {*_ACTOR_STAGES.values(), *_CRITIC_STAGES.values(), *_OFFLOADING.values()}
)
"""The stages of verl's training workers."""


def hook_workers(module: Any) -> None:
    """Give verl's worker classes capture methods; of these, only ``init_capture`` blocks a worker group."""
    from verl.single_controller.base.decorator import Dispatch, register

    for worker_class in (module.ActorRolloutRefWorker, module.TrainingWorker):
        worker_class.init_capture = register(dispatch_mode=Dispatch.ONE_TO_ALL)(_init_capture)
        add_capture_methods(
            worker_class, registered=register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        )


def hook_stages(module: Any) -> None:
    """Mark the stages of ``ActorRolloutRefWorker``, and those of ``TrainingWorker`` if it is a critic."""
    actor, training = module.ActorRolloutRefWorker, module.TrainingWorker
    for name, stage_name in _ACTOR_STAGES.items():
        mark(actor, name, partial(stage, stage_name))
    wrap(actor, "compute_log_prob", _log_prob_stage)
    for name, stage_name in _CRITIC_STAGES.items():
        wrap(training, name, partial(_critic_stage, stage_name))
    wrap(training, "train_batch", _counted_mini_batch)


def hook_fsdp_engine(module: Any) -> None:
    """Mark the micro-batches of FSDP engines as stages."""
    wrap(module, "prepare_micro_batches", _marked_micro_batches)


def hook_offloading(module: Any) -> None:
    """Mark loading of an engine's model and optimizer to the device, and offloading, as stages."""
    framework = "megatron" if ".megatron." in module.__name__ else "fsdp"
    for name, stage_name in _OFFLOADING.items():
        mark(module, name.format(framework), partial(stage, stage_name))


def _marked_micro_batches(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    prepared = prepare(*args, **kwargs)
    if not process_session().recording:
        return prepared
    micro_batches, *rest = prepared
    return _MarkedMicroBatches(micro_batches), *rest


class _MarkedMicroBatches(list[Any]):
    """A list of micro-batches; each pass of a loop over it is a stage ``micro_batch``."""

    def __iter__(self) -> Iterator[Any]:
        micro_batch = stage(_MICRO_BATCH)
        for item in super().__iter__():
            with micro_batch:
                yield item


def _log_prob_stage(compute_log_prob: Callable[..., Any], self: Any, data: Any) -> Any:
    """Mark ``ref_log_prob`` if the batch is computed without the LoRA adapter, else ``old_log_prob``."""
    with stage(_REFERENCE if _without_adapter(data) else _OLD):
        return compute_log_prob(self, data)


def _without_adapter(data: Any) -> bool:
    """Return whether to compute without the adapter: a flag in V1's ``extra_info``, or in V0's batch."""
    if isinstance(facts := getattr(data, "extra_info", None), dict):
        return bool(facts.get(_WITHOUT_ADAPTER, False))
    if _WITHOUT_ADAPTER not in getattr(data, "keys", tuple)():
        return False
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get(data, _WITHOUT_ADAPTER))


def _critic_stage(name: str, method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Mark a method of ``TrainingWorker`` as a stage if the worker is a critic.

    In an actor the same class is a part of ``ActorRolloutRefWorker``, whose methods are marked already.
    """
    if self.config.model_type != _CRITIC_MODEL:
        return method(self, *args, **kwargs)
    with stage(name):
        return method(self, *args, **kwargs)


def _counted_mini_batch(train_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark a mini-batch as a stage, and count it for the ``mini_batches`` window of the ``torch`` tool."""
    with stage(_MINI_BATCH):
        output = train_batch(*args, **kwargs)
    process_session().step()
    return output


def _init_capture(self: Any, settings: ProfilingConfig, role: str) -> list[str]:
    """Set this worker up for ``role``; return sentences on the parts that are not recorded."""
    engine = self.engine if hasattr(self, "engine") else (self.actor or self.ref).engine
    if engine.engine_config.strategy == "megatron":
        self._verl_profiling = MegatronCaptureMixin()
        self._verl_profiling.init_capture(settings, role=role)
        _show_schedule(engine)
    else:
        self._verl_profiling = FSDPCaptureMixin()
        mesh = getattr(engine, "device_mesh", None)
        self._verl_profiling.init_capture(
            settings, role=role, rank=self.rank, world_size=self.world_size, mesh=mesh
        )
    return misfits()


def _show_schedule(engine: Any) -> None:
    """Mark the micro-batches of Megatron's schedule, which loops over them itself."""
    from megatron.core.utils import get_model_config

    for chunk in engine.module:
        config = get_model_config(chunk)
        if not isinstance(config.timers, CaptureTimers):
            config.timers = CaptureTimers(config.timers)
