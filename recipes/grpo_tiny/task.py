"""The task: count down from a number to zero, then stop. A token is a number, so there is no tokenizer."""

import random

import torch
from omegaconf import DictConfig
from transformers import Qwen2Config, Qwen2ForCausalLM

NUMBERS = 8
END = NUMBERS
PROMPT_LENGTH = 1
RESPONSE_LENGTH = NUMBERS


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


def sample_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of one number each, e.g. ``[[3], [7]]``."""
    return [[rng.randrange(1, NUMBERS)] for _ in range(count)]


def reward(prompt: list[int], response: list[int]) -> float:
    """Return half a point times the share of correct tokens, plus half a point for the exact answer."""
    start = prompt[-1]
    answer = [*range(start - 1, -1, -1), END]
    follows = sum(
        token == (previous - 1 if previous else END)
        for previous, token in zip([start, *response], response, strict=False)
    )
    return 0.5 * follows / max(len(answer), len(response)) + 0.5 * (response == answer)
