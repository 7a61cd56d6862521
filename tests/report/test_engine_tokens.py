"""Tokens of an engine: new ones are those that it produced;
what it computed again is counted apart.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from drawn_steps import Worker, report_of

TICK = 0.01
CACHED = 5  # of the 10 prompt tokens of a drawn request


class Engine:
    """Generates responses of drawn lengths, now and then interrupted,
    with the names of vLLM or SGLang.
    """

    def __init__(self, chance: random.Random, name: str) -> None:
        self.chance, self.name = chance, name
        self.drafts = chance.choice((0, 0, 1, 3)) if name == "vLLM" else 0
        self.iterations: list[tuple[str, float, float]] = []
        self.empty = self.again = 0
        self.requests: list[tuple[float, float, int]] = []

    def run(self) -> None:
        for _ in range(self.chance.randint(1, 3)):
            self.serve([self.chance.randint(1, 12) for _ in range(self.chance.randint(1, 5))])

    def serve(self, lengths: list[int]) -> None:
        """Generate a batch of responses."""
        begin = self.now()
        self.iterate(prompts=(10 - CACHED) * len(lengths), context=len(lengths))
        made, ends = [1] * len(lengths), [self.now()] * len(lengths)
        while running := [at for at, length in enumerate(lengths) if made[at] < length]:
            scheduled = prompts = 0
            for at in running:
                count, computed, is_prompt = self.advance(made[at], lengths[at])
                made[at] += count
                if is_prompt:
                    prompts += computed
                else:
                    scheduled += computed
            self.iterate(scheduled, len(running), prompts)
            for at in running:
                ends[at] = self.now()
        self.requests += [(begin, end, length) for end, length in zip(ends, lengths, strict=True)]
        if self.name == "vLLM":
            self.empty += 1
            self.add("execute_context_0(0)_generation_0(0)")

    def advance(self, made: int, length: int) -> tuple[int, int, bool]:
        """Return how many tokens a response gets, how many are computed, and if as a prompt."""
        accepted = min(self.chance.randint(0, self.drafts), length - made - 1)
        if self.chance.random() < 0.15:  # interrupted: its prompt and response are computed again
            self.again += 9 + made
            return 1, 10 + made, self.name == "SGLang"
        self.again += self.drafts - accepted
        return 1 + accepted, 1 + self.drafts, False

    def now(self) -> float:
        return len(self.iterations) * TICK

    def iterate(
        self, scheduled: int = 0, generating: int = 0, prompts: int = 0, context: int = 0
    ) -> None:
        if self.name == "vLLM":
            self.add(f"execute_context_{context}({prompts})_generation_{generating}({scheduled})")
            return
        if prompts:
            self.add(f"step[EXTEND bs=1 toks={prompts}]")
        if scheduled:
            self.add(f"step[DECODE bs={scheduled}]")

    def add(self, name: str) -> None:
        self.iterations.append((name, self.now(), self.now() + TICK))


@pytest.mark.parametrize("seed", range(24))
def test_new_tokens_are_those_that_the_engine_produced(seed: int, tmp_path: Path) -> None:
    """With preemptions, retractions, drafts, iterations of nothing; without requests,
    at most one a pass.
    """
    engine = Engine(random.Random(seed), ("vLLM", "SGLang")[seed % 2])
    engine.run()
    end = engine.now()
    stages = [("rollout", 0.0, end)]
    worker = Worker(
        "rollout",
        replica=0,
        kernels=[("gemm", 0.0, end)],
        iterations=engine.iterations,
        requests=engine.requests,
    )
    [row] = report_of(tmp_path, stages, [worker], end).engines
    produced = sum(length for _, _, length in engine.requests)
    assert row.iterations == len(engine.iterations) - engine.empty
    assert (row.prefill_tokens, row.decode_tokens) == (
        (10 - CACHED) * len(engine.requests),
        produced,
    )
    assert row.again_tokens == engine.again
    worker.requests = []
    [row] = report_of(tmp_path, stages, [worker], end).engines
    after_first = produced - len(engine.requests)
    assert row.iterations == len(engine.iterations) - engine.empty
    assert row.decode_tokens <= after_first
    if engine.name == "vLLM":
        assert row.decode_tokens + row.again_tokens == after_first + engine.again
    if not engine.drafts and engine.name == "vLLM":
        assert (row.decode_tokens, row.again_tokens) == (after_first, engine.again)
