"""Mixins for workers, one file per training framework and one for rollout engines."""

from verl_profiling.engines.request_log import OpenRequest, RequestLog
from verl_profiling.workers.base import (
    AgentLoopCaptureMixin,
    CaptureMixin,
    FSDPCaptureMixin,
    RewardCaptureMixin,
)
from verl_profiling.workers.megatron import CaptureTimers, MegatronCaptureMixin
from verl_profiling.workers.rollout import RolloutCaptureMixin, SGLangCaptureMixin, VLLMCaptureMixin

__all__ = [
    "AgentLoopCaptureMixin",
    "CaptureMixin",
    "CaptureTimers",
    "FSDPCaptureMixin",
    "MegatronCaptureMixin",
    "OpenRequest",
    "RequestLog",
    "RewardCaptureMixin",
    "RolloutCaptureMixin",
    "SGLangCaptureMixin",
    "VLLMCaptureMixin",
]
