"""A loop for ``strangers_judge.py``: agents with a pool of environments, a serial reward service
and a tool that blocks the event loop.

Run: ``strangers_agents.py FOLDER``; see :func:`strangers_work.serve_plans`.
"""

from __future__ import annotations

import sys
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
    with ProfilingCallback(config) as profiling:
        workers.add_to(profiling)

        def run_step(step: int, plan: dict[str, Any]) -> None:
            profiling.on_step_begin(step)
            profiling.on_rollout_begin()
            ray.get(workers.agents.play.remote(step, plan))
            profiling.on_rollout_end()
            with profiling.stage("advantage"):
                model.infer(plan["advantage"])
            with profiling.stage("update_actor"):
                workers.update(plan)
            with profiling.stage("update_weights"):
                workers.load(plan)
            profiling.on_step_end()

        serve_plans(run_step)
    ray.shutdown()


if __name__ == "__main__":
    main()
