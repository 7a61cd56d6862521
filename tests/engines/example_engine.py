"""A rollout server whose engine is its own: what it takes to see its requests in the report."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import torch

from verl_profiling.workers import RequestLog, RolloutCaptureMixin

VOCABULARY = 64


class OwnServer(RolloutCaptureMixin):
    """Generates token by token with a model of its own, in this process."""

    def __init__(self, profiling: Any, replica: int) -> None:
        torch.manual_seed(replica)
        self._model = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 32), torch.nn.Linear(32, VOCABULARY)
        )
        self._requests = RequestLog()
        self.init_capture(profiling, replica=replica, requests=self._requests)

    async def generate(self, prompt: Sequence[int], max_tokens: int) -> list[int]:
        """Answer one request; several may be under way at the same time."""
        with self._requests.open(prompt_tokens=len(prompt)) as request:
            tokens = list(prompt)
            for _ in range(max_tokens):
                tokens.append(self._next_token(tokens))
                request.first_token()
                request.response_tokens += 1
                await asyncio.sleep(0)
            return tokens[len(prompt) :]

    @torch.no_grad()
    def _next_token(self, tokens: list[int]) -> int:
        if max(tokens) >= VOCABULARY:
            raise ValueError(f"no token {max(tokens)} in a vocabulary of {VOCABULARY}")
        return int(self._model(torch.tensor(tokens))[-1].argmax())
