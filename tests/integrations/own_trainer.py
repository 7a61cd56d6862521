"""A plugin for verl: a trainer class of one's own, whose loop this package has not hooked."""

from __future__ import annotations

from typing import Any

from wrapt import register_post_import_hook


def hook(module: Any) -> None:
    """Replace verl's trainer with a subclass that overrides ``fit``."""
    from verl_profiling.integrations.verl.trainer import ProfilingTrainerMixin

    name = "colocate_async"
    base = module.TRAINER_REGISTRY[name]
    unhooked_fit = base.fit.__wrapped__

    class OwnTrainer(ProfilingTrainerMixin, base):  # type: ignore[misc, valid-type]
        def fit(self, agent_loop_manager: Any) -> Any:
            print("the own trainer's loop runs")
            return unhooked_fit(self, agent_loop_manager)

    module.TRAINER_REGISTRY[name] = OwnTrainer


def wait(module: Any) -> None:
    """Register the hook behind this package's own, which is registered for the same module."""
    register_post_import_hook(lambda _: hook(module), "verl.trainer.ppo.v1.trainer_colocate_async")


register_post_import_hook(wait, "verl.trainer.ppo.v1.trainer_base")
