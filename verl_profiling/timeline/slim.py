"""Selects what goes into a timeline, and finds the threshold that makes it fit a size."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

import msgspec

from verl_profiling.errors import ConfigError, choices_hint
from verl_profiling.ranks import parse_ranks
from verl_profiling.timeline.step_inputs import StepInputs
from verl_profiling.timeline.trace import Event, Trace
from verl_profiling.trajectory_log import read_log

__all__ = ["Keep", "min_us_for_share", "select_ranks", "stage_windows"]


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Selects events; by default it keeps all. The names of threads are always kept.

    Attributes:
        min_us: Drops complete events (``ph == "X"``) shorter than this.
        windows_ns: Drops events outside all of these spans (unix nanoseconds on the controller's
            clock); empty for no such limit.
    """

    min_us: float = 0.0
    windows_ns: tuple[tuple[int, int], ...] = ()

    def select(self, events: list[Event], base_ns: int) -> list[Event]:
        """Return the events that are kept.

        Args:
            events: Events of one trace.
            base_ns: Unix nanoseconds, on the controller's clock, of their ``ts == 0``.
        """
        if self.min_us:
            events = [e for e in events if e.ph != "X" or (e.dur or 0.0) >= self.min_us]
        if self.windows_ns:
            windows = [((begin - base_ns) / 1000, (end - base_ns) / 1000) for begin, end in self.windows_ns]
            events = [e for e in events if e.ph == "M" or _overlaps(e.ts or 0.0, e.dur or 0.0, windows)]
        return events


def _overlaps(ts: float, dur: float, windows: list[tuple[float, float]]) -> bool:
    return any(ts < end and ts + dur >= begin for begin, end in windows)


def stage_windows(inputs: StepInputs, names: Iterable[str]) -> tuple[tuple[int, int], ...]:
    """Return the spans in which the controller was in one of these stages, in unix nanoseconds.

    Raises:
        ConfigError: The step has no such stage.
    """
    stages = inputs.manifest.stages if inputs.manifest else []
    for name in names:
        if name not in {stage.name for stage in stages}:
            known = choices_hint(name, {stage.name for stage in stages}) if stages else "it has no manifest"
            raise ConfigError("--stages", f"{inputs.title} has no stage {name!r}; {known}")
    wanted = set(names)
    return tuple((stage.begin_ns, stage.end_ns) for stage in stages if stage.name in wanted)


def select_ranks(inputs: StepInputs, ranks: str) -> StepInputs:
    """Return the step with only the lanes of these ranks, e.g. ``0,8-15``.

    A rank counts inside its role, and for a rollout engine inside its replica.

    Raises:
        ConfigError: It is not a list of ranks, or selects nothing.
    """
    wanted = parse_ranks(ranks, "--ranks") or frozenset()
    sources = [source for source in inputs.sources if source.rank in wanted]
    logs = [log for log in inputs.logs if log.rank in wanted]
    if not sources and not logs:
        known = sorted({source.rank for source in (*inputs.sources, *inputs.logs)})
        raise ConfigError("--ranks", f"{ranks!r} selects nothing; there are ranks {known}")
    return msgspec.structs.replace(inputs, sources=sources, logs=logs)


def min_us_for_share(inputs: StepInputs, share: float) -> float:
    """Return the power of two that, as ``min_us``, keeps at most this share of a step's events."""
    counts: Counter[int] = Counter()
    for source in inputs.sources:
        for events in Trace(source.path, inputs.limits).chunks():
            counts.update(math.frexp(event.dur or 0.0)[1] for event in events if event.ph == "X")
    for request in (
        r for worker in (inputs.manifest.workers if inputs.manifest else ()) for r in worker.requests
    ):
        spans = [(request.begin_ns, request.end_ns), *(part[1:] for part in request.parts())]
        counts.update(math.frexp((end - begin) / 1000)[1] for begin, end in spans)
    for log in inputs.logs:
        found = read_log(log.path, inputs.limits.reached)
        lasting = (line for part in (found.spans, found.trajectories, found.blocks) for line in part)
        counts.update(math.frexp((line.end_ns - line.begin_ns) / 1000)[1] for line in lasting)
    budget = share * counts.total()
    for exponent in sorted(counts, reverse=True):
        budget -= counts[exponent]
        if budget < 0:
            return 2.0**exponent
    return 0.0
