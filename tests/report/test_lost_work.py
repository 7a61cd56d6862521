"""Work of devices that a trace lost is unknown, and durations that cannot be are bounded;
both are said.
"""

from __future__ import annotations

import gzip
import json
import random
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import Kernel, Worker, drawn_inputs, ns
from step_folders import read_events

from verl_profiling.manifest import StepSpan
from verl_profiling.steps.check import check

DATA = Path(__file__).parents[1] / "data"
H100 = DATA / "h100" / "vllm" / "step_000004"
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
BASE_NS = 1_767_225_600_000_000_000
Json = dict[str, Any]
Reports = Callable[[Path], list[Json]]


def event(
    category: str, name: str, stream: int, begin: float, took: object, launch: int = 0
) -> Json:
    on_host = category.endswith("runtime")
    args = {"correlation": launch} if launch else {"stream": stream}
    place = {"pid": 4242 if on_host else 0, "tid": stream, "ts": begin, "dur": took}
    return {"ph": "X", "cat": category, "name": name, **place, "args": args}


def saved(path: Path, events: list[Json]) -> Path:
    path.write_text(json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}))
    return path


def graphs(draw: random.Random, loss: str) -> tuple[list[Json], str]:
    """Draw an engine that replays a few graphs, and lose kernels of them;
    return what has to be said.
    """
    names = [f"kernel_{number}" for number in range(draw.randint(8, 40))]
    shapes = [draw.sample(names, draw.randint(8, len(names))) for _ in range(draw.randint(1, 3))]
    call, category = draw.choice([("cudaGraphLaunch", "cuda"), ("hipGraphLaunch", "hip")])
    launches = draw.randint(7, 30)
    empty = set(draw.sample(range(launches), draw.randint(1, launches))) if loss == "all" else set()
    events, now = [event("kernel", "embed", 7, 0.0, 2.0, 1)], 10.0
    for number in range(launches):
        launch = 100 + number
        events.append(event(f"{category}_runtime", call, 1, now, 5.0, launch))
        kernels = [] if number in empty else shapes[number % len(shapes)]
        if loss == "some":
            kernels = sorted(draw.sample(kernels, len(kernels) // 2), key=kernels.index)
        for name in kernels:
            events.append(event("kernel", name, 7, now, 3.0, launch))
            now += 4.0
        events.append(event("kernel", "sample", 7, now, 2.0, 5_000 + number))
        now += draw.randint(5, 500)
    said = f"{len(empty)} of {launches} graph launches have no kernels" if empty else ""
    return events, "a part of their kernels" if loss == "some" else said


def test_the_work_of_a_device_is_unknown_where_graphs_lost_kernels(
    tmp_path: Path, reports: Reports
) -> None:
    """The launches are counted; the lane has no share, lost time or cause.
    Whole graphs say nothing.
    """
    for seed in range(24):
        loss = ("none", "all", "some")[seed % 3]
        events, said = graphs(random.Random(seed), loss)
        [report] = reports(saved(tmp_path / "rank0.json", events))
        missing = " ".join(report["coverage"]["missing"])
        assert (said in missing) if said else not missing, (seed, missing)
        [worker] = report["workers"]
        assert (worker["span_us"] > 0) == (not said), seed
        if said:
            assert not any(worker["lost_us"].values())
            assert {finding["rule"] for finding in report["findings"]} <= {"coverage", "missing"}, (
                seed
            )


def unlike_graphs(draw: random.Random, kind: str) -> list[Json]:
    """Draw whole graphs that are launched ahead of their kernels, and differ as graphs may."""
    events, now, share = list[Json](), 1_000.0, draw.randint(4, 12)
    launches = draw.randint(4, 20)
    for number in range(launches):
        events.append(event("cuda_runtime", "cudaGraphLaunch", 1, now - 900.0, 5.0, 100 + number))
        category = "gpu_memcpy" if kind == "copies" else "kernel"
        size = number if kind == "each launched once" else 0
        names = [f"kernel_{place}" for place in range(share)] + [f"gemm_of_batch_{size}"]
        streams = [7, 20] if kind == "branches" else [7]
        for stream in streams:
            begin = now
            for name in names:
                took = draw.uniform(5, 50)
                events.append(
                    event(category, f"{name}_{stream}", stream, begin, took, 100 + number)
                )
                begin += took + 1
        now = max(e["ts"] + e["dur"] for e in events) + draw.randint(5, 50)
        events.append(event("cuda_runtime", "cudaLaunchKernel", 1, now - 3.0, 2.0, 5_000 + number))
        events.append(event("kernel", "sample", 7, now, 2.0, 5_000 + number))
        now += 3.0
    if kind == "in flight":
        events.append(event("cuda_runtime", "cudaGraphLaunch", 1, now, 5.0, 100 + launches))
    return events


def test_graphs_may_differ(tmp_path: Path, reports: Reports) -> None:
    """Branches, a graph for each batch size, copies only, or a last launch in flight:
    nothing was lost.
    """
    for seed in range(24):
        kind = ("branches", "each launched once", "copies", "in flight")[seed % 4]
        [report] = reports(saved(tmp_path / "rank0.json", unlike_graphs(random.Random(seed), kind)))
        assert not report["coverage"]["missing"], (seed, kind)


def test_graphs_of_several_steps_are_whole(tmp_path: Path, reports: Reports) -> None:
    """A capture of several steps has launches of each; a graph may run over the end of its step."""
    for seed in range(4):
        draw = random.Random(seed)
        calls, kernels, now = list[Kernel](), list[Kernel](), 0.0
        for number in range(1, draw.randint(20, 40)):
            calls.append(("cudaGraphLaunch", now, now + 0.01, {"correlation": number}))
            now += 0.02 + draw.random() * 0.3
            for name in "abcd":
                kernels.append((name, now, now + 0.1, {"correlation": number, "stream": 7}))
                now += 0.1
        ends = [0.0, *sorted(draw.sample([now * part / 10 for part in range(1, 10)], 2)), now]
        steps = [
            StepSpan(step=2 + place, begin_ns=ns(a), end_ns=ns(b))
            for place, (a, b) in enumerate(pairwise(ends))
        ]
        folder = tmp_path / str(seed) / "step_000002"
        folder.mkdir(parents=True)
        worker = Worker("rollout", replica=0, kernels=kernels, calls=calls, recorded=(0.0, now))
        drawn_inputs(folder, [], [worker], now, steps=steps)
        of_steps = reports(folder)
        assert len(of_steps) == len(steps)
        assert [report["coverage"]["missing"] for report in of_steps] == [[]] * len(steps), seed


@pytest.mark.parametrize("share", [0.0, 0.65, 1.0])
def test_real_graphs_that_lost_kernels(tmp_path: Path, reports: Reports, share: float) -> None:
    """A step on an H100: the device that engine and rank share is unknown;
    the intact one is known.
    """
    step = shutil.copytree(H100, tmp_path / H100.name)
    trace = step / "rollout0_rank0.torch.json.gz"
    events = read_events(trace)
    launches = [e["args"]["correlation"] for e in events if "GraphLaunch" in e.get("name", "")]
    draw = random.Random(1)
    for launch in launches:
        kernels = [
            e for e in events if e.get("cat") in DEVICE and e["args"].get("correlation") == launch
        ]
        lost = {id(e) for e in draw.sample(kernels, round(share * len(kernels)))}
        events = [e for e in events if id(e) not in lost]
    if share:
        trace.write_bytes(
            gzip.compress(
                json.dumps({"baseTimeNanoseconds": BASE_NS, "traceEvents": events}).encode()
            )
        )
    [report] = reports(step)
    said = [
        sentence for sentence in report["coverage"]["missing"] if "of 12 graph launches" in sentence
    ]
    assert len(said) == bool(share)
    assert [row["span_us"] > 0 for row in report["devices"]] == [not share]


@pytest.mark.parametrize("path", sorted((DATA / "mi300").glob("*")), ids=lambda path: path.name)
def test_real_graphs_of_rocm_are_whole(reports: Reports, path: Path) -> None:
    """No launch of an intact trace is said to lack kernels."""
    assert "graph launches" not in str(reports(path)[0]["coverage"])


def covered_us(spans: list[tuple[float, float]]) -> float:
    """Return the time that spans cover."""
    total, reach = 0.0, 0.0
    for begin, end in sorted(spans):
        total += max(end - max(begin, reach), 0.0)
        reach = max(reach, end)
    return total


def impossible(draw: random.Random) -> tuple[list[Json], list[tuple[float, float]], int, int]:
    """Draw streams with impossible durations: events, true spans,
    and how many overrun or are endless.
    """
    streams, events = draw.sample(range(1, 200), draw.randint(1, 3)), list[Json]()
    now = 0.0
    for _ in range(draw.randint(40, 120)):
        events.append(
            event("kernel", draw.choice("abc"), draw.choice(streams), now, draw.randint(5, 900))
        )
        now += events[-1]["dur"] + draw.randint(1, 50)
    spans, overruns, endless = list[tuple[float, float]](), 0, 0
    for index, kernel in enumerate(events):
        following = [other for other in events[index + 1 :] if other["tid"] == kernel["tid"]]
        fault = draw.choice(["overrun", "endless", *["none"] * 12])
        end = kernel["ts"] + kernel["dur"]
        if fault == "overrun" and following:
            end = following[0]["ts"]
            kernel["dur"] = draw.choice([3_400_000, 4_294_967]) + draw.choice([-index, index])
            overruns += 1
        elif fault == "endless" and not following:
            end = kernel["ts"]
            kernel["dur"] = draw.choice([-kernel["dur"], -1e15, 1.8446744e16, 2**64 - 1])
            endless += 1
        spans.append((kernel["ts"], end))
    return events, spans, overruns, endless


def test_impossible_durations_are_bounded_by_the_stream(tmp_path: Path, reports: Reports) -> None:
    """Busy time is that of the true ends; counts and seconds are noted,
    and check finds nothing wrong.
    """
    for seed in range(24):
        events, spans, overruns, endless = impossible(random.Random(seed))
        path = saved(tmp_path / "rank0.json", events)
        [report] = reports(path)
        assert report["workers"][0]["busy_us"] == pytest.approx(covered_us(spans), abs=1e-3), seed
        notes = " ".join(report["notes"])
        assert (f"{overruns} kernels run over" in notes) == bool(overruns), (seed, notes)
        assert (f"{endless} events have a negative or endless duration" in notes) == bool(
            endless
        ), seed
        assert check(path).ok
