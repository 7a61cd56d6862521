"""An engine of one's own: its server logs the requests, and the session records its process."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from step_folders import spans_by_lane

from tests.engines.example_engine import OwnServer
from verl_profiling import ProfilingCallback
from verl_profiling.analysis import CapturedStep, open_step
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import CaptureResult
from verl_profiling.steps.inputs import find_steps
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

LENGTHS = ((2, 5, 9), (3, 40))


def roll_out(config: dict[str, Any], servers: list[Any]) -> None:
    """Profile one step in which replica 0 answers three requests,
    and replica 1 two and a wrong one.
    """
    import ray

    callback = ProfilingCallback(config)
    callback.add_rollout(servers)
    callback.on_train_begin()
    callback.on_step_begin(1)
    callback.on_rollout_begin()
    answers = [
        server.generate.remote([1, 2, 3, 4], tokens)
        for server, lengths in zip(servers, LENGTHS, strict=True)
        for tokens in lengths
    ]
    wrong = servers[1].generate.remote([1, 999], 1)
    assert [len(answer) for answer in ray.get(answers)] == [2, 5, 9, 3, 40]
    with pytest.raises(ValueError, match="no token 999"):
        ray.get(wrong)
    callback.on_rollout_end()
    callback.on_step_end()
    callback.on_train_end()


def has_answered(worker: CaptureResult, lengths: tuple[int, ...]) -> None:
    """Check that the requests of a replica are those that it answered, with their lengths."""
    answered = [noted for noted in worker.requests if not noted.failed]
    assert sorted(noted.response_tokens for noted in answered) == list(lengths)
    assert {(noted.prompt_tokens, noted.replica) for noted in answered} == {
        (4, worker.identity.replica)
    }
    assert all(noted.begin_ns < noted.first_token_ns < noted.end_ns for noted in answered)


@pytest.mark.parametrize(
    ("settings", "artifact"),
    [
        pytest.param(
            {"tool": "torch", "mode": "discrete"}, ".rollout.torch.json.gz", id="torch-discrete"
        ),
        pytest.param({"tool": "spans"}, None, id="spans"),
    ],
)
def test_replicas_tail_and_requests_are_in_report_and_timeline(
    settings: dict[str, Any], artifact: str | None, ray_cluster: None, tmp_path: Path
) -> None:
    """Two Ray actors with an unknown engine, whatever tool records their processes."""
    import ray

    config = {"enable": True, "save_path": str(tmp_path), **settings}
    remote = ray.remote(num_cpus=0)(OwnServer)
    servers = [remote.remote(config, replica) for replica in range(2)]
    try:
        roll_out(config, servers)
    finally:
        for server in servers:
            ray.kill(server)
    folder = tmp_path / "step_000001"
    assert main(["check", str(folder)]) == 0
    manifest = read_manifest(folder)
    assert [worker.name for worker in manifest.workers] == ["rollout0", "rollout1"]
    for worker, lengths in zip(manifest.workers, LENGTHS, strict=True):
        has_answered(worker, lengths)
    [failed] = [noted for noted in manifest.workers[1].requests if noted.failed]
    assert (failed.prompt_tokens, failed.response_tokens, failed.first_token_ns) == (2, 0, 0)

    [step] = find_steps(folder)
    report = CapturedStep(step).report()
    assert (report.tail.replicas, report.tail.requests) == (2, 5)
    assert report.tail.last_finish_us > report.tail.median_finish_us
    expected = [f"rollout{replica}_rank0" for replica in range(2)] if artifact else []
    assert [row.name for row in report.workers if row.replica is not None] == expected
    assert all((folder / f"{lane}{artifact}").is_file() for lane in expected)

    assert main(["merge", str(folder)]) == 0
    lanes = spans_by_lane(folder / "timeline.json.gz")
    for lane in ("rollout0", "rollout1"):
        assert sum(event["name"].startswith("request (") for event in lanes[lane]) == 3


async def test_a_server_that_is_not_profiled_answers_all_the_same(session: Session) -> None:
    """Switched off, the log is there to be used and keeps nothing."""
    server = OwnServer(None, replica=0)
    assert len(await server.generate([1, 2], 3)) == 3
    assert server._requests.end() == []


def test_the_requests_switch_holds_for_own_engines(session: Session, tmp_path: Path) -> None:
    """A rollout of which nothing was recorded is unknown."""
    config = {
        "enable": True,
        "save_path": str(tmp_path),
        "tool": "spans",
        "rollout": {"requests": False},
    }
    server = OwnServer(config, replica=0)
    with ProfilingCallback(config) as callback:
        callback.add_rollout(server)
        callback.on_step_begin(1)
        callback.on_rollout_begin()
        asyncio.run(server.generate([1], 2))
        callback.on_rollout_end()
        callback.on_step_end()
    [worker] = read_manifest(tmp_path / "step_000001").workers
    assert (worker.status, worker.requests) == ("ok", [])
    report = open_step(tmp_path / "step_000001").report()
    assert {row.kind for row in report.critical_path if row.stage == "rollout"} == {"unknown"}


class BatchServer(RolloutCaptureMixin):
    """Answers four short prompts and a long one in one call."""

    def __init__(self, config: Any, reports_ends: bool) -> None:
        self.requests = RequestLog()
        self.reports_ends = reports_ends
        self.init_capture(config, requests=self.requests)

    def generate(self) -> None:
        with self.requests.open() as batch:
            ends_ns = []
            for took_s in (0.02, 0.2):
                time.sleep(took_s)
                ends_ns.append(time.time_ns())
            for tokens, end_ns in ((4, ends_ns[0]), (40, ends_ns[1]), *[(4, ends_ns[0])] * 3):
                if self.reports_ends:
                    batch.first_token_ns = batch.begin_ns + 1000
                    batch.last_token_ns = end_ns
                batch.close(4, tokens)


@pytest.mark.parametrize("reports_ends", [True, False])
def test_responses_of_a_batch_end_apart_or_have_no_latency(
    reports_ends: bool, session: Session, tmp_path: Path
) -> None:
    """The long one holds the call, though all closed as it returned."""
    config = {"enable": True, "save_path": str(tmp_path), "tool": "spans"}
    server = BatchServer(config, reports_ends)
    with ProfilingCallback(config) as callback:
        callback.add_rollout(server)
        callback.on_step_begin(1)
        callback.on_rollout_begin()
        server.generate()
        callback.on_rollout_end()
        callback.on_step_end()
    [inputs] = find_steps(tmp_path / "step_000001")
    step = CapturedStep(inputs)
    report = step.report(keep_graph=True)
    if not reports_ends:
        assert report.tail.latency_s is None
        with pytest.raises(ConfigError, match="whose ends are known"):
            step.what_if(no_tail=80)
        return
    assert report.tail.latency_s.p50 < 0.15 < 0.2 < report.tail.latency_s.max
    decode_us = sum(row.duration_us for row in report.critical_path if row.kind == "decode")
    assert decode_us > 200_000
    assert step.what_if(no_tail=80).predicted_us < report.span_us - 150_000
