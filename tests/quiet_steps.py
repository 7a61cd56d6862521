"""Summaries of steps that nobody ran: a controller with engines and training ranks."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import msgspec

from verl_profiling.files.step_summary import RankUse, StepSummary
from verl_profiling.watch.process_sums import packed_stages
from verl_profiling.watch.stage_numbers import exposed

MS = 1_000_000
USUAL = {"rollout": 500.0, "reward": 50.0, "update_actor": 300.0, "update_weights": 100.0}
RANKS = 4
CONTROLLER = RankUse(lane="controller", role="controller")


def with_stages(use: RankUse, stages: Mapping[str, Sequence[tuple[int, int]]]) -> RankUse:
    """Return a process with stages, from begin and end of each run of each stage (ns)."""
    names, runs = packed_stages(stages)
    return msgspec.structs.replace(use, stages=names, runs=runs)


def summary(
    step: int,
    times: Mapping[str, float] = USUAL,
    *,
    slow: Mapping[str, float] | None = None,
    held: Mapping[str, int] | None = None,
    noise: random.Random | None = None,
    read: bool = True,
    captured: str = "",
) -> StepSummary:
    """Return a step of a controller with engines and training ranks."""
    begin_ns = step * 10_000 * MS
    now_ns = begin_ns + MS
    loop: dict[str, list[tuple[int, int]]] = {}
    lanes: dict[str, tuple[RankUse, dict[str, list[tuple[int, int]]]]] = {}
    for stage, usual in times.items():
        role = "rollout" if stage.endswith("rollout") else "actor"
        longest = 0
        for rank in range(RANKS if stage != "reward" else 0):
            lane = f"rollout{rank}_rank0" if role == "rollout" else f"actor_rank{rank}"
            factor = (slow or {}).get(lane, 1.0) * (
                noise.lognormvariate(0, 0.02) if noise else 1 + rank / 1e3
            )
            own_ns = int(usual * factor * MS)
            use = RankUse(
                lane=lane, role=role, rank=rank, replica=rank if role == "rollout" else None
            )
            lanes.setdefault(lane, (use, {}))[1][stage] = [(now_ns, now_ns + own_ns)]
            longest = max(longest, own_ns)
        duration_ns = MS + (longest or int(usual * MS))
        loop[stage] = [(now_ns, now_ns + duration_ns)]
        now_ns += duration_ns
    workers = [
        msgspec.structs.replace(with_stages(use, stages), held_bytes=(held or {}).get(use.lane))
        for use, stages in lanes.values()
    ]
    found = StepSummary(
        step=step,
        begin_ns=begin_ns,
        end_ns=now_ns + MS,
        loop=[with_stages(CONTROLLER, loop)],
        workers=workers if read else [],
        captured=captured,
    )
    return msgspec.structs.replace(found, exposed=exposed(found))


def longer(stage: str, ratio: float) -> dict[str, float]:
    """Return the usual times, with one stage longer."""
    return {**USUAL, stage: USUAL[stage] * ratio}
