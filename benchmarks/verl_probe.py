"""A plugin for verl: measures steps, pauses and the own time of this package's hooks in a real run.

``bench_verl.py`` puts it behind the other plugins. Around each hook it takes the time twice,
outside of the hook and inside of it around what verl does; the difference is the hook's own, with
what measuring adds. Every process writes a file of lines to ``VERL_PROBE``.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from contextvars import ContextVar
from importlib import import_module
from pathlib import Path
from types import TracebackType
from typing import Any

from wrapt import register_post_import_hook

PLUGIN = "verl_profiling.integrations.verl"
WORKERS = "verl.workers.engine_workers"
METHODS = (
    ("verl.utils.tracking", "Tracking", "log"),
    ("verl.trainer.ppo.v1.trainer_base", "PPOTrainer", "_add_batch_to_generate"),
    (WORKERS, "ActorRolloutRefWorker", "compute_log_prob"),
    (WORKERS, "ActorRolloutRefWorker", "compute_ref_log_prob"),
    (WORKERS, "ActorRolloutRefWorker", "update_actor"),
    (WORKERS, "ActorRolloutRefWorker", "update_weights"),
    (WORKERS, "TrainingWorker", "infer_batch"),
    (WORKERS, "TrainingWorker", "train_mini_batch"),
    (WORKERS, "TrainingWorker", "train_batch"),
    ("verl.workers.engine.fsdp.transformer_impl", None, "prepare_micro_batches"),
    ("verl.workers.rollout.vllm_rollout.vllm_async_server", "vLLMHttpServer", "set_global_steps"),
)

_inside: ContextVar[list[int] | None] = ContextVar("inside", default=None)
_lines = (Path(os.environ["VERL_PROBE"]) / f"{os.getpid()}.jsonl").open("a", buffering=1)


def note(kind: str, name: str, begin_ns: int, took_ns: int) -> None:
    """Write a line."""
    _lines.write(json.dumps([kind, name, begin_ns, took_ns]) + "\n")


def cpu_ns() -> int:
    """Return the CPU time so far of trainer, workers, server and engine, user and system.

    They are the processes that have loaded this probe, and what Ray's workers among them started;
    Ray's own daemons, which poll by the clock, are not.
    """
    parents, used_ticks = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it ended meanwhile
            continue
        parents[folder.name] = fields[1]
        used_ticks[folder.name] = int(fields[11]) + int(fields[12])
    ours = {path.stem for path in Path(os.environ["VERL_PROBE"]).iterdir()} & set(parents)
    workers = {pid for pid in ours if parents[pid] not in ours and parents[parents[pid]] in ours}
    while more := {pid for pid, parent in parents.items() if parent in workers} - workers:
        workers |= more
    ours |= workers
    return sum(used_ticks[pid] for pid in ours) * 1_000_000_000 // os.sysconf("SC_CLK_TCK")


class Span:
    """Takes the time of a ``with`` block: ``outer`` around a hook,
    ``inner`` around what it wraps.
    """

    def __init__(self, name: str, inner: bool) -> None:
        self._name = name
        self._inner = inner

    def __enter__(self) -> None:
        if not self._inner:
            self._token = _inside.set([])
        self._begin_unix = time.time_ns()
        self._begin = time.perf_counter_ns()

    def __exit__(self, *_: object) -> None:
        took = time.perf_counter_ns() - self._begin
        if self._inner:
            inside = _inside.get()
            if inside is not None:
                inside.append(took)
            return
        inside = _inside.get() or []
        _inside.reset(self._token)
        note("hook", self._name, self._begin_unix, took - sum(inside))


def timed(name: str, function: Callable[..., Any], inner: bool) -> Callable[..., Any]:
    """Return the function with its calls timed."""
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def timed_async(*args: Any, **kwargs: Any) -> Any:
            with Span(name, inner):
                return await function(*args, **kwargs)

        return timed_async

    @functools.wraps(function)
    def timed_call(*args: Any, **kwargs: Any) -> Any:
        with Span(name, inner):
            return function(*args, **kwargs)

    return timed_call


class TimedTimer:
    """One of verl's timers, whose beginning and end are timed."""

    def __init__(self, name: str, timer: AbstractContextManager[None], inner: bool) -> None:
        self._name = name
        self._timer = timer
        self._inner = inner

    def __enter__(self) -> None:
        self._begin_unix = time.time_ns()
        self._begin_cpu = cpu_ns() if self._name == "step" else 0
        with Span(self._name, self._inner):
            self._timer.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        with Span(self._name, self._inner):
            handled = self._timer.__exit__(kind, error, trace)
        if self._name == "step" and not self._inner:
            note("step", self._name, self._begin_unix, time.time_ns() - self._begin_unix)
            note("cpu", self._name, self._begin_unix, cpu_ns() - self._begin_cpu)
        return handled


def probe_timers(inner: bool) -> Callable[[Any], None]:
    """Return a hook that times verl's timers."""

    def hook(module: Any) -> None:
        original = module.marked_timer

        @functools.wraps(original)
        def marked_timer(name: str, *args: Any, **kwargs: Any) -> TimedTimer:
            with Span(name, inner):
                timer = original(name, *args, **kwargs)
            return TimedTimer(name, timer, inner)

        module.marked_timer = marked_timer

    return hook


