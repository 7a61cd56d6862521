"""The task: count down from a number to zero, then stop. A token is a number,
so there is no tokenizer.
"""

import random

NUMBERS = 8
END = NUMBERS
PROMPT_LENGTH = 1
RESPONSE_LENGTH = NUMBERS


def sample_prompts(count: int, rng: random.Random) -> list[list[int]]:
    """Return prompts of one number each, e.g. ``[[3], [7]]``."""
    return [[rng.randrange(1, NUMBERS)] for _ in range(count)]


def reward(prompt: list[int], response: list[int]) -> float:
    """Return half a point times the share of correct tokens,
    plus half a point for the exact answer.
    """
    start = prompt[-1]
    answer = [*range(start - 1, -1, -1), END]
    follows = sum(
        token == (previous - 1 if previous else END)
        for previous, token in zip([start, *response], response, strict=False)
    )
    return 0.5 * follows / max(len(answer), len(response)) + 0.5 * (response == answer)
