"""The policy: a Qwen2 with random weights, small enough for a CPU core.

``python -m recipes.grpo_tiny.model FOLDER`` writes it into a folder, for ``verl-profiling replay``.
"""

import sys
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl_profiling.integrations.tiny_grpo import END, NUMBERS


def build_model(config: DictConfig, seed: int) -> Qwen2ForCausalLM:
    """Return a tiny Qwen2; equal seeds give equal weights."""
    torch.manual_seed(seed)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=NUMBERS + 1,
            max_position_embeddings=32,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=END,
            pad_token_id=END,
            **config,
        )
    )


if __name__ == "__main__":
    recipe = OmegaConf.load(Path(__file__).with_name("config.yaml"))
    build_model(recipe.model, recipe.seed).save_pretrained(sys.argv[1])