def probe_methods(inner: bool) -> None:
    """Time the methods that are hooked."""
    for module_name, class_name, method in METHODS:

        def hook(module: Any, class_name: str | None = class_name, method: str = method) -> None:
            owner = getattr(module, class_name) if class_name else module
            setattr(owner, method, timed(method, getattr(owner, method), inner))

        register_post_import_hook(hook, module_name)


def probe_requests() -> None:
    """Time what the watching of a request adds to its beginning."""
    vllm = import_module("verl_profiling.engines.vllm")
    watch = vars(vllm)["watch_vllm"]

    def probed_watch(engine: Any, log: Any) -> None:
        engine.generate = timed("generate", engine.generate, inner=True)
        watch(engine, log)
        engine.generate = timed("generate", engine.generate, inner=False)

    vars(vllm)["watch_vllm"] = probed_watch


def probe_pauses() -> None:
    """Time what starts and what stops a profiler: verl's in its trainer, ours in the callback."""

    def paused(owner: Any, method: str, kind: str) -> None:
        original = getattr(owner, method)

        @functools.wraps(original)
        def timed_pause(*args: Any, **kwargs: Any) -> Any:
            begin_unix, begin = time.time_ns(), time.perf_counter_ns()
            try:
                return original(*args, **kwargs)
            finally:
                note(kind, method, begin_unix, time.perf_counter_ns() - begin)

        setattr(owner, method, timed_pause)

    def hook(module: Any) -> None:
        paused(module.PPOTrainer, "_start_profiling", "start")
        paused(module.PPOTrainer, "_stop_profiling", "stop")

    register_post_import_hook(hook, "verl.trainer.ppo.v1.trainer_base")
    callback = import_module("verl_profiling.controller.callback").ProfilingCallback
    paused(callback, "on_step_begin", "start")
    paused(callback, "on_step_end", "stop")


def take_turns(steps: list[int]) -> None:
    """Have verl's own profiler record these steps of a run in which this package records others.

    Both at once are refused, so verl's is switched on after the trainer has been made. An engine's
    profiler has one configuration: each side starts one that has its own, as verl made it.
    """

    def switch_on(module: Any) -> None:
        fit = module.PPOTrainer.fit

        @functools.wraps(fit)
        def profiled_fit(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.config.global_profiler.steps = steps
            return fit(self, *args, **kwargs)

        module.PPOTrainer.fit = profiled_fit

    def keep_configuration(module: Any) -> None:
        build = module.build_vllm_profiler_args

        @functools.wraps(build)
        def kept(*args: Any, **kwargs: Any) -> Any:
            made = build(*args, **kwargs)
            os.environ["VERL_PROBE_ENGINE"] = made.get(
                "profiler_config", ""
            )  # engine processes inherit it
            return made

        module.build_vllm_profiler_args = kept

    def choose_profiler(module: Any) -> None:
        profile = module.CPUWorker.profile

        @functools.wraps(profile)
        def chosen(self: Any, is_start: bool = True, profile_prefix: str | None = None) -> None:
            if is_start:
                whose = "ours" if profile_prefix else "verl's"
                profilers = self.__dict__.setdefault("_probe_profilers", {"ours": self.profiler})
                if whose not in profilers:
                    profilers[whose] = verls(module, self)
                self.profiler = profilers[whose]
            profile(self, is_start, profile_prefix)

        module.CPUWorker.profile = chosen

    def verls(module: Any, worker: Any) -> Any:
        config = import_module("vllm.config").ProfilerConfig(
            **json.loads(os.environ["VERL_PROBE_ENGINE"])
        )
        return module.TorchProfilerWrapper(
            config, worker_name="verl", local_rank=worker.local_rank, activities=["CPU"]
        )

    register_post_import_hook(switch_on, "verl.trainer.ppo.v1.trainer_base")
    register_post_import_hook(
        keep_configuration, "verl.workers.rollout.vllm_rollout.vllm_async_server"
    )
    register_post_import_hook(choose_profiler, "vllm.v1.worker.cpu_worker")


def count_calls() -> None:
    """Note every remote call by which a capture is driven."""
    actor = import_module("ray.actor")
    remote = actor.ActorMethod._remote

    @functools.wraps(remote)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "capture" in self._method_name:
            note("call", self._method_name, time.time_ns(), 0)
        return remote(self, *args, **kwargs)

    actor.ActorMethod._remote = counted


measured = os.environ["VERL_PROBE_OF"]
if measured == "hooks":
    register_post_import_hook(probe_timers(inner=True), "verl.utils.profiler")
    probe_methods(inner=True)
    import_module(PLUGIN)
    probe_methods(inner=False)
    probe_requests()
    count_calls()
elif measured in ("pauses", "turns"):
    probe_pauses()
if measured == "turns":
    take_turns([int(step) for step in os.environ["VERL_PROBE_STEPS"].split(",")])
register_post_import_hook(probe_timers(inner=False), "verl.utils.profiler")
