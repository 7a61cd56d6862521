"""Why trajectories failed: their errors, and what they were in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from verl_profiling.report.rollout.calls import OTHERS
from verl_profiling.report.rollout.records import short_name
from verl_profiling.report.rollout.rows import FailureRow
from verl_profiling.timeline.step import Source
from verl_profiling.trajectory_log import SpanRecord, TrajectoryLog

__all__ = ["Failures"]

_FATES = ("failed", "cancelled")
_MOST_ROWS = 10

_Key = tuple[bool, str, str, str]


class Failures:
    """Gathers the failed and cancelled trajectories of a step that have an error.

    Args:
        begin_ns: Begin of the step.
        end_ns: End of the step.
    """

    def __init__(self, begin_ns: int, end_ns: int) -> None:
        self._begin_ns, self._end_ns = begin_ns, end_ns
        self._counts: Counter[_Key] = Counter()
        self._examples: dict[_Key, str] = {}

    def seen(self, logs: Iterable[tuple[Source, TrajectoryLog]]) -> Iterator[tuple[Source, TrajectoryLog]]:
        """Yield logs, each with its source, and take from each what failed in it."""
        for source, log in logs:
            self._add(source, log)
            yield source, log

    def rows(self) -> list[FailureRow]:
        """Return the most frequent errors, and the others as one row."""
        ranked = sorted(self._counts.items(), key=lambda item: (item[0][0], -item[1], item[0]))
        rows = [
            FailureRow(
                validate=key[0],
                fate=key[1],
                error=key[2],
                trajectories=count,
                example=self._examples[key],
                span=key[3],
            )
            for key, count in ranked[:_MOST_ROWS]
        ]
        for validate in (False, True):
            rest = sum(count for key, count in ranked[_MOST_ROWS:] if key[0] is validate)
            if rest:
                rows.append(
                    FailureRow(
                        validate=validate, fate="", error=OTHERS, trajectories=rest, example="", span=""
                    )
                )
        return rows

    def _add(self, source: Source, log: TrajectoryLog) -> None:
        first = max(self._begin_ns + source.offset_ns, log.begin_ns)
        last = min(self._end_ns + source.offset_ns, log.end_ns)
        failed = {
            one.id: one
            for one in log.trajectories
            if one.error and one.fate in _FATES and max(one.begin_ns, first) <= min(one.end_ns, last)
        }
        inner: dict[int, SpanRecord] = {}
        for span in log.spans if failed else []:
            if (span.failed or span.open) and span.trajectory in failed:
                known = inner.get(span.trajectory, span)
                inner[span.trajectory] = max(known, span, key=_innermost)
        for one in failed.values():
            span_name = short_name(inner[one.id].name) if one.id in inner else ""
            key = (
                one.facts.get("validate") is True,
                one.fate,
                short_name(" ".join(one.error.split())),
                span_name,
            )
            self._counts[key] += 1
            name = one.group if one.sample is None else f"{one.group}/{one.sample}"
            self._examples.setdefault(key, short_name(name))


def _innermost(span: SpanRecord) -> tuple[bool, int, int]:
    """Order the spans in which a trajectory may have failed: what raised, before what was still open."""
    return span.failed, span.begin_ns, span.id
