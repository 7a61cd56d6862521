"""Options of rollout engines: the ``rollout`` group of the configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace

from verl_profiling.typed_values import NotNegative, Positive, Seconds

_COUNT_WITH_STACKS = 10
_MANY_WITH_STACKS = 100


@dataclass(frozen=True, kw_only=True)
class RolloutOptions:
    """The part of a rollout that its engine records.

    An engine iteration is one forward pass of a whole batch. An iteration makes one token for each
    decoding request, so iterations are not tokens.

    Attributes:
        start: Engine iterations before the begin of recording (vLLM).
        count: Engine iterations to record; ``None`` for no limit, or for 10 with stacks.
        max_window_s: Seconds after which recording ends in any case; ``None`` for no limit.
        stop_s: Timeout (s) of the engine's stop and of writing its traces; at most nine tenths of
            ``timeouts.stop_s``, so that the result still reaches the callback.
        requests: Log begin, first token, end and lengths of each request.
    """

    start: NotNegative = 0
    count: Positive | None = None
    max_window_s: Seconds | None = 30.0
    stop_s: Seconds = 300.0
    requests: bool = True

    def with_stacks(self) -> RolloutOptions:
        """Return these options with a limit on iterations, for a recording with stacks.

        An idle engine polls with a million Python calls a second. Writing these calls takes far
        longer than the calls themselves.
        """
        return self if self.count is not None else replace(self, count=_COUNT_WITH_STACKS)

    def cautions(self, stacks: bool) -> list[str]:
        """Return a warning that an unbounded recording may kill its engine;
        empty for a bounded recording.
        """
        risky = (self.count or 0) > _MANY_WITH_STACKS if stacks else self.count is None
        if self.max_window_s is not None or not risky:
            return []
        return [
            f"rollout.max_window_s is null, and rollout.count is {self.count or 'null'}: a small "
            "model has about 450 events an iteration and rank, with stacks 2,700. Each takes 1.4 "
            "kB of the engine's memory when it stops, and engines were killed by this. Set "
            "max_window_s, or a lower count"
        ]

    @property
    def bounded(self) -> bool:
        """Whether recording is limited to a window of iterations,
        which may be beyond a short rollout.
        """
        return bool(self.start or self.count is not None)
