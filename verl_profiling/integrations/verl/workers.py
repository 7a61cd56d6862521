"""Capture methods for all processes of verl, and stages for its training workers.

Capture methods are those that the callback calls: ``start_capture``, ``stop_capture`` and
``read_watch``. They are registered for verl's dispatch, so that worker groups have them. Stages
wrap verl's methods. Neither the bodies of verl's methods nor the base classes of a worker change.

A rollout server gets its settings inside ``rollout.engine_kwargs``, which verl passes unchanged to
every server of the policy, and to no server of a reward model or a teacher.

Each ``hook_*`` is in the table of ``integrations/verl/__init__.py``, which calls it when verl
imports the hooked module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from operator import methodcaller
from typing import Any

from verl_profiling import clock
from verl_profiling.capture.session import process_session, stage
from verl_profiling.capture.stage_spans import LONG_NS, SpanLog, add_work
from verl_profiling.files.process_marks import marked, note_import
from verl_profiling.integrations.hooks import mark, misfits, wrap
from verl_profiling.integrations.verl.stage_names import (
    ACTOR_STAGES,
    CRITIC_STAGES,
    OFFLOADING,
    TASK_KEYS,
    WORKER_SYNC_STAGES,
)
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import (
    AgentLoopCaptureMixin,
    CaptureTimers,
    FSDPCaptureMixin,
    MegatronCaptureMixin,
    RolloutCaptureMixin,
    SGLangCaptureMixin,
    VLLMCaptureMixin,
)

SETTINGS_KEY = "verl_profiling"
AGENT_LOOP, REWARD, ROLLOUTER = "agent_loop", "reward", "rollouter"
_METHODS = ("start_capture", "stop_capture", "read_watch")
_CRITIC_MODEL = "value_model"
_WITHOUT_ADAPTER = "no_lora_adapter"


def hook_workers(module: Any) -> None:
    """Give verl's worker classes capture methods; only ``init_capture`` blocks a worker group."""
    from verl.single_controller.base.decorator import Dispatch, register

    mark(module.ActorRolloutRefWorker, "init_model", partial(marked, "weights"))
    mark(module.TrainingWorker, "reset", partial(marked, "weights"))
    for worker_class in (module.ActorRolloutRefWorker, module.TrainingWorker):
        wrap(worker_class, "__init__", _made)
        worker_class.init_capture = register(dispatch_mode=Dispatch.ONE_TO_ALL)(_init_capture)
        add_capture_methods(
            worker_class, registered=register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
        )


def hook_stages(module: Any) -> None:
    """Mark the stages of ``ActorRolloutRefWorker``,
    and of a ``TrainingWorker`` that is a critic.
    """
    actor, training = module.ActorRolloutRefWorker, module.TrainingWorker
    for name, stage_name in ACTOR_STAGES.items():
        mark(actor, name, partial(stage, stage_name))
    wrap(actor, "compute_log_prob", _log_prob_stage)
    for name, stage_name in CRITIC_STAGES.items():
        wrap(training, name, partial(_critic_stage, stage_name))
    wrap(training, "train_batch", _counted_mini_batch)


def hook_fsdp_engine(module: Any) -> None:
    """Mark the micro-batches of FSDP engines as stages."""
    wrap(module, "prepare_micro_batches", _marked_micro_batches)


def hook_offloading(module: Any) -> None:
    """Mark loading of an engine's model and optimizer to the device, and offloading, as stages."""
    framework = "megatron" if ".megatron." in module.__name__ else "fsdp"
    for name, stage_name in OFFLOADING.items():
        mark(module, name.format(framework), partial(stage, stage_name))


def hook_work(module: Any) -> None:
    """Add the size of each batch of an engine (samples, tokens, micro-batches) to the open stages.

    The engine is hooked, as methods of workers may get only the keys of a batch, not its tensors.
    """
    wrap(module, "prepare_micro_batches", _with_work)


