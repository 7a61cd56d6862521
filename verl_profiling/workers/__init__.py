"""Mixins that add capture methods to training workers and rollout servers."""

from verl_profiling.engines.request_log import OpenRequest, RequestLog
from verl_profiling.workers.base import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    CaptureTimers,
    FSDPCaptureMixin,
    MegatronCaptureMixin,
    RewardCaptureMixin,
)
from verl_profiling.workers.nsys_launch import nsys_runtime_env
from verl_profiling.workers.processes import EngineProcesses, WorkerProcesses, join_callback
from verl_profiling.workers.rollout import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

__all__ = [
    "AgentLoopCaptureMixin",
    "CaptureMixin",
    "CaptureTimers",
    "EngineProcesses",
    "FSDPCaptureMixin",
    "MegatronCaptureMixin",
    "OpenRequest",
    "RequestLog",
    "RewardCaptureMixin",
    "RolloutCaptureMixin",
    "SGLangCaptureMixin",
    "VLLMCaptureMixin",
    "WorkerProcesses",
    "join_callback",
    "nsys_runtime_env",
]
