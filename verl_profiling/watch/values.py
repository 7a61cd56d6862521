"""A step summary as named numbers, for trackers such as TensorBoard."""

from __future__ import annotations

from verl_profiling.step_summary import StepSummary

PREFIX = "profiling/watch/"
_IN_NO_STAGE = "in_no_stage"


def values_of(summary: StepSummary) -> dict[str, float]:
    """Return a step's duration, exposed time and leader by stage, memory by role, and span totals.

    A stage without a clear leader has no ``leader_rank``: a curve of ranks that led by chance means nothing.
    """
    ranks = {process.lane: process.rank for process in (*summary.loop, *summary.workers)}
    values = {f"{PREFIX}step_s": summary.seconds}
    for row in summary.exposed:
        stage = f"{PREFIX}{row.name or _IN_NO_STAGE}"
        values[f"{stage}/exposed_s"] = row.exposed_ns / 1e9
        if row.name:
            values[f"{stage}/imbalance"] = row.imbalance
        if row.leader in ranks:
            values[f"{stage}/leader_rank"] = float(ranks[row.leader])
    for role in summary.memory:
        for name, size in (("peak", role.peak_bytes), ("held", role.held_bytes)):
            if size is not None:
                values[f"{PREFIX}memory/{role.role}/{name}_bytes"] = float(size)
    for total in summary.spans:
        span = f"{PREFIX}spans/{total.name}"
        values[f"{span}/total_s"] = total.seconds
        values[f"{span}/count"] = float(total.runs)
        values[f"{span}/failed"] = float(total.failed)
    return values
