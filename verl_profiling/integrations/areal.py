"""Profiles AReaL's PPOTrainer by ``with areal_profiling(settings):`` around the call of ``train``.

AReaL marks each part of its loop by ``perf_tracer.trace_scope("train.<part>")``, even without its
own tracer. A wrapper of ``trace_scope`` calls the callback. A step lasts from ``train.rollout`` to
the end of ``train.log_stats``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from areal.utils import perf_tracer
from areal.utils.environ import is_single_controller

from verl_profiling.capture.session import stage
from verl_profiling.controller.callback import ProfilingCallback
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import CaptureMixin

__all__ = ["areal_profiling"]

_ROLE = "actor"
_PREFIX = "train."
_FIRST = "rollout"
_LAST = "log_stats"
# Names of stages by the part of AReaL's loop, if the two names differ.
_STAGES = {
    "compute_values": "values",
    "ref_logp": "ref_log_prob",
    "recompute_logp": "old_log_prob",
    "compute_advantage": "advantage",
    "ppo_update": "update_actor",
    "critic_ppo_update": "update_critic",
    "save": "save_checkpoint",
    "eval": "validate",
}


@contextmanager
def areal_profiling(
    config: ProfilingConfig | Mapping[str, Any] | None,
) -> Iterator[ProfilingCallback]:
    """Profile the steps of the trainer whose ``train`` runs in the block, in this process.

    If each rank runs the trainer (``AREAL_SPMD_MODE``), this process is recorded as a rank of role
    ``actor``. In AReaL's single-controller mode the training engines are other processes, and only
    the loop's own stages are recorded. Exceptions propagate unchanged, and earlier recordings are
    kept.

    Args:
        config: Settings, as for :class:`ProfilingCallback`. With ``enable: false``, nothing is
            replaced.

    Raises:
        ConfigError: The settings are wrong.
        ToolUnavailableError: A tool cannot work on this machine.
    """
    profiling = ProfilingCallback(config)
    if not profiling.config.enable:
        yield profiling
        return
    if not is_single_controller():
        worker = CaptureMixin()
        worker.init_capture(profiling.config, role=_ROLE)
        profiling.add_workers(_ROLE, worker)
    trace_scope = perf_tracer.trace_scope
    perf_tracer.trace_scope = _with_hooks(trace_scope, profiling)
    try:
        with profiling:
            yield profiling
    finally:
        perf_tracer.trace_scope = trace_scope


def _with_hooks(
    trace_scope: Callable[..., Any], profiling: ProfilingCallback
) -> Callable[..., Any]:
    def scope(name: str, **options: Any) -> AbstractContextManager[Any]:
        traced: AbstractContextManager[Any] = trace_scope(name, **options)
        if not name.startswith(_PREFIX):
            return traced
        return part(name.removeprefix(_PREFIX), traced, options.get("args") or {})

    @contextmanager
    def part(
        name: str, traced: AbstractContextManager[Any], args: Mapping[str, int]
    ) -> Iterator[None]:
        if name == _FIRST:
            version = args["global_step"]
            profiling.on_step_begin(version + 1, policy_version=version)
        of_stage = _STAGES.get(name, name)
        with traced, profiling.stage(of_stage), stage(of_stage):
            yield
        if name == _LAST:
            profiling.on_step_end()

    return scope
