"""No lane has a cause, a share or a finding outside of its observed windows: there,
all is unknown.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from contextvars import Context
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from drawn_steps import BASE, Worker, engine, in_group, report_of
from step_outcome import printed

from verl_profiling import AsyncProfilingCallback
from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest, write_json_atomically
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import (
    MANIFEST_NAME,
    Artifact,
    CaptureResult,
    Device,
    Manifest,
    StageSpan,
)

END = 100_000  # us: length of a drawn step, in which each microsecond is known
FORMS = (
    "recordings",
    "window",
    "count",
    "cut",
    "cut threads",
    "hole",
    "hole threads",
    "discrete",
    "engine",
)


def kernels_between(draw: Random, begin: int, end: int) -> list[dict[str, Any]]:
    """Return kernels of random lengths with random pauses, in order of time."""
    place = {"ph": "X", "cat": "kernel", "pid": 0, "tid": 7}
    edges = sorted(draw.sample(range(begin, end), 2 * draw.randint(6, 40)))
    spans = zip(edges[::2], edges[1::2], strict=True)
    return [{**place, "name": f"k{draw.randint(0, 9)}", "ts": a, "dur": b - a} for a, b in spans]


def trace_of(kernels: list[dict[str, Any]], span: tuple[int, int] | None = None) -> str:
    """Return a trace with an event per line, with torch's own span if there is one."""
    events = list(kernels)
    if span:
        events.append(
            {"ph": "X", "cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "t"}
        )
        events[-1] |= {"ts": span[0], "dur": span[1] - span[0]}
    process = '{"ph": "M", "name": "process_name", "pid": 9, "args": {"name": "python"}},'
    head = f'{{"baseTimeNanoseconds": {BASE}, "traceEvents": [{process}\n'
    return head + ",\n".join(map(json.dumps, events)) + "\n]}"


class Drawn:
    """A step of one lane in one of the forms, and the truth on each of its microseconds."""

    def __init__(self, folder: Path, form: str, draw: Random) -> None:
        self.folder, self.form, self.draw = folder, form, draw
        self.observed, self.busy, self.staged = (np.zeros(END, bool) for _ in range(3))
        self.artifacts: list[Artifact] = []
        edges = sorted(draw.sample(range(0, END, 100), 2 * draw.randint(2, 4)))
        windows = list(zip(edges[::2], edges[1::2], strict=True))
        for number, (begin, end) in enumerate(
            windows if form in ("recordings", "discrete") else windows[:1]
        ):
            self.record(number, begin, max(end, begin + 2_000))
        if form != "recordings":
            self.write_manifest(draw.sample(range(0, END, 100), 4))

    def record(self, number: int, begin: int, end: int) -> None:
        """Write a recording with its damage, and note what can be known from it."""
        end = min(end, END)
        kernels = kernels_between(self.draw, begin, end)
        ends, last = (begin, end), end
        if self.form in ("count", "engine"):
            last = self.draw.randint(kernels[-1]["ts"] + kernels[-1]["dur"], end)
        elif self.form == "recordings":
            ends = kernels[0]["ts"], kernels[-1]["ts"] + kernels[-1]["dur"]
        thread = (
            len(kernels) // 2 if self.form.endswith("threads") else 0
        )  # the second one is written first
        kernels = [*kernels[thread:], *kernels[:thread]]
        span = (begin, last) if self.draw.random() < 0.5 or last < end else None
        lines = trace_of(kernels, span).split("\n")
        self.observed[ends[0] : min(ends[1], last)] = True
        first_lost, after = sorted(self.draw.sample(range(2, len(kernels)), 2))
        if self.form == "cut threads":
            lines = lines[: self.draw.randint(len(kernels) - thread + 2, len(kernels))]
            self.observed[:] = False
        elif self.form == "cut":
            lines = [*lines[: after + 1], lines[after + 1][: self.draw.randint(0, 20)]]
            self.observed[kernels[after - 1]["ts"] + kernels[after - 1]["dur"] :] = False
            kernels = kernels[:after]
        elif self.form.startswith("hole"):
            lines[first_lost + 1 : after + 1] = [
                '{"ph": "X", "cat": ' + "\0" * self.draw.randint(1, 5_000)
            ]
            since, until = kernels[first_lost - 1]["ts"], kernels[after]["ts"]
            lost = np.arange(END) < until if until < since else np.zeros(END, bool)
            lost[since : None if until < since else until] = True
            self.observed &= ~lost
            kernels = [*kernels[:first_lost], *kernels[after:]]
        for kernel in kernels:
            self.busy[kernel["ts"] : kernel["ts"] + kernel["dur"]] = True
        path = self.folder / f"{self.draw.choice('abc')}{number}.json.gz"
        padding = self.draw.choice([b"", b"\0" * 700, b"behind the end"])
        path.write_bytes(gzip.compress("\n".join(lines).encode()) + padding)
        edges_ns = {"begin_ns": BASE + begin * 1000, "end_ns": BASE + end * 1000}
        lane = "rollout0_rank0" if self.form == "engine" else "actor_rank0"
        stage = f"s{number}" if self.form == "discrete" else None
        whole = Artifact(
            path=path.name, lane=lane, tool="torch", status="ok", stage=stage, **edges_ns
        )
        self.artifacts.append(whole)

    def write_manifest(self, edges: list[int]) -> None:
        """Write the manifest, with two stages of the loop in which the lane has no part."""
        names = (
            ("rollout", "wait:x")
            if self.form == "engine"
            else self.draw.sample(("reward", "y", "old"), 2)
        )
        stages = []
        for name, begin, end in zip(names, sorted(edges)[::2], sorted(edges)[1::2], strict=True):
            stages.append(StageSpan(name, BASE + begin * 1000, BASE + end * 1000))
            self.staged[begin:end] = True
        identity = WorkerIdentity(role="actor")
        if self.form == "engine":
            identity = WorkerIdentity(role="rollout", replica=0)
        mode = "discrete" if self.form == "discrete" else "e2e"
        worker = CaptureResult(identity=identity, mode=mode, artifacts=self.artifacts)
        manifest = Manifest(
            run_id="r",
            capture_id="c",
            step=1,
            steps=[1],
            begin_ns=BASE,
            end_ns=BASE + END * 1000,
            controller=WorkerIdentity(role="controller"),
            stages=stages,
            workers=[worker],
        )
        write_json_atomically(self.folder / MANIFEST_NAME, manifest)


@pytest.mark.parametrize("seed", range(6 * len(FORMS)))
def test_outside_of_its_windows_a_lane_has_no_cause_share_or_finding(
    tmp_path: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Observed, busy and idle time by cause are the planted ones, whatever ended a recording."""
    drawn = Drawn(tmp_path, FORMS[seed % len(FORMS)], Random(seed))
    code = main(["report", str(tmp_path), "--json"])
    report = json.loads(capsys.readouterr().out)
    (row,) = report["workers"]
    idle = drawn.observed & ~drawn.busy
    assert row["span_us"] == pytest.approx(drawn.observed.sum(), abs=1)
    assert row["busy_us"] == pytest.approx((drawn.busy & drawn.observed).sum(), abs=1)
    assert row["idle_us"] == sum(row["lost_us"].values()) == pytest.approx(idle.sum(), abs=1)
    if drawn.form not in ("recordings", "engine"):
        causes = {
            "other_stages": (idle & drawn.staged).sum(),
            "between_stages": (idle & ~drawn.staged).sum(),
        }
        assert {name: row["lost_us"][name] for name in causes} == pytest.approx(causes, abs=1)
    stated = [
        one for one in report["findings"] if one["rule"] not in ("coverage", "capture", "pause")
    ]
    assert all(one["seconds"] <= idle.sum() / 1e6 + 1e-6 and one["share"] <= 1 for one in stated)
    assert (code, len(report["coverage"]["missing"])) == (
        (1, 1) if drawn.form[:3] in ("cut", "hol") else (0, 0)
    )
    if drawn.form == "recordings":
        assert report["span_us"] == row["span_us"]
    else:
        said = f"{drawn.observed.sum() / END:.0%} of the lanes' time recorded"
        assert said in printed(open_step(tmp_path).report(), everything=False)


@pytest.mark.parametrize("seed", range(20))
def test_an_annotation_that_breaks_the_json_is_the_only_lost_event(
    tmp_path: Path, seed: int
) -> None:
    """Torch writes its name as it is; the name is reported, and time is known around it."""
    draw = Random(seed)
    kernels = kernels_between(draw, 0, END)
    name = draw.choice(['reward of "gsm8k"', '{"a": 1}, {"b": 2}', '"', "C:\\x"])
    lines = trace_of(kernels).split("\n")
    event = (
        f'{{"ph": "X", "cat": "user_annotation", "name": "{name}", '
        '"pid": 1, "tid": 1, "ts": 5, "dur": 9},'
    )
    lines.insert(draw.randint(1, len(kernels)), event)
    path = tmp_path / "trace.json"
    path.write_text("\n".join(lines))
    report = open_step(path).report()
    (missing,) = report.coverage.missing
    assert f"skipped the annotation {name}: " in missing
    assert report.coverage.events == len(kernels) + 1
    assert report.workers[0].busy_us == sum(kernel["dur"] for kernel in kernels)
    assert report.workers[0].span_us == kernels[-1]["ts"] + kernels[-1]["dur"] - kernels[0]["ts"]


@pytest.mark.parametrize("seed", range(20))
def test_an_engine_that_serves_requests_does_not_wait_for_its_turn(
    tmp_path: Path, seed: int
) -> None:
    """In an asynchronous loop it generates for another step while the loop is in any stage,
    or in none.
    """
    draw = Random(seed)
    edge, until = draw.uniform(2, 5), draw.uniform(6, 9)
    stages = [(f"wait:{draw.choice('abc')}", 0, edge), ("update_actor", edge, until)]
    runs = [(at, at + draw.uniform(0.01, 0.1)) for at in np.arange(0.1, 9.8, 0.3).tolist()]
    sent = [(runs[0][0], draw.uniform(3, 9), 7) for _ in range(draw.randint(1, 9))]
    late = engine(0, *runs, requests=sent, logged=True, pending=[runs[1][0]])
    report = report_of(tmp_path, stages, [late])
    (row,) = report.workers
    served_us = (10 - runs[0][0]) * 1e6
    busy_us = sum(b - a for a, b in runs) * 1e6
    of_engine_us = row.lost_us["host_bound"] + row.lost_us["queued"]
    assert of_engine_us == pytest.approx(served_us - busy_us, abs=1)
    assert row.lost_us["other_stages"] + row.lost_us["between_stages"] == pytest.approx(
        runs[0][0] * 1e6, abs=1
    )
    assert "idle_stage" not in {finding.rule for finding in report.findings}


@pytest.mark.parametrize("missing", ["end", "nothing"])
def test_the_tail_is_unknown_where_an_engine_was_not_recorded_to_the_end(
    tmp_path: Path, missing: str
) -> None:
    """Else the end of its recording would be the end of its replica, for which the others wait."""
    short = engine(0, (0, 2), recorded=(0, 2.1 if missing == "end" else 10))
    report = report_of(tmp_path, [("rollout", 0, 8)], [short, engine(1, (0, 7)), Worker("actor")])
    assert (report.tail is None) == (missing == "end")
    assert (report.throughput is None) == (missing == "end")
    assert bool(report.lost_s.get("long_tail")) == (missing != "end")


async def test_a_rollout_from_before_the_step_is_a_stage_of_the_step(tmp_path: Path) -> None:
    """It counts from the step's begin; a stage around the whole loop is none of its stages."""
    draw = Random(7)
    captured = sorted(draw.sample(range(2, 22), 10))
    conf = {
        "enable": True,
        "tool": "spans",
        "save_path": str(tmp_path),
        "schedule": {"steps": captured},
    }
    async with AsyncProfilingCallback({**conf, "watch": {"enable": True}}) as loop:
        responses: asyncio.Queue[int] = asyncio.Queue()

        async def generation(name: str) -> None:
            async with loop.stage(name):
                await responses.get()

        def in_the_background(name: str) -> asyncio.Future[None]:
            return Context().run(asyncio.ensure_future, generation(name))

        async with loop.stage("epoch"):
            names = [f"gen{draw.randint(0, 99)}" for _ in range(24)]
            running = in_the_background(names[0])
            for step in range(1, 23):
                await asyncio.sleep(0)
                await loop.on_step_begin(step)
                async with loop.stage("wait"):
                    responses.put_nowait(step)
                    await running
                running = in_the_background(names[step])
                async with loop.stage("update_actor"):
                    await asyncio.sleep(0.001)
                await loop.on_step_end()
            responses.put_nowait(0)
            await running
    for step in captured:
        manifest = read_manifest(tmp_path / f"step_{step:06d}")
        (before,) = (span for span in manifest.stages if span.begin_ns == manifest.begin_ns)
        assert (before.name, before.depth, before.failed) == (names[step - 1], 0, False)
        assert manifest.begin_ns < before.end_ns < manifest.end_ns
        others = [span.name for span in manifest.stages if span is not before]
        assert others == ["wait", "update_actor", names[step]]
    assert "\nLost" not in printed(open_step(tmp_path / f"step_{captured[0]:06d}").report())


@pytest.mark.parametrize("seed", range(20))
def test_waits_are_unknown_where_no_other_rank_has_the_call(tmp_path: Path, seed: int) -> None:
    """Of communication without a known group, or with one rank captured,
    the busy share may be waiting.
    """
    draw = Random(seed)
    ranks, named, unnamed = draw.randint(1, 5), draw.random() < 0.6, draw.random() < 0.5
    world, workers = list(range(ranks)), []
    for rank in range(ranks):
        entered = draw.uniform(1, 2)
        kernels = [("gemm", 0, 1)]
        kernels += [in_group(("ncclDevKernel_AllReduce", entered, 3), world)] if named else []
        kernels += [("ncclDevKernel_SendRecv", 4, draw.uniform(5, 6))] if unnamed else []
        workers.append(Worker("actor", rank, kernels=kernels))
    text = printed(report_of(tmp_path, [("update_actor", 0, 9)], workers), everything=False)
    matched = named and ranks > 1
    expected = "without waits for other ranks"
    if unnamed or (named and not matched):
        expected = (
            "without the known waits for other ranks"
            if matched
            else "waits for other ranks unknown"
        )
    assert expected in text


@pytest.mark.parametrize("seed", range(20))
def test_a_device_is_unknown_while_one_of_its_lanes_works_unseen(tmp_path: Path, seed: int) -> None:
    """An engine generates outside of its window,
    and a rank works in a stage that is not recorded.
    """
    draw = Random(seed)
    rollout, update = sorted(draw.sample(range(1, 9), 2))
    late, early = sorted((draw.uniform(0, rollout), draw.uniform(0, rollout)))
    begins, ends = (
        (float(update), 10.0)
        if draw.random() < 0.5
        else (0.0, update + draw.uniform(0, 10 - update))
    )
    device = {"devices": [Device(index=3, kind="cuda", uuid="GPU-7")]}
    served = engine(0, (late, early), recorded=(late, early), **device)
    stages = [("update_actor", update, 10)]
    trained = Worker(
        "actor", kernels=[("gemm", update, 10)], stages=stages, recorded=(begins, ends), **device
    )
    report = report_of(tmp_path, [("rollout", 0, rollout), *stages], [served, trained])
    (row,) = report.devices
    # Outside of the rollout and the update, no lane works; the rank has to be recorded there.
    between = max(0.0, min(ends, update) - max(begins, rollout))
    trains = max(0.0, ends - max(begins, update))
    assert row.span_us == pytest.approx((early - late + between + trains) * 1e6, abs=1)
    assert row.busy_us == pytest.approx((early - late + trains) * 1e6, abs=1)
