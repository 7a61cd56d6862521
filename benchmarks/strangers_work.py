"""The compute of the loops that ``strangers_judge.py`` runs, and how the judge drives them.

Work is counted in chunks: the forward and backward pass of a small model over 64 tokens (about
1 ms of CPU), and then a sleep, in which a real rank would wait for its device. So a change of the
work is a change of a number, and many processes share two cores without waiting for them.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CHUNK_TOKENS = 64
WIDTH = 192
GAP_S = 0.004  # per chunk: a rank that computes all the time takes a fifth of a core
CAPTURED = 5
"""Steps of a plan that count."""


class Model:
    """A small model that trains."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.ReLU(), torch.nn.Linear(2 * WIDTH, WIDTH)
        )
        self.data = torch.randn(CHUNK_TOKENS, WIDTH)

    def train(self, chunks: int, pace: float = 1.0) -> None:
        """Do the forward and backward pass of some chunks; ``pace`` stretches the gaps."""
        for _ in range(chunks):
            self.net(self.data).square().mean().backward()
            time.sleep(GAP_S * pace)

    def infer(self, chunks: int) -> None:
        """Do the forward pass of some chunks."""
        with torch.no_grad():
            for _ in range(chunks):
                self.net(self.data)
                time.sleep(GAP_S)

    def gradients(self) -> torch.Tensor:
        """Return all gradients as one tensor."""
        grads = [one.grad for one in self.net.parameters() if one.grad is not None]
        return torch.cat([one.reshape(-1) for one in grads])


def serve_plans(run_step: Callable[[int, dict[str, Any]], None], settling: int = 1) -> None:
    """Run the steps of each plan that comes on a line of standard input, one plan after another.

    Prints the last step of each plan.

    Args:
        run_step: Runs a step of a plan.
        settling: Steps that do not count, as work of the plan before may still run in them.
    """
    step = 0
    print("ready", flush=True)
    for line in sys.stdin:
        plan = json.loads(line)
        for _ in range(settling + CAPTURED):
            step += 1
            run_step(step, plan)
        print(step, flush=True)


def settings(folder: Path, **more: Any) -> dict[str, Any]:
    """Return the settings of a run that captures every step."""
    return {
        "enable": True,
        "tool": "spans",
        "save_path": str(folder),
        "schedule": {"every": 1},
        **more,
    }
