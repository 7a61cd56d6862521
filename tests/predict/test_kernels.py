"""Predictions with other kernels: of drawn programs against a simulation of them,
and of real GPU traces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import Worker, drawn_inputs, engine, in_group
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError

DATA = Path(__file__).parents[1] / "data"
GPU_TRACES = ("nccl_data.json.gz", "sampled_rank-0.json.gz", "sampled_rank-1.json.gz")
LATENCY, CALL, RETURN = 5, 3, 2  # us: launch to kernel, call of the host, return of a wait

STREAMS = (7, 20, 24)
streams, names, times = (
    st.sampled_from(STREAMS),
    st.sampled_from(["gemm", "norm"]),
    st.integers(0, 20),
)
OPERATIONS = st.one_of(
    st.tuples(st.just("launch"), streams, names, st.integers(1, 60).map(lambda us: 4 * us)),
    st.tuples(
        st.just("copy"), streams, st.just("Memcpy DtoH"), st.integers(1, 20).map(lambda us: 4 * us)
    ),
    st.tuples(st.just("code"), times),
    st.tuples(st.just("synchronize"), st.sampled_from([-1, *STREAMS])),
    st.tuples(st.just("wait"), streams, streams),
)
PROGRAMS = st.lists(OPERATIONS, max_size=30).map(
    lambda drawn: [("launch", 7, "gemm", 40), *drawn, ("launch", 7, "norm", 8)]
)


class Machine:
    """A host and its streams: what they do of a program, and when (us)."""

    def __init__(self, factor: float) -> None:
        self.factor = factor
        self.now = self.own = 100.0
        self.number = 0
        self.free = dict.fromkeys(STREAMS, 0.0)
        self.events: list[dict[str, Any]] = []

    def event(
        self, category: str, name: str, thread: int, begin: float, end: float, **args: object
    ) -> None:
        pid = 50 if category == "cuda_runtime" else 0
        place = {"ph": "X", "pid": pid, "cat": category, "name": name, "tid": thread}
        args["correlation"] = self.number
        self.events.append({**place, "ts": begin, "dur": end - begin, "args": args})

    def call(self, name: str, end: float) -> None:
        self.event("cuda_runtime", name, 1, self.now, end)
        self.now = end

    def on_stream(self, category: str, stream: int, name: str, took: float) -> None:
        begin = max(self.now + LATENCY, self.free[stream])
        self.free[stream] = begin + took * (self.factor if name == "gemm" else 1)
        self.event(category, name, stream, begin, self.free[stream])

    def launch(self, stream: int, name: str, took: float) -> None:
        self.on_stream("kernel", stream, name, took)
        self.own += CALL
        self.call("cudaLaunchKernel", self.now + CALL)

    def copy(self, stream: int, name: str, took: float) -> None:
        self.on_stream("gpu_memcpy", stream, name, took)
        self.own += RETURN
        self.call("cudaMemcpyAsync", self.free[stream] + RETURN)

    def code(self, took: float) -> None:
        self.now += took
        self.own += took

    def synchronize(self, stream: int) -> None:
        waited = [*self.free.values()] if stream < 0 else [self.free[stream]]
        begin, end = self.now, max([self.now, *waited]) + RETURN
        self.call("cudaDeviceSynchronize" if stream < 0 else "cudaStreamSynchronize", end)
        kind = "Context Sync" if stream < 0 else "Stream Sync"
        self.event("cuda_sync", kind, stream, begin, end, stream=stream)
        self.own += RETURN

    def wait(self, stream: int, other: int) -> None:
        begin, end = self.now, self.now + 1
        self.call("cudaStreamWaitEvent", end)
        on = {"stream": stream, "wait_on_stream": other}
        self.event("cuda_sync", "Stream Wait Event", stream, begin, end, **on)
        self.free[stream] = max(self.free[stream], self.free[other])
        self.own += 1


def run(program: Sequence[tuple], factor: float = 1.0) -> tuple[list[dict[str, Any]], float, float]:
    """Return the events of a program, the span of its kernels,
    and the end of the host's own code (us).
    """
    machine = Machine(factor)
    for what, *about in program:
        machine.number += 1
        getattr(machine, what)(*about)
    kernels = [one for one in machine.events if one["cat"] in ("kernel", "gpu_memcpy")]
    span = max(one["ts"] + one["dur"] for one in kernels) - min(one["ts"] for one in kernels)
    return machine.events, span, machine.own - 100.0 - CALL


def write(folder: Path, events: Sequence[dict[str, Any]]) -> Path:
    path = folder / "trace.json"
    path.write_text(
        json.dumps({"baseTimeNanoseconds": 1_790_000_000_000_000_000, "traceEvents": events})
    )
    return path


@settings(deadline=None, max_examples=60)
@given(program=PROGRAMS, factor=st.sampled_from([0.0, 0.25, 0.5, 2.0, 4.0]))
def test_a_drawn_program_takes_as_long_as_if_it_ran_with_such_kernels(
    tmp_path_factory: pytest.TempPathFactory, program: list[tuple], factor: float
) -> None:
    events, span, _ = run(program)
    step = open_step(write(tmp_path_factory.mktemp("drawn"), events))
    assert step.what_if().span_us == pytest.approx(span)
    assert step.what_if(scale={"kernel:gemm": 1}).predicted_us == pytest.approx(span)
    found = step.what_if(scale={"kernel:gem?": factor})
    assert found.predicted_us == pytest.approx(run(program, factor)[1])
    assert sum(row.duration_us for row in found.path) == pytest.approx(found.predicted_us)


@settings(deadline=None, max_examples=40)
@given(program=PROGRAMS)
def test_without_names_of_streams_the_step_lies_between_the_code_of_the_host_and_the_recorded_step(
    tmp_path_factory: pytest.TempPathFactory, program: list[tuple]
) -> None:
    """The longer the kernels, the longer the step."""
    events, span, own = run(program)
    events = [one for one in events if one["cat"] != "cuda_sync"]
    step = open_step(write(tmp_path_factory.mktemp("drawn"), events))
    predicted = [step.what_if(scale={"kernel:*": by}).predicted_us for by in (0, 0.3, 0.7, 1, 1.5)]
    assert predicted == sorted(predicted)
    assert predicted[3] == pytest.approx(span)
    assert predicted[0] >= own - 1e-3


@pytest.mark.parametrize("trace", GPU_TRACES)
def test_real_traces_are_replayed_as_recorded_and_end_with_the_code_of_the_host(trace: str) -> None:
    """These traces hardly wait for their device."""
    step = open_step(DATA / trace)
    recorded = step.what_if().span_us
    predicted = [step.what_if(scale={"kernel:*": by}).predicted_us for by in (0, 0.5, 1, 2)]
    assert predicted == sorted(predicted)
    assert predicted[2] == pytest.approx(recorded, abs=0.001)
    assert predicted[0] == pytest.approx(recorded, rel=0.01)


def launched(number: int, kernel: tuple, at: float) -> tuple[tuple, tuple]:
    """Return a kernel, and its launch at a time."""
    name, begin, end, *said = kernel
    about = {"correlation": number}
    return (name, begin, end, {**about, **dict(*said)}), ("cudaLaunchKernel", at, at + 0.01, about)


def two_ranks(folder: Path) -> None:
    """Draw a step of two ranks that wait for each other in a collective, the second one longer."""
    workers = []
    for rank, end in enumerate((7.0, 6.0)):
        pairs = [
            launched(1, ("gemm", 5.2, end), 5.15),
            launched(2, in_group(("ncclDevKernel_AllReduce", end, 7.2), [0, 1]), 5.17),
            launched(3, ("norm", 7.2, 7.4), 5.19),
        ]
        kernels, calls = (list(column) for column in zip(*pairs, strict=True))
        calls.append(("cudaDeviceSynchronize", 5.3, 7.41, {"correlation": 4}))
        works = Worker(
            "actor", rank, stages=[("update_actor", 5.1, 7.5)], kernels=kernels, calls=calls
        )
        workers.append(works)
    drawn_inputs(folder, [("update_actor", 5, 8)], workers)


@pytest.mark.parametrize(
    ("scale", "seconds"),
    [
        (
            {"kernel:gemm": 0.5},
            10 - 0.9,
        ),  # the second rank ends its part at 5.6, the first one at 6.1
        ({"kernel:norm": 0}, 10 - 0.2),
        ({"kernel:gemm": 0.5, "kernel:norm": 0}, 10 - 1.1),
        ({"kernel:*": 2}, 10 + 1.8 + 0.2),
        ({"kernel:gemm": 0.5, "update_actor": 0}, 10 - 3),
    ],
)
def test_ranks_wait_for_each_other_as_before(
    tmp_path: Path, scale: dict[str, float], seconds: float
) -> None:
    two_ranks(tmp_path)
    found = open_step(tmp_path).what_if(scale=scale)
    assert found.predicted_us == pytest.approx(seconds * 1e6, abs=1)
    assert "collectives keep their time, with the waits for other ranks in it (2)" in found.assumed


def test_the_host_that_runs_ahead_bounds_the_step(tmp_path: Path) -> None:
    """A launch in the middle of a kernel comes as late as before."""
    pairs = [launched(1, ("gemm", 5.2, 7.0), 5.15), launched(2, ("norm", 7.0, 7.2), 6.5)]
    kernels, calls = (list(column) for column in zip(*pairs, strict=True))
    calls.append(("cudaDeviceSynchronize", 6.6, 7.21, {"correlation": 3}))
    worker = Worker("actor", stages=[("update_actor", 5.1, 7.3)], kernels=kernels, calls=calls)
    drawn_inputs(tmp_path, [("update_actor", 5, 8)], [worker])
    found = open_step(tmp_path).what_if(scale={"kernel:gemm": 0})
    assert found.predicted_us == pytest.approx((10 - 7.0 + 6.5 + 0.05) * 1e6, abs=1)


def test_a_trace_without_launches_beside_one_with_launches_is_said(tmp_path: Path) -> None:
    kernel, call = launched(1, ("gemm", 5.3, 6.3), 5.2)
    workers = [
        Worker("actor", stages=[("update_actor", 5.1, 7.5)], kernels=[kernel], calls=[call]),
        Worker("ref", stages=[("ref_log_prob", 1.1, 4.9)], kernels=[("attention", 1.2, 4.8)]),
    ]
    drawn_inputs(tmp_path, [("ref_log_prob", 1, 5), ("update_actor", 5, 8)], workers)
    found = open_step(tmp_path).what_if(scale={"kernel:gemm": 0.5})
    assert "kernels of a trace without launches keep their time (1)" in found.assumed
    with pytest.raises(ConfigError, match="no kernel of the step matches 'attention'"):
        open_step(tmp_path).what_if(scale={"kernel:attention": 0.5})


def test_requests_of_an_engine_take_less_time_with_faster_kernels(tmp_path: Path) -> None:
    kernel, call = launched(1, ("attention", 0.5, 3.0), 0.4)
    wait = ("cudaDeviceSynchronize", 0.6, 3.1, {"correlation": 2})
    worker = Worker(
        "rollout",
        replica=0,
        kernels=[kernel],
        calls=[call, wait],
        requests=[(0.2, 3.5, 8)],
        logged=True,
    )
    drawn_inputs(tmp_path, [("rollout", 0, 4)], [worker])
    found = open_step(tmp_path).what_if(scale={"kernel:attention": 0.5})
    assert found.predicted_us == pytest.approx((10 - 1.25) * 1e6, abs=1)


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("gem", "no kernel of the step matches 'gem'; close names: gemm"),
        ("*xyz*", "no kernel of the step matches '*xyz*'; the longest: gemm, norm"),
        (
            "nccl*",
            "'nccl*' matches collectives: their waits cannot be scaled",
        ),
    ],
)
def test_a_pattern_without_kernels_is_an_error(tmp_path: Path, pattern: str, said: str) -> None:
    two_ranks(tmp_path)
    with pytest.raises(ConfigError, match=re.escape(said)):
        open_step(tmp_path).what_if(scale={f"kernel:{pattern}": 0.5})


def test_a_step_without_launches_is_an_error(tmp_path: Path) -> None:
    drawn_inputs(
        tmp_path, [("rollout", 0, 4)], [engine(0, (0.2, 3.8), stages=[("rollout", 0.1, 3.9)])]
    )
    said = (
        r"no kernels with their launches: capture with the tool torch on a GPU \(the "
        r"traces have kernel, us"
    )
    with pytest.raises(ConfigError, match=said):
        open_step(tmp_path).what_if(scale={"kernel:*": 0.5})


def test_the_command_takes_a_pattern(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    two_ranks(tmp_path)
    assert main(["what-if", str(tmp_path), "--scale", "kernel:g*=0.5"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "predicted 9.10 s with --scale 'kernel:g*=0.5' (-900 ms, -9.0%)" in said
    assert "code of the host, gaps and other kernels take as long as before" in said
