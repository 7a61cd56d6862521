"""Real engines of SGLang that no code of ours starts: an environment variable records them."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engines.plugged import (
    environment,
    free_port,
    need_plugin,
    post,
    serving,
    step_folders,
    wait_for_capture,
    with_letters,
    write_settings,
)
from tests.engines.server import SGLANG_ON_CPU
from verl_profiling import ProfilingCallback
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.step_summary import StepSummary
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.workers import EngineProcesses

pytest.importorskip(
    "sglang", reason="SGLang is not installed; make test-sglang builds its environment"
)
need_plugin("sglang.srt.plugins")

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

OFFLINE = """
import json, sys
import sglang

if __name__ == "__main__":
    options = json.loads(sys.argv[2])
    engine = sglang.Engine(model_path=sys.argv[1], skip_tokenizer_init=True, **options)
    for tokens in (8, 16):
        sampling = {"max_new_tokens": tokens, "ignore_eos": True}
        engine.generate(input_ids=[[5, 6, 7, 8]] * 4, sampling_params=sampling)
    engine.shutdown()
"""


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({}, ["rollout0_rank0.torch.json.gz"]),
        (
            {
                "mode": "discrete",
                "rollout": {"count": 3, "profile_by_stage": True, "merge_profiles": True},
            },
            [
                "rollout0_rank0.rollout_prefill.torch.json.gz",
                "rollout0_rank0.rollout_decode.torch.json.gz",
                "rollout0.rollout.merged.gz",
            ],
        ),
    ],
)
def test_each_batch_of_an_engine_is_a_step(
    changes: dict[str, Any], names: list[str], tiny_model: Path, tmp_path: Path
) -> None:
    """The scheduled one has its own folder, with its traces and four requests."""
    settings = write_settings(tmp_path, schedule={"steps": [2]}, watch={"enable": True}, **changes)
    command = [sys.executable, "-c", OFFLINE, tiny_model, json.dumps(SGLANG_ON_CPU)]
    ended = subprocess.run(
        list(map(str, command)), env=environment(settings), capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    run = tmp_path / "run"
    assert [summary.step for summary in WatchLogReader(run).read()] == [1, 2]
    assert main(["check", str(run)]) == 0
    [worker] = read_manifest(run / "step_000002").workers
    assert [artifact.path for artifact in worker.artifacts] == names
    lengths = [(request.prompt_tokens, request.response_tokens) for request in worker.requests]
    assert lengths == [(4, 16)] * 4


def server_command(model: Path, port: int) -> list[object]:
    """Return the arguments of Python that start a server."""
    command = ["-m", "sglang.launch_server", "--model-path", model, "--port", port]
    for name, value in SGLANG_ON_CPU.items():
        option = f"--{name.replace('_', '-')}"
        command += [option] if value is True else [option, value]
    return command


def generate(url: str, tokens: int) -> tuple[int, float]:
    """Return what a server says of a request, and what it took here (s)."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True}
    begin_s = time.monotonic()
    answer = post(f"{url}/generate", {"text": "ab" * tokens, "sampling_params": sampling})
    return answer["meta_info"]["completion_tokens"], time.monotonic() - begin_s


def test_requests_by_url_and_the_capture_are_the_same(tiny_model: Path, tmp_path: Path) -> None:
    """As of a trainer that has a server generate; a person asks for the capture."""
    model, port, run = with_letters(tiny_model, tmp_path / "model"), free_port(), tmp_path / "run"
    log = tmp_path / "server.log"
    settings = write_settings(
        tmp_path, schedule={"steps": []}, watch={"enable": True}, rollout={"count": 20}
    )
    with serving(server_command(model, port), environment(settings), port, log) as url:
        generate(url, 4)
        assert main(["trigger", str(run), "--wait", "60"]) == 0
        with ThreadPoolExecutor(8) as clients:
            answers = list(
                clients.map(partial(generate, url), [16 + number for number in range(24)])
            )
        wait_for_capture(run)
        assert main(["top", str(run), "--once"]) == 0
    [folder] = step_folders(run)
    [worker] = read_manifest(folder).workers
    assert [artifact.status for artifact in worker.artifacts] == ["ok"]
    lengths = sorted(tokens for tokens, _ in answers)
    assert sorted(request.response_tokens for request in worker.requests) == lengths
    logged = sorted((it.end_ns - it.begin_ns) / 1e9 for it in worker.requests)
    measured = sorted(seconds for _, seconds in answers)
    late = [client - engine for client, engine in zip(measured, logged, strict=True)]
    print("seconds of the client beyond those of the engine:", late)
    assert min(late) > -0.001  # the rest is of HTTP, and of a busy machine without a bound


def test_a_callback_captures_the_server_of_its_run(tiny_model: Path, tmp_path: Path) -> None:
    """The server has no mixin: it joins at its first request, in the settings of the callback."""
    model, port = with_letters(tiny_model, tmp_path / "model"), free_port()
    run, log = tmp_path / "run", tmp_path / "server.log"
    config = {"enable": True, "save_path": str(run), "mode": "discrete", "schedule": {"steps": [2]}}
    engines = EngineProcesses(config, replicas=1)  # before a health check, which is a request
    with (
        serving(server_command(model, port), environment(run), port, log) as url,
        ProfilingCallback(config) as profiling,
    ):
        profiling.add_rollout(engines)
        for step in (1, 2, 3):
            profiling.on_step_begin(step)
            profiling.on_rollout_begin()
            assert generate(url, 8)[0] == 8
            profiling.on_rollout_end()
            profiling.on_step_end()
    engines.close()
    assert [folder.name for folder in step_folders(run)] == ["step_000002"]
    assert main(["check", str(run)]) == 0
    [worker] = read_manifest(run / "step_000002").workers
    assert [artifact.path for artifact in worker.artifacts] == [
        "rollout0_rank0.rollout.torch.json.gz"
    ]
    assert [request.response_tokens for request in worker.requests] == [8]


def test_requests_without_new_tokens_are_a_hang(tiny_model: Path, tmp_path: Path) -> None:
    """Here the scheduler stands still for seconds; once it goes on, so does the step."""
    model, port, run = with_letters(tiny_model, tmp_path / "model"), free_port(), tmp_path / "run"
    log, watch = tmp_path / "server.log", {"enable": True, "hang_s": 3, "first_hang_s": 3}
    settings = write_settings(tmp_path, schedule={"steps": []}, watch=watch)
    with serving(server_command(model, port), environment(settings), port, log) as url:
        generate(url, 4)
        [scheduler] = [
            process
            for process in psutil.Process().children(recursive=True)
            if "scheduler" in " ".join(process.cmdline())
        ]
        scheduler.suspend()
        with ThreadPoolExecutor(1) as clients:
            answer = clients.submit(generate, url, 8)
            try:
                assert eventually(lambda: bool(hangs_in(run)))
                assert main(["top", str(run), "--once"]) == 1
            finally:
                scheduler.resume()
            assert answer.result()[0] == 8
    assert {summary.hang.stage for summary in hangs_in(run)} == {"rollout"}


def hangs_in(run: Path) -> list[StepSummary]:
    """Return the lines of the watch's log that are hangs."""
    return [summary for summary in WatchLogReader(run).read() if summary.hang is not None]


def eventually(look: Callable[[], bool]) -> bool:
    """Return whether something becomes true within a minute."""
    deadline_s = time.monotonic() + 60
    while not (seen := look()) and time.monotonic() < deadline_s:
        time.sleep(0.5)
    return seen
