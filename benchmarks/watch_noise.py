"""How often the watch notices something in steps that only vary: simulated,
as that takes many of them.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec

from verl_profiling.files.step_summary import Period, RankUse, StepSummary
from verl_profiling.settings.config import Anomaly
from verl_profiling.watch.process_sums import packed_stages
from verl_profiling.watch.sign_tests import Detector
from verl_profiling.watch.stage_numbers import exposed

__all__ = ["simulated"]

MS = 1_000_000
STAGES = {
    "rollout": ("rollout", 500),
    "reward": ("reward", 50),
    "old_log_prob": ("actor", 100),
    "update_actor": ("actor", 300),
    "update_weights": ("actor", 60),
}
WORKERS = {"rollout": 4, "reward": 1, "actor": 4}
OF_A_RANK = 0.02
"""Standard deviation of the logarithm of what ranks differ by in one stage."""


def simulated(steps: int, spread: float, tail: float) -> dict[str, Any]:
    """Return how often something was noticed in quiet steps.

    Args:
        steps: How many.
        spread: Standard deviation of the logarithm of the time of a stage.
        tail: Share of stages that are longer by a Pareto factor (exponent 2), twice as long in a
            quarter.
    """
    noise, detector, noticed = random.Random(7), Detector(Anomaly()), 0
    for step in range(1, steps + 1):
        noticed += detector.observe(_summary(step, noise, spread, tail)) is not None
    return {"steps": steps, "spread": spread, "tail": tail, "noticed": noticed}


def _process(lane: str, role: str, rank: int, stages: dict[str, list[Period]]) -> RankUse:
    names, runs = packed_stages(stages)
    return RankUse(lane=lane, role=role, rank=rank, stages=names, runs=runs)


def _summary(step: int, noise: random.Random, spread: float, tail: float) -> StepSummary:
    begin_ns = now_ns = step * 10_000 * MS
    loop: dict[str, list[Period]] = {}
    workers: dict[tuple[str, int], dict[str, list[Period]]] = {}
    for stage, (role, usual_ms) in STAGES.items():
        length = usual_ms * noise.lognormvariate(0, spread)
        if noise.random() < tail:
            length *= noise.paretovariate(2)
        lengths = [
            int(length * MS * noise.lognormvariate(0, OF_A_RANK)) for _ in range(WORKERS[role])
        ]
        for rank, own_ns in enumerate(lengths):
            workers.setdefault((role, rank), {})[stage] = [(now_ns, now_ns + own_ns)]
        loop[stage] = [(now_ns, now_ns + max(lengths) + MS)]
        now_ns += max(lengths) + MS
    summary = StepSummary(
        step=step,
        begin_ns=begin_ns,
        end_ns=now_ns + int(5 * MS * noise.lognormvariate(0, 0.3)),
        loop=[_process("controller", "controller", 0, loop)],
        workers=[
            _process(f"{role}_rank{rank}", role, rank, stages)
            for (role, rank), stages in workers.items()
        ],
    )
    return msgspec.structs.replace(summary, exposed=exposed(summary))