def _with_work(prepare: Callable[..., Any], data: Any, *args: Any, **kwargs: Any) -> Any:
    prepared = prepare(data, *args, **kwargs)
    if process_session().log is not None:
        facts = {"micro_batches": len(prepared[0]), **_learned(data)}
        add_work(facts, _PerSequence(_lengths, data))
    return prepared


def _marked_micro_batches(prepare: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    prepared = prepare(*args, **kwargs)
    if not process_session().recording:
        return prepared
    micro_batches, *rest = prepared
    return _MarkedMicroBatches(micro_batches), *rest


class _PerSequence:
    """A number for each sequence of a batch, which is read only if a stage is recorded.

    Args:
        read: Function that returns the numbers as a tensor.
        data: The batch.
    """

    def __init__(self, read: Callable[[Any], Any], data: Any) -> None:
        self._read, self._data = read, data

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read(self._data).tolist())


def _lengths(data: Any) -> Any:
    """Return the lengths without padding: packed batches are nested tensors, others have a mask."""
    ids = data["input_ids"]
    return ids.offsets().diff() if ids.is_nested else data["attention_mask"].sum(-1)


def _masks(data: Any) -> Any:
    return _padded(data["response_mask"]).sum(-1)


def _advantages(data: Any) -> Any:
    return (_padded(data["advantages"]) * _padded(data["response_mask"])).abs().sum(-1)


def _padded(values: Any) -> Any:
    return values.to_padded_tensor(0) if values.is_nested else values


def _learned(data: Any) -> dict[str, Any]:
    """Return advantages, masks and tasks of the sequences that an actor is trained on."""
    keys = data.keys()  # a TensorDict has no ``in``
    if "advantages" not in keys:
        return {}
    facts = {
        "advantages": _PerSequence(_advantages, data),
        "masks": _PerSequence(_masks, data),
    }
    for key in TASK_KEYS:
        if key in keys:
            facts["tasks"] = _PerSequence(methodcaller("get", key), data)
            break
    return facts


class _MarkedMicroBatches(list[Any]):
    """A list of micro-batches; each iteration
    of a loop over the list is a stage ``micro_batch``.
    """

    def __iter__(self) -> Iterator[Any]:
        micro_batch = stage("micro_batch")
        for item in super().__iter__():
            with micro_batch.given(lengths=_PerSequence(_lengths, item), **_learned(item)):
                yield item


def _log_prob_stage(compute_log_prob: Callable[..., Any], self: Any, data: Any) -> Any:
    """Mark ``ref_log_prob`` if the batch is computed without the LoRA adapter,
    else ``old_log_prob``.
    """
    with stage("ref_log_prob" if _without_adapter(data) else "old_log_prob"):
        return compute_log_prob(self, data)


def _without_adapter(data: Any) -> bool:
    """Return whether a flag of a batch, or of its ``extra_info``, switches the LoRA adapter off."""
    facts = getattr(data, "extra_info", None)
    if isinstance(facts, dict):
        return bool(facts.get(_WITHOUT_ADAPTER, False))
    if _WITHOUT_ADAPTER not in getattr(data, "keys", tuple)():
        return False
    from verl.utils import tensordict_utils

    return bool(tensordict_utils.get(data, _WITHOUT_ADAPTER))


def _critic_stage(
    name: str, method: Callable[..., Any], self: Any, *args: Any, **kwargs: Any
) -> Any:
    """Mark a method of ``TrainingWorker`` as a stage if the worker is a critic.

    An actor uses the same class inside ``ActorRolloutRefWorker``, whose methods are marked already.
    """
    if self.config.model_type != _CRITIC_MODEL:
        return method(self, *args, **kwargs)
    with stage(name):
        return method(self, *args, **kwargs)


