"""AReaL's PPOTrainer with a tiny model, on a CPU: ``python -m recipes.areal_tiny.train``."""

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from areal import PPOTrainer
from areal.api.cli_args import GRPOConfig, load_expr_config
from datasets import Dataset

from recipes.grpo_tiny.model import build_model
from recipes.grpo_tiny.tokenizer import make_tokenizer
from verl_profiling.integrations.areal import areal_profiling
from verl_profiling.integrations.tiny_grpo import NUMBERS, reward

CONFIG = Path(__file__).with_name("config.yaml")
ONE_RANK = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29577",
}
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def count_down(
    text: str, completion: str, prompt_ids: list[int], completion_ids: list[int], **columns: Any
) -> float:
    """Return the task's reward of a completion."""
    return reward(list(prompt_ids), list(completion_ids))


def prompt_of(row: dict[str, Any]) -> str:
    """Return the prompt of a row."""
    return row["prompt"]


def input_ids(prompt: str, tokenizer: Any, enable_thinking: bool) -> list[int]:
    """Return a prompt as the model reads it."""
    return tokenizer(prompt)["input_ids"]


@contextmanager
def serving(model: str) -> Iterator[None]:
    """Run the inference server, and tell AReaL where it is."""
    command = [sys.executable, "-m", "recipes.areal_tiny.server", model]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            os.environ["AREAL_LLM_SERVER_ADDRS"] = f"127.0.0.1:{server.stdout.readline().strip()}"
            yield
        finally:
            server.terminate()


def main() -> None:
    """Train in this process, as AReaL's launchers have each rank do."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiling", choices=["e2e", "discrete", "off"], default="e2e")
    arguments, overrides = parser.parse_known_args()
    os.environ |= {**ONE_RANK, **os.environ, "AREAL_SPMD_MODE": "1"}
    torch._dynamo.config.disable = True  # compiling for a CPU takes longer than this run
    config, _ = load_expr_config(["--config", str(CONFIG), *overrides], GRPOConfig)
    build_model(MODEL, seed=0).save_pretrained(config.actor.path)
    make_tokenizer().save_pretrained(config.actor.path)
    profiling = {
        "enable": arguments.profiling != "off",
        "mode": arguments.profiling.replace("off", "e2e"),
        "save_path": f"{config.cluster.fileroot}/profiling",
        "watch": {"enable": True},  # every step has a summary
        "schedule": {"steps": [2, 3]},
    }
    numbers = Dataset.from_list([{"prompt": str(number)} for number in range(1, NUMBERS)] * 20)
    workflow = {
        "reward_fn": count_down,
        "gconfig": config.gconfig,
        "tokenizer": config.tokenizer_path,
        "get_input_ids_fn": input_ids,
        "data_extract_prompt_fn": prompt_of,
    }
    with (
        serving(config.actor.path),
        PPOTrainer(config, train_dataset=numbers) as trainer,
        areal_profiling(profiling),
    ):
        trainer.train(workflow="areal.workflow.rlvr.RLVRWorkflow", workflow_kwargs=workflow)


if __name__ == "__main__":
    main()
