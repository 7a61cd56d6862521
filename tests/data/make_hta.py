"""Writes ``hta.json``: the figures of HolisticTraceAnalysis 0.5.0 for the GPU traces beside it."""

from __future__ import annotations

import json
import os
from math import isnan
from pathlib import Path

DATA = Path(__file__).parent
TRACES = (
    *("nccl_data.json.gz", "sampled_rank-0.json.gz", "sampled_rank-1.json.gz"),
    "h100/vllm/step_000004/actor_rank0.torch.json.gz",
    "h100/vllm/step_000004/rollout0_rank0.torch.json.gz",
)


def hta_figures(trace: Path) -> dict[str, float | None]:
    """Return HTA's idle and compute (us and % of the span) and its overlap (% of communication)."""
    os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
    from hta.trace_analysis import TraceAnalysis

    analysis = TraceAnalysis(trace_files={0: str(trace)}, include_last_profiler_step=True)
    breakdown = analysis.get_temporal_breakdown(visualize=False).iloc[0]
    overlap = analysis.get_comm_comp_overlap(visualize=False).iloc[0]
    return {
        "span_us": float(breakdown["kernel_time(us)"]),
        "idle_us": float(breakdown["idle_time(us)"]),
        "compute_us": float(breakdown["compute_time(us)"]),
        "idle_percent": float(breakdown["idle_time_pctg"]),
        "compute_percent": float(breakdown["compute_time_pctg"]),
        # No number without communication.
        "overlap_percent": None
        if isnan(shared := float(overlap["comp_comm_overlap_pctg"]))
        else shared,
    }


if __name__ == "__main__":
    figures = {name: hta_figures(DATA / name) for name in TRACES}
    (DATA / "hta.json").write_text(json.dumps(figures, indent=2) + "\n")
