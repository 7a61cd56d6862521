"""Profiles TRL's trainers that generate (GRPO, RLOO, and their subclasses), by one line::

    trainer.add_callback(TRLProfilingCallback(trainer, settings))

A step is a step of transformers: one update by the optimizer, with the number in the logs. TRL
generates ``steps_per_generation`` batches together, before the first of them is used, so a step has
one rollout, several, or none. Every process runs the trainer, and is recorded as a rank of the role
``actor``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from transformers import Trainer, TrainerCallback

from verl_profiling.capture.session import stage
from verl_profiling.controller.callback import ProfilingCallback
from verl_profiling.errors import CaptureStateError
from verl_profiling.integrations.hooks import mark, noting, wrap
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers import CaptureMixin

__all__ = ["TRLProfilingCallback"]

logger = logging.getLogger(__name__)

_ROLE = "actor"
# Names of stages by the method of the trainer that is the whole stage.
_STAGES = {"_generate": "rollout", "_save_checkpoint": "save_checkpoint"}
_ADVANTAGE, _UPDATE = "advantage", "update_actor"
_MARKED = "_verl_profiling"


class TRLProfilingCallback(TrainerCallback):  # type: ignore[misc]  # no types of transformers are read
    """Profiles the steps of a trainer after ``trainer.add_callback``.

    With ``enable: false``, the trainer is left unchanged. An exception of the training propagates
    unchanged, and earlier recordings are kept.

    Args:
        trainer: The trainer, made and ready to train.
        config: Settings, as for :class:`ProfilingCallback`.

    Raises:
        TypeError: ``trainer`` is no trainer of transformers.
        ConfigError: The settings are wrong.
        CaptureStateError: The trainer is profiled already.
        ToolUnavailableError: A tool cannot work on this machine.

    Attributes:
        profiling: The callback of the profiler, called at each step.
    """

    def __init__(
        self, trainer: Trainer, config: ProfilingConfig | Mapping[str, Any] | None
    ) -> None:
        if not isinstance(trainer, Trainer):
            raise TypeError(
                f"TRLProfilingCallback: a trainer of TRL is needed, not {type(trainer).__name__}"
            )
        if hasattr(trainer, _MARKED):
            raise CaptureStateError(
                f"this {type(trainer).__name__} has a TRLProfilingCallback already"
            )
        self.profiling = ProfilingCallback(config)
        self._trainer = trainer
        self._open = ExitStack()
        self._current: str | None = None
        self._validating = False
        if self.profiling.config.enable:
            worker = CaptureMixin()
            worker.init_capture(self.profiling.config, role=_ROLE)
            self.profiling.add_workers(_ROLE, worker)
            self._mark()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin a step, before its first batch is prepared."""
        self.profiling.on_step_begin(state.global_step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """End a step, after the optimizer's update."""
        self._turn_to(None)
        self.profiling.on_step_end()

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **_: Any
    ) -> None:
        """Add the logged metrics of the trainer to their step."""
        self.profiling.add_metrics(state.global_step, logs)

    def _mark(self) -> None:
        """Mark methods of this trainer object as stages."""
        trainer = self._trainer
        marked: dict[str, Callable[[], AbstractContextManager[None]]] = {
            **{name: partial(self._stage, of_stage) for name, of_stage in _STAGES.items()},
            "train": self._training,
            "evaluate": self._validation,
            "_generate_and_score_completions": self._scoring,
            "_calculate_rewards": self._rewards,
        }
        wrapped: dict[str, Callable[..., Any]] = {
            "_prepare_inputs": self._then_update,
            "_get_per_token_logps_and_entropies": self._log_probs,
        }
        missing: list[str] = []
        with noting(missing):
            for name, opened in marked.items():
                mark(trainer, name, opened)
            for name, wrapper in wrapped.items():
                wrap(trainer, name, wrapper)
        if missing:
            kind = f"{type(trainer).__module__}.{type(trainer).__qualname__}"
            logger.warning(
                "profiling: %s has no %s, which is not recorded", kind, ", ".join(missing)
            )
        if (engine := getattr(trainer, "vllm_generation", None)) is not None:
            mark(engine, "sync_weights", partial(self._stage, "update_weights"))
        setattr(trainer, _MARKED, self)

    @contextmanager
    def _training(self) -> Iterator[None]:
        self._current = None
        with self.profiling, self._open:
            yield

    @contextmanager
    def _stage(self, name: str) -> Iterator[None]:
        """Mark a stage of the loop and of the worker in this process."""
        if self._validating:
            yield
        else:
            with self.profiling.stage(name), stage(name):
                yield

    def _turn_to(self, name: str | None) -> None:
        """End the open stage that spans several methods of the trainer; begin the next stage.

        Args:
            name: Name of the next stage; ``None`` for no stage.
        """
        self._open.close()
        self._current = name
        if name is not None:
            self._open.enter_context(self._stage(name))

    @contextmanager
    def _validation(self) -> Iterator[None]:
        with self._stage("validate"):
            self._validating = True
            try:
                yield
            finally:
                self._validating = False

    @contextmanager
    def _scoring(self) -> Iterator[None]:
        self._turn_to(None)
        yield
        self._turn_to(None)

    @contextmanager
    def _rewards(self) -> Iterator[None]:
        """Mark the stage ``reward``, then ``advantage`` until the batch is scored."""
        with self._stage("reward"):
            yield
        self._turn_to(_ADVANTAGE)

    def _then_update(self, prepare_inputs: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Begin the stage ``update_actor`` once the trainer's ``_prepare_inputs`` has returned.

        The stage ends with the next rollout or step.
        """
        inputs = prepare_inputs(*args, **kwargs)
        if self._current != _UPDATE and not self._validating:
            self._turn_to(_UPDATE)
        return inputs

    def _log_probs(
        self, log_probs: Callable[..., Any], model: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Mark forward passes over generated tokens as stages,
        except inside the stage ``update_actor``.
        """
        if self._current == _UPDATE:
            return log_probs(model, *args, **kwargs)
        with self._stage("ref_log_prob" if self._is_reference(model) else "old_log_prob"):
            return log_probs(model, *args, **kwargs)

    def _is_reference(self, model: Any) -> bool:
        """Return whether a model is the reference.

        The reference is another model, or the policy without an adapter or with the adapter
        ``ref``.
        """
        if model is getattr(self._trainer, "ref_model", None):
            return True
        status_of = getattr(self._trainer.accelerator.unwrap_model(model), "get_model_status", None)
        if status_of is None:
            return False
        status = status_of()
        return not status.enabled or "ref" in status.active_adapters
