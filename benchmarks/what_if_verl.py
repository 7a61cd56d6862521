"""Real verl for ``what_if_judge.py``, with a workload that is replayed.

Run: ``what_if_verl.py FOLDER RECIPE OVERRIDES PLANS``, as ``what_if_recipes.py``. verl starts for
minutes, so all plans are steps of one run of ``verl.trainer.main_ppo``. The steps of A and B take
turns, so that a busy machine slows both. Each step has the same prompts, and says in its data how
long tool and reward take. The model samples its likeliest token and learns nothing, so all steps
have the same responses.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pandas

from recipes.verl_grpo_cpu import make_assets

ROOT = Path(__file__).resolve().parents[1]
USER = "pkg://benchmarks.what_if_verl_user"
WARM, CAPTURED = 1, 5
"""Steps of a plan."""
PROMPTS = 4
SCHEMA = """
tools:
  - class_name: benchmarks.what_if_verl_user.Search
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: search
        description: Searches.
        parameters: {type: object, properties: {}, required: []}
"""


@dataclass(frozen=True)
class Plan:
    """The work of a run.

    Attributes:
        tool_s: Duration of a call of the tool (s).
        reward_s: Duration of scoring a sample (s).
        poll_s: Interval in which the trainer looks for responses (s).
        epochs: Epochs of the update.
    """

    tool_s: float = 0.5
    reward_s: float = 0.5
    poll_s: float = 0.05
    epochs: int = 2


def write_assets(folder: Path, planned: list[Plan]) -> None:
    """Write the model, and the prompts of all steps."""
    make_assets.main(folder)
    rows = []
    for plan in planned:
        for row in make_assets.make_data().to_dict("records")[:PROMPTS]:
            tools = {"search": {"create_kwargs": {"seconds": plan.tool_s}}}
            rows.append({**row, "extra_info": {"tools_kwargs": tools, "reward_s": plan.reward_s}})
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    (folder / "tools.yaml").write_text(SCHEMA)


def main() -> None:
    """Run the plans, and give each a folder of its own."""
    folder, recipe, overrides, plans = (
        Path(sys.argv[1]),
        sys.argv[2],
        *map(json.loads, sys.argv[3:]),
    )
    turns = [(pair, turn) for pair in range(0, len(plans), 2) for turn in range(WARM + CAPTURED)]
    numbers = [pair + one for pair, _ in turns for one in (0, 1)]
    captured = [
        2 * at + one for at, (_, turn) in enumerate(turns) for one in (1, 2) if turn >= WARM
    ]
    planned = [Plan(**plans[number]) for number in numbers]
    with tempfile.TemporaryDirectory(prefix="verl-") as own:
        write_assets(Path(own, "assets"), planned)
        rollout, sampler = "actor_rollout_ref.rollout", "trainer.v1.sampler"
        command = [
            str(ROOT / "recipes" / recipe / "run.sh"),
            f"trainer.total_training_steps={len(planned)}",
            f"data.train_batch_size={PROMPTS}",
            "data.shuffle=false",
            "data.max_response_length=128",
            "actor_rollout_ref.actor.optim.lr=0",
            f"{rollout}.top_k=1",
            f"{rollout}.max_model_len=256",
            f"{rollout}.multi_turn.enable=true",
            f"{rollout}.multi_turn.format=always",
            f"{rollout}.multi_turn.max_assistant_turns=2",
            f"{rollout}.multi_turn.tool_config_path={own}/assets/tools.yaml",
            f"{rollout}.agent.default_agent_loop=tool_agent",
            f"reward.custom_reward_function.path={USER}",
            f"{sampler}.custom_sampler.path={USER}",
            f"{sampler}.custom_sampler.name=Planned",
            f"+{sampler}.sampler_kwargs.poll_s={[plan.poll_s for plan in planned]}",
            f"+{sampler}.sampler_kwargs.epochs={[plan.epochs for plan in planned]}",
            f"profiling.schedule.steps={captured}",
            f"profiling.save_path={folder / 'all'}",
            f"hydra.run.dir={own}",
            *overrides,
        ]
        variables = {"PYTHON": sys.executable, "ASSETS": f"{own}/assets", "RAY_TMPDIR": own}
        subprocess.run(command, env={**os.environ, **variables}, check=True)
    for step in captured:
        mine = folder / str(numbers[step - 1])
        mine.mkdir(exist_ok=True)
        shutil.copy(folder / "all/run.json", mine)
        shutil.move(folder / f"all/step_{step:06d}", mine)


if __name__ == "__main__":
    main()
