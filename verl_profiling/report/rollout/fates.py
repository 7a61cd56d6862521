"""What became of trajectories, and what those cost that nothing was made of."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

import numpy as np

from verl_profiling.manifest import Request
from verl_profiling.report.rollout.calls import OTHERS
from verl_profiling.report.rollout.records import Records
from verl_profiling.report.rollout.rows import FateRow

__all__ = ["KEPT", "fate_rows"]

KEPT = ("done", "running")
"""Fates of trajectories that were, or may yet be, of use."""

_MOST_FATES = 20


def fate_rows(records: Records, served: Mapping[int, Request]) -> list[FateRow]:
    """Return trajectories by fate, validation apart, those that cost most time first."""
    spans = records.spans
    tools = np.array([name.startswith("tool:") for name in records.names], dtype=bool)
    owners = spans.trajectory[tools[spans.name]] if len(tools) else spans.trajectory
    calls = np.bincount(owners[owners >= 0], minlength=len(records.trajectories))
    generated = Counter[int]()
    for span, request in served.items():
        generated[int(spans.trajectory[span])] += request.response_tokens
    common = {fate for fate, _ in Counter(one.fate for one in records.trajectories).most_common(_MOST_FATES)}
    seconds: dict[tuple[bool, str], float] = defaultdict(float)
    counts: dict[tuple[bool, str], Counter[str]] = defaultdict(Counter)
    for number, one in enumerate(records.trajectories):
        key = (one.validate, one.fate if one.fate in common else OTHERS)
        seconds[key] += (one.end_ns - one.begin_ns) / 1e9
        tokens, made = one.count("response_tokens"), one.count("tool_calls")
        counts[key].update(
            trajectories=1,
            response_tokens=generated[number] if tokens is None else tokens,
            turns=one.count("turns") or 0,
            tool_calls=int(calls[number]) if made is None else made,
        )
    whole = {kind: sum(took for key, took in seconds.items() if key[0] is kind) for kind in (False, True)}
    ranked = sorted(seconds.items(), key=lambda item: (item[0][0], -item[1], item[0][1]))
    return [
        FateRow(
            validate=validate,
            fate=fate,
            trajectories=counts[validate, fate]["trajectories"],
            seconds=took,
            share=took / whole[validate] if whole[validate] else 0.0,
            response_tokens=counts[validate, fate]["response_tokens"],
            turns=counts[validate, fate]["turns"],
            tool_calls=counts[validate, fate]["tool_calls"],
        )
        for (validate, fate), took in ranked
    ]
