"""Draws the reward of a run: ``python -m recipes.grpo_tiny.plot outputs/grpo_tiny reward.png``."""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot_reward(run: Path, picture: Path) -> None:
    """Draw what ``metrics.jsonl`` of a run holds."""
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(7, 2.8), dpi=160, layout="constrained")
    numbers = [step["step"] for step in steps]
    axes.plot(
        numbers, [step["reward"] for step in steps], color="#1f5fbf", lw=2, label="mean reward"
    )
    axes.plot(
        numbers,
        [step["solved"] for step in steps],
        color="#d9822b",
        lw=1.5,
        ls="--",
        label="share of exact answers",
    )
    axes.set(xlabel="step", ylim=(0, 1.02), xlim=(1, numbers[-1]))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture)


if __name__ == "__main__":
    plot_reward(Path(sys.argv[1]), Path(sys.argv[2]))
