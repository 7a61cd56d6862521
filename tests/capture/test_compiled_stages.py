"""Stages and ``torch.compile``: as ``record_function``, a stage breaks no graph,
and compiles none again.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
from example_loops import settings

from verl_profiling import ProfilingCallback, stage
from verl_profiling.capture.session import Session
from verl_profiling.files.run_files import read_manifest
from verl_profiling.workers import CaptureMixin

Function = Callable[[Any], Any]
PROGRAMS = 24


class Worker(CaptureMixin):
    def __init__(self, config: Any) -> None:
        self.init_capture(config, role="actor", rank=0, world_size=1)


def in_block(name: str, inner: Function) -> Function:
    def run(x: Any) -> Any:
        with stage(name):
            return inner(x)

    return run


def in_stage_of_loop(name: str, inner: Function) -> Function:
    profiling = ProfilingCallback(None)

    def run(x: Any) -> Any:
        with profiling.stage(name):
            return inner(x)

    return run


def in_module(name: str, inner: Function) -> Function:
    class Module(torch.nn.Module):
        @stage(name)
        def forward(self, x: Any) -> Any:
            return inner(x)

    return Module()


def decorated(name: str, inner: Function) -> Function:
    return stage(name)(inner)


def draw(chance: random.Random, prefix: str) -> tuple[Function, list[str]]:
    """Return a function with stages in it, in any form and nesting, and their names."""
    names: list[str] = []
    parts: list[Function] = []
    for _ in range(chance.randint(1, 3)):
        operation = chance.choice((torch.sin, torch.cos, torch.tanh))
        part: Function = lambda x, operation=operation: operation(x) + 1  # noqa: E731
        for _ in range(chance.randint(1, 3)):
            names.append(f"{prefix}.{len(names)}")
            part = chance.choice((in_block, in_stage_of_loop, in_module, decorated))(
                names[-1], part
            )
        parts.append(part)

    def program(x: Any) -> Any:
        for part in parts:
            x = part(x)
        return x

    return program, names


@pytest.mark.parametrize("compiled_in", ["nothing", "idle", "watched", "captured"])
def test_a_stage_in_a_compiled_function_is_one_graph_in_every_state(
    compiled_in: str, session: Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Compiled in one state, a function is one graph in all others too,
    and each stage is logged once.
    """
    chance = random.Random(compiled_in)
    graphs: list[int] = []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(len(inputs))
        return module.forward

    torch._dynamo.reset()
    programs = [draw(chance, f"{compiled_in}{number}") for number in range(PROGRAMS // 4)]
    compiled = [torch.compile(program, backend=backend, fullgraph=True) for program, _ in programs]
    around = [stage(f"around {number}")(function) for number, function in enumerate(compiled)]
    x = torch.full((3,), 0.5)
    expected = [program(x) for program, _ in programs]

    def run(state: str) -> None:
        if state == compiled_in or graphs:
            for function, value in zip(around, expected, strict=True):
                assert torch.equal(function(x), value)
            assert len(graphs) == len(programs)

    with caplog.at_level(logging.WARNING):
        run("nothing")
        idle = settings(tool="spans", schedule={"steps": [2]}, save_path=str(tmp_path / "idle"))
        Worker(idle)
        run("idle")
        watched = settings(
            tool="spans",
            schedule={"steps": [2]},
            watch={"enable": True},
            save_path=str(tmp_path / "watched"),
        )
        with ProfilingCallback(watched) as profiling:
            profiling.add_workers("actor", [Worker(watched)])
            for step, state in enumerate(("watched", "captured", "watched again"), 1):
                profiling.on_step_begin(step)
                run(state)
                profiling.on_step_end()
    logged = [
        record.getMessage() for record in caplog.records if "torch.compile" in record.getMessage()
    ]
    names = [name for _, own in programs for name in own]
    assert sorted(message.split("'")[1] for message in logged) == sorted(names)
    assert profiling.last_folder is not None
    [worker] = read_manifest(profiling.last_folder).workers
    assert [span.name for span in worker.stages] == [
        f"around {number}" for number in range(len(programs))
    ]
