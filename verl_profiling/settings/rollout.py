"""Options of rollout engines: the ``rollout`` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from verl_profiling.errors import ConfigError
from verl_profiling.settings.typed_values import NotNegative, Positive, Seconds

EngineStage = Literal["prefill", "decode"]

_COUNT_WITH_STACKS = 10
_MANY_WITH_STACKS = 100


@dataclass(frozen=True, kw_only=True)
class SGLangOptions:
    """Options that only SGLang has.

    Attributes:
        start_step: Number of the first forward pass that is recorded, counted from the engine's start;
            a number that has passed means the next one. SGLang does not publish the current number.
    """

    start_step: Positive | None = None


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The part of a rollout that its engine records.

    An engine iteration is one forward pass of a whole batch. It makes one token for each request
    that is decoding, so the number of iterations is not a number of tokens.

    Attributes:
        start: Engine iterations that pass before recording begins (vLLM).
        count: Engine iterations that are recorded; ``None`` for no limit, or for 10 with stacks.
        max_window_s: Seconds after which recording ends, whatever else is set; ``None`` for no limit.
        by_stage: Record prefill and decode in separate traces, ``count`` iterations of each (SGLang).
        stop_s: Seconds given to the engine to stop and write its traces; at most nine tenths of
            ``timeouts.stop_s`` are used, so that the result still reaches the callback.
        requests: Log when each request began, got its first token and ended, and its lengths.
        sglang: Options that only SGLang has.
    """

    start: NotNegative = 0
    count: Positive | None = None
    max_window_s: Seconds | None = 30.0
    by_stage: bool = False
    stop_s: Seconds = 300.0
    requests: bool = True
    sglang: SGLangOptions = field(default_factory=SGLangOptions)

    def __post_init__(self) -> None:
        if self.by_stage and self.count is None:
            raise ConfigError(
                "by_stage", "needs rollout.count: how many iterations of prefill and of decode to record"
            )
        if self.by_stage and (self.start or self.sglang.start_step is not None):
            other = "rollout.start" if self.start else "rollout.sglang.start_step"
            raise ConfigError(
                "by_stage", f"excludes {other}; recording begins with the first iteration of each stage"
            )

    def with_stacks(self) -> RolloutOptions:
        """Return these options with a limit on iterations, as a recording with stacks needs it.

        An idle engine polls with a million Python calls a second. Writing these takes far longer than the
        calls.
        """
        return self if self.count is not None else replace(self, count=_COUNT_WITH_STACKS)

    def cautions(self, stacks: bool) -> list[str]:
        """Return why a recording that ends with the rollout may kill its engine; empty if it is bounded."""
        risky = (self.count or 0) > _MANY_WITH_STACKS if stacks else self.count is None
        if self.max_window_s is not None or not risky:
            return []
        return [
            f"rollout.max_window_s is null, and rollout.count is {self.count or 'null'}: a small model has "
            "about 450 events an iteration and rank, with stacks 2,700. Each takes 1.4 kB of the engine's "
            "memory when it stops, and engines were killed by this. Set max_window_s, or a lower count"
        ]

    @property
    def bounded(self) -> bool:
        """Whether recording is limited to a window of iterations, which a short rollout may not reach."""
        return bool(self.start or self.count is not None or self.sglang.start_step is not None)
