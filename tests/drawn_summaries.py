"""Summaries of steps as the watch makes them, for tests of what becomes of them."""

from __future__ import annotations

from collections.abc import Sequence

from verl_profiling.files.step_summary import ExposedStage, RankUse, SpanTotal, StepSummary

MS = 1_000_000
BEGIN_NS = 1_700_000_000_000_000_000
STAGES = {"rollout": 5000, "old_log_prob": 1000, "update_actor": 3000}


def summary(
    step: int,
    exposed_ms: dict[str, float] | None = None,
    *,
    leader: str = "actor_rank2",
    captured: str = "",
    peak_bytes: int | None = 6_000_000_000,
    spans: Sequence[SpanTotal] = (),
) -> StepSummary:
    """Return the summary of a step of a loop that calls four ranks of an actor."""
    times = {**(STAGES if exposed_ms is None else exposed_ms), "": 500}
    begin_ns = BEGIN_NS + step * 60_000 * MS
    made = StepSummary(
        step=step,
        begin_ns=begin_ns,
        end_ns=begin_ns + round(sum(times.values()) * MS),
        loop=[RankUse(lane="controller", role="controller")],
        workers=[RankUse(lane="agent_loop_rank0", role="agent_loop", spans=list(spans))]
        * bool(spans)
        + [
            RankUse(
                lane=f"actor_rank{rank}",
                role="actor",
                rank=rank,
                peak_bytes=None if peak_bytes is None else peak_bytes + rank * 10**9,
                held_bytes=None if peak_bytes is None else peak_bytes // 2,
            )
            for rank in range(4)
        ],
        exposed=[
            ExposedStage(
                name=name,
                exposed_ns=round(ms * MS),
                role="actor" if name else "controller",
                leader=leader if name else "",
                lead_ns=round(ms * MS / 10) if name and leader else 0,
                imbalance=1.25 if name else 1.0,
            )
            for name, ms in times.items()
        ],
        captured=captured,
    )
    made.add_up()
    return made
