"""A loop for ``strangers_judge.py``: one step off policy, as docs/asynchronous-loops.md has it.

Run: ``strangers_one_off.py FOLDER``; see :func:`strangers_work.serve_plans`.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import ray
from strangers_rollout import Workers
from strangers_work import Model, serve_plans, settings

from verl_profiling import ProfilingCallback


def main() -> None:
    """Run the loop."""
    config = settings(Path(sys.argv[1]) / "run")
    workers, model = Workers(config), Model()
    with ThreadPoolExecutor(1) as background, ProfilingCallback(config) as profiling:
        workers.add_to(profiling)
        coming: list[Any] = []

        def generate(step: int, plan: dict[str, Any]) -> None:
            profiling.on_generation_begin()
            try:
                ray.get(workers.agents.play.remote(step, plan))
            finally:
                profiling.on_generation_end()

        def run_step(step: int, plan: dict[str, Any]) -> None:
            if not coming:
                coming.append(background.submit(generate, step, plan))
            profiling.on_step_begin(step, policy_version=step - 1)
            profiling.on_rollout_begin(in_background=True)
            with profiling.stage("wait:rollout"):
                coming.pop().result()
            with profiling.stage("update_weights"):
                workers.load(plan)
            coming.append(background.submit(generate, step + 1, plan))
            with profiling.stage("advantage"):
                model.infer(plan["advantage"])
            with profiling.stage("update_actor"):
                workers.update(plan)
            profiling.on_rollout_end()
            profiling.on_step_end()

        serve_plans(run_step, settling=2)
    ray.shutdown()


if __name__ == "__main__":
    main()
