"""Mixins for workers, one file per training framework."""

from verl_profiling.workers.base import CaptureMixin
from verl_profiling.workers.fsdp import FSDPCaptureMixin

__all__ = ["CaptureMixin", "FSDPCaptureMixin"]
