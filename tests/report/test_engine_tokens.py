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
        for _ in range(self.chance.randint(1, 3)):  # batches
            begin = self.now()
            left = [self.chance.randint(1, 12) for _ in range(self.chance.randint(1, 5))]
            lengths, ends = list(left), [0.0] * len(left)
            self.iterate(prompts=(10 - CACHED) * len(left), context=len(left))
            made = [1] * len(left)
            for number, length in enumerate(lengths):
                ends[number] = self.now() if length == 1 else 0.0
            while any(one < length for one, length in zip(made, lengths, strict=True)):
                running = [
                    number for number in range(len(lengths)) if made[number] < lengths[number]
                ]
                scheduled = new = prompts = 0
                for number in running:
                    interrupted = self.chance.random() < 0.15
                    accepted = min(
                        self.chance.randint(0, self.drafts), lengths[number] - made[number] - 1
                    )
                    lost = 10 + made[number] - 1 if interrupted else self.drafts - accepted
                    if (
                        interrupted and self.name == "SGLang"
                    ):  # its prompt and response are one new prompt
                        prompts += lost + 1
                    else:
                        scheduled += lost + 1 + (0 if interrupted else accepted)
                    self.again += lost
                    made[number] += 1 if interrupted else 1 + accepted
                    new += 1
                    if made[number] == lengths[number]:
                        ends[number] = -1.0
                self.iterate(scheduled, new, prompts)
                ends = [self.now() if end < 0 else end for end in ends]
            self.requests += [
                (begin, end, length) for end, length in zip(ends, lengths, strict=True)
            ]
            if self.name == "vLLM":
                self.empty += 1
                self.add("execute_context_0(0)_generation_0(0)")

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
