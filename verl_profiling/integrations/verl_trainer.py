"""The mixin that a trainer of your own inherits, to be profiled under verl."""

from __future__ import annotations

from typing import Any

from verl_profiling.integrations.verl.trainer import hook_overrides

__all__ = ["ProfilingTrainerMixin"]


class ProfilingTrainerMixin:
    """A mixin for trainers that override ``fit``, as a coroutine or not; verl's own are hooked already.

    ``class MyTrainer(ProfilingTrainerMixin, RayPPOTrainer): def fit(self): ...``
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        hook_overrides(cls)
