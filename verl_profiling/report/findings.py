"""At most five findings: sentences about what stands out, each from a rule with a threshold.

A threshold is a share above which acting is usually worth the effort; all are listed in
``docs/report.md``. If none is exceeded, there are no findings.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from verl_profiling.report.anatomy import CAPTURE_CALLS
from verl_profiling.report.model import Finding, Report

__all__ = ["LIMIT", "THRESHOLDS", "find"]

LIMIT = 5
THRESHOLDS = {
    "waiting_for_rollout": 0.30,  # of the observed time of all lanes
    "long_tail": 0.05,
    "after_generation": 0.05,
    "straggler_wait": 0.03,
    "weight_sync": 0.05,
    "host_bound": 0.15,
    "other_stages": 0.30,
    "capture": 0.05,
    "unexplained": 0.20,
    "exposed_communication": 0.15,  # of the busy time of all lanes
    "late_rank": 0.80,  # of the calls of a collective, when the wait is 3 % of the busy time
}
_LATE_RANK_WAIT = 0.03
_ADVICE = {
    "waiting_for_rollout": "overlap generation with training (asynchronous trainer), or add rollout replicas",
    "long_tail": "balance prompts by expected length, cap the response length, or carry the tail over to the "
    "next step (partial rollout)",
    "after_generation": "overlap the work of the loop there (scoring, moving the responses, polling) with "
    "generation or training",
    "straggler_wait": "balance the micro-batches by tokens, and compare the hosts of slow and fast ranks",
    "weight_sync": "transfer in larger buckets or over a faster path, or synchronise less often",
    "host_bound": "larger micro-batches, CUDA graphs, torch.compile, fewer synchronising calls (.item())",
    "other_stages": "run the stages side by side, or colocate the roles on the same accelerators",
    "capture": "record less: fewer ranks, no stacks or shapes, the other mode, or the spans tool",
    "unexplained": "mark more of the loop with stage(), so that this time gets a name",
}
_CAUSE_TEXT = {
    "waiting_for_rollout": "waited for the rollout",
    "long_tail": "waited for the last replicas of the rollout",
    "after_generation": "were idle in the rollout after the last replica was done",
    "straggler_wait": "waited for slower ranks of their role to end a stage",
    "weight_sync": "were idle while weights went to the engines",
    "host_bound": "were idle inside their own stages: the host did not launch work in time",
    "other_stages": "were idle in stages that they take no part in",
    "capture": "were not recorded, while the capture started and stopped",
    "unexplained": "were idle for no reason that the capture shows",
}


def find(report: Report) -> Report:
    """Return the report with its findings, those those with most seconds at stake first."""
    found = [*_lost(report), *_calls(report), *_communication(report), *_late_ranks(report)]
    found.sort(key=lambda finding: -finding.seconds)
    return msgspec.structs.replace(report, findings=[*_coverage(report), *found][:LIMIT])


def _coverage(report: Report) -> Iterator[Finding]:
    missing = len(report.coverage.missing)
    if missing:
        yield Finding(
            rule="coverage",
            text=f"The capture is not whole ({missing} missing or damaged): the numbers are partial.",
            advice="see what is missing below, and `verl-profiling check`",
            seconds=0.0,
        )


def _lost(report: Report) -> Iterator[Finding]:
    for row in report.lost:
        if row.share >= THRESHOLDS.get(row.cause, 2.0):
            yield Finding(
                rule=row.cause,
                text=f"Lanes {_CAUSE_TEXT[row.cause]}: {row.seconds:.2f} lane-seconds ({row.share:.0%}).",
                advice=_ADVICE[row.cause],
                seconds=row.seconds,
            )


def _calls(report: Report) -> Iterator[Finding]:
    for row in report.stages:
        if row.name == CAPTURE_CALLS and row.share >= THRESHOLDS["capture"]:
            yield Finding(
                rule="capture",
                text=f"Starting and stopping the capture took {row.duration_us / 1e6:.2f} s of the step "
                f"({row.share:.0%}), which a step that is not profiled does not spend.",
                advice=_ADVICE["capture"],
                seconds=row.duration_us / 1e6 * len(report.workers),
            )


def _communication(report: Report) -> Iterator[Finding]:
    busy = sum(row.busy_us for row in report.workers)
    exposed = sum(row.exposed_communication_us for row in report.workers)
    if busy and exposed / busy >= THRESHOLDS["exposed_communication"]:
        yield Finding(
            rule="exposed_communication",
            text=f"{exposed / busy:.0%} of the busy time is communication with no computation beside it.",
            advice="prefetch shards (FSDP), overlap gradient reduction, or use a smaller parallel group",
            seconds=exposed / 1e6,
        )


def _late_ranks(report: Report) -> Iterator[Finding]:
    busy = sum(row.busy_us for row in report.workers) or 1.0
    worst = max(report.collectives, key=lambda row: row.wait_us, default=None)
    if (
        worst
        and worst.calls >= 5
        and worst.late_share >= THRESHOLDS["late_rank"]
        and worst.wait_us / busy >= _LATE_RANK_WAIT
    ):
        yield Finding(
            rule="late_rank",
            text=f"{worst.late} is the last to arrive at {worst.late_share:.0%} of the {worst.calls} runs of "
            f"{worst.name[:60]}.",
            advice="look at what this rank does before it, and at its host",
            seconds=worst.wait_us / 1e6,
        )