def _counted_mini_batch(train_batch: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Mark a mini-batch as a stage, and count it for the ``mini_batches`` window
    of the ``torch`` tool.
    """
    with stage("mini_batch"):
        output = train_batch(*args, **kwargs)
    process_session().step()
    return output


def _made(init: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    note_import()
    init(self, *args, **kwargs)


def _init_capture(self: Any, settings: ProfilingConfig, role: str) -> list[str]:
    """Set this worker up for ``role``; return sentences on data that is not recorded, and why."""
    engine = self.engine if hasattr(self, "engine") else (self.actor or self.ref).engine
    _mark_weight_sync(self, engine)
    if settings.enable:
        process_session().owns(self)
    if engine.engine_config.strategy == "megatron":
        self._verl_profiling = MegatronCaptureMixin()
        self._verl_profiling.init_capture(settings, role=role)
        _show_schedule(engine)
    else:
        self._verl_profiling = FSDPCaptureMixin()
        # With Ulysses, the ranks of "sp" get the same batch, and share its work.
        mesh = getattr(engine, "ulysses_device_mesh", None) or getattr(engine, "device_mesh", None)
        self._verl_profiling.init_capture(
            settings, role=role, rank=self.rank, world_size=self.world_size, mesh=mesh
        )
    return misfits()


def _mark_weight_sync(worker: Any, engine: Any) -> None:
    """Mark the parts of a worker's weight updates, e.g. ``gather`` and ``transfer``, as stages.

    The hooked methods are those of this worker's own objects, e.g. of its rollout engine.
    """
    if "get_per_tensor_param" in vars(engine):
        return  # the worker was set up before
    wrap(engine, "get_per_tensor_param", _gathering)
    for (owner, name), name_of_stage in WORKER_SYNC_STAGES.items():
        part = getattr(worker, owner, None)
        if part is not None:
            mark(part, name, partial(stage, name_of_stage))


def _gathering(get_tensors: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with stage("gather"):
        tensors, *rest = get_tensors(*args, **kwargs)
    log = process_session().log
    if log and inspect.isgenerator(tensors):
        tensors = _gathered(tensors, log)
    return tensors, *rest


def _gathered(tensors: Iterator[Any], log: SpanLog) -> Iterator[Any]:
    """Yield the tensors, and record the host's time in making them as stages ``gather``.

    One stage stands for several tensors, so that there are a few hundred; it ends at the last one.
    """
    begin_ns = clock.now_ns()
    spent_ns = whole_ns = 0
    for tensor in tensors:
        end_ns = clock.now_ns()
        spent_ns += end_ns - begin_ns
        whole_ns += end_ns - begin_ns
        if spent_ns >= max(LONG_NS, whole_ns // 100):
            log.ended("gather", end_ns - spent_ns, end_ns)
            spent_ns = 0
        yield tensor
        begin_ns = clock.now_ns()


def _show_schedule(engine: Any) -> None:
    """Mark the micro-batches of Megatron's schedule, by its timers."""
    from megatron.core.utils import get_model_config

    for chunk in engine.module:
        config = get_model_config(chunk)
        if not isinstance(config.timers, CaptureTimers):
            config.timers = CaptureTimers(config.timers)


def add_capture_methods(
    cls: type[Any],
    default: Any = None,
    *,
    awaited: bool = False,
    registered: Callable[[Any], Any] = lambda method: method,
) -> None:
    """Add the methods that the callback calls; each method delegates to the object's
    ``_verl_profiling``.

    Args:
        cls: A class of verl, before ``ray.remote`` makes an actor of it.
        default: The mixin that answers calls before ``init_capture`` has set the process up.
        awaited: Whether the methods are coroutines. Plain methods start and stop recordings on the
            event loop's thread.
        registered: Decorator for each method; verl's ``register`` for methods of worker groups.
    """
    for name in _METHODS:
        setattr(cls, name, registered((_awaited if awaited else _called)(name)))
    if default is not None:
        cls._verl_profiling = default


def _called(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return getattr(self._verl_profiling, name)(*args, **kwargs)

    return method


def _awaited(name: str) -> Callable[..., Any]:
    async def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        reply = getattr(self._verl_profiling, name)(*args, **kwargs)
        return await reply if inspect.isawaitable(reply) else reply

    return method


def add_actor_methods(actor_class: type[Any], role: str) -> None:
    """Add the capture methods and ``init_capture`` to a class of plain Ray actors."""

    def init_capture(self: Any, settings: ProfilingConfig, rank: int, world_size: int) -> list[str]:
        """Set this worker up; return sentences on data that its process does not record."""
        self._verl_profiling = AgentLoopCaptureMixin()
        self._verl_profiling.init_capture(settings, role=role, rank=rank, world_size=world_size)
        return misfits()

    if "__init__" in vars(actor_class):
        wrap(actor_class, "__init__", _made)
    actor_class.init_capture = init_capture
    add_capture_methods(actor_class, AgentLoopCaptureMixin())


def rollout_processes(owner: Any, agent_loops: Any) -> dict[str, list[Any]]:
    """Return the handles of the agent loop workers and of the reward loop workers, by role.

    Args:
        owner: A trainer or a rollouter.
        agent_loops: The owner's agent loop manager.
    """
    rewards = getattr(owner, "reward_loop_manager", None)
    return {
        AGENT_LOOP: list(getattr(agent_loops, "agent_loop_workers", None) or ()),
        REWARD: list(getattr(rewards, "reward_loop_workers", None) or ()),
    }


def hook_vllm_server(module: Any) -> None:
    """Give ``vLLMHttpServer`` the capture methods, and its engine the arguments for captures."""
    server_class = module.vLLMHttpServer
    wrap(server_class, "run_headless", _launch_vllm)
    if wrap(server_class, "run_server", _launch_vllm):
        _add_server_methods(server_class)


def hook_sglang_server(module: Any) -> None:
    """Give ``SGLangHttpServer`` the capture methods."""
    if wrap(module.SGLangHttpServer, "launch_server", _launch_sglang):
        _add_server_methods(module.SGLangHttpServer)


def settings_of_server(holder: Any) -> Mapping[str, Any] | None:
    """Return the profiling settings in the configuration of a rollout server or a replica."""
    settings: Mapping[str, Any] | None = (holder.config.engine_kwargs or {}).get(SETTINGS_KEY)
    return settings


async def _launch_vllm(run: Callable[..., Any], self: Any, args: Any) -> None:
    """Start the processes of a replica on a node, and set up the server;
    the first node has the engine.
    """
    note_import()
    for name, value in VLLMCaptureMixin.engine_args(settings_of_server(self)).items():
        setattr(args, name, value)
    with marked("engine"):
        await run(self, args)
    _set_up(self, VLLMCaptureMixin(), getattr(self, "engine", None))


async def _launch_sglang(launch: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> None:
    note_import()
    SGLangCaptureMixin.engine_args(settings_of_server(self))
    with marked("engine"):
        await launch(self, *args, **kwargs)
    _set_up(self, SGLangCaptureMixin(), self)


async def _noted_version(
    set_global_steps: Callable[..., Any], self: Any, global_steps: int
) -> None:
    """Record the policy version of a server's new weights:
    the number of the step that made the weights.
    """
    await set_global_steps(self, global_steps)
    self._verl_profiling.set_policy_version(global_steps)


def _set_up(server: Any, capture: RolloutCaptureMixin, engine: Any) -> None:
    if (settings := settings_of_server(server)) is not None:
        capture.init_capture(
            settings, engine=engine, replica=server.replica_rank, node_rank=server.node_rank
        )
    server._verl_profiling = capture


async def _capture_misfits(self: Any) -> list[str]:
    """Return sentences on the parts of verl that are not recorded in this process, and why."""
    return misfits()


def _add_server_methods(server_class: type[Any]) -> None:
    # The default mixin replies if a subclass launches its engine by another method.
    add_capture_methods(server_class, RolloutCaptureMixin(), awaited=True)
    server_class.capture_misfits = _capture_misfits
    wrap(server_class, "set_global_steps", _noted_version)
