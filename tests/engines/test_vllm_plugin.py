"""Real engines of vLLM that no code of ours starts: an environment variable records them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.engines.plugged import (
    PROMPTS,
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
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")
need_plugin("vllm.general_plugins")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

OPTIONS = {"enforce_eager": True, "max_model_len": 256, "max_num_seqs": 8, "dtype": "float32"}
OFFLINE = """
import json, sys
from vllm import LLM, SamplingParams

if __name__ == "__main__":
    model, options = sys.argv[1], json.loads(sys.argv[2])
    llm = LLM(model, **options)
    for tokens in (8, 16, 24):
        parameters = SamplingParams(max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": [5, 6, 7, 8]}] * 4, parameters)
    llm.chat([{"role": "user", "content": "a"}], parameters, chat_template="ab")
"""


def run_offline(model: Path, settings: Path, **options: object) -> str:
    """Run a program without a line of this package; return its log."""
    command = [sys.executable, "-c", OFFLINE, model, json.dumps({**OPTIONS, **options})]
    run = subprocess.run(
        list(map(str, command)), env=environment(settings), capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stderr


def test_each_batch_of_an_llm_is_a_step(tiny_model: Path, tmp_path: Path) -> None:
    """The scheduled one has its own folder, with a trace and four requests;
    a chat is a batch too.
    """
    model = with_letters(tiny_model, tmp_path / "model")
    watch = {"enable": True}
    run_offline(model, write_settings(tmp_path, schedule={"steps": [2, 4]}, watch=watch))
    run = tmp_path / "run"
    assert [summary.step for summary in WatchLogReader(run).read()] == [1, 2, 3, 4]
    assert [path.name for path in step_folders(run)] == ["step_000002", "step_000004"]
    assert main(["check", str(run)]) == 0
    [worker] = read_manifest(run / "step_000002").workers
    assert [artifact.path for artifact in worker.artifacts] == ["rollout0_rank0.torch.json.gz"]
    lengths = [(request.prompt_tokens, request.response_tokens) for request in worker.requests]
    assert lengths == [(4, 16)] * 4
    [worker] = read_manifest(run / "step_000004").workers
    assert [request.response_tokens for request in worker.requests] == [24]


def test_wrong_settings_are_one_line(tiny_model: Path, tmp_path: Path) -> None:
    """The engine serves all the same, and no folder is made."""
    log = run_offline(
        with_letters(tiny_model, tmp_path / "model"), write_settings(tmp_path, steps=3)
    )
    lines = [line for line in log.splitlines() if "VERL_PROFILING_RUN" in line]
    assert len(lines) == 1
    assert "steps: unknown key" in lines[0]
    assert "this engine is not recorded" in lines[0]
    assert not (tmp_path / "run").exists()


def test_tensor_parallel_ranks_have_their_traces_in_the_step(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In discrete mode the files have the stage in their names."""
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")
    model = with_letters(tiny_model, tmp_path / "model")
    settings = write_settings(tmp_path, schedule={"steps": [2]}, mode="discrete")
    run_offline(model, settings, tensor_parallel_size=2)
    [worker] = read_manifest(tmp_path / "run" / "step_000002").workers
    assert [(artifact.path, artifact.status) for artifact in worker.artifacts] == [
        ("rollout0_rank0.rollout.torch.json.gz", "ok"),
        ("rollout0_rank1.rollout.torch.json.gz", "ok"),
    ]


def test_the_bench_of_a_server_and_the_capture_have_the_same_requests(
    tiny_model: Path, tmp_path: Path
) -> None:
    """A person asks for the capture; the run is watched from its first request on."""
    model, port = with_letters(tiny_model, tmp_path / "model"), free_port()
    settings = write_settings(
        tmp_path, schedule={"steps": []}, watch={"enable": True}, rollout={"count": 20}
    )
    # The command asks for the version of a distribution of this name, and the one here is vllm-cpu.
    names = tmp_path / "names" / "vllm-0.0.0+cpu.dist-info"
    names.mkdir(parents=True)
    (names / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+cpu\n")
    variables = environment(settings, names.parent)
    command = ["-m", "vllm.entrypoints.cli.main"]
    server = [*command, "serve", model, "--port", port, "--enforce-eager"]
    server += ["--max-model-len", 256, "--max-num-seqs", 8, "--dtype", "float32"]
    run, prompts = tmp_path / "run", tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    with serving(server, variables, port, tmp_path / "server.log") as url:
        body = {"model": str(model), "prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True}
        post(f"{url}/v1/completions", body)
        assert main(["trigger", str(run), "--wait", "60"]) == 0
        bench = [*command, "bench", "serve", "--model", model, "--port", port]
        bench += ["--dataset-name", "custom", "--dataset-path", prompts, "--skip-chat-template"]
        bench += ["--num-prompts", len(PROMPTS), "--max-concurrency", 8, "--ignore-eos"]
        bench += ["--custom-output-len", 64, "--save-result", "--save-detailed"]
        bench += ["--num-warmups", 0, "--result-dir", tmp_path, "--result-filename", "bench.json"]
        subprocess.run([sys.executable, *map(str, bench)], env=variables, check=True)
        wait_for_capture(run)
        assert main(["top", str(run), "--once"]) == 0
    [folder] = step_folders(run)
    [worker] = read_manifest(folder).workers
    assert [artifact.status for artifact in worker.artifacts] == ["ok"]
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["completed"] == len(PROMPTS) == len(worker.requests)
    assert measured["total_output_tokens"] == sum(it.response_tokens for it in worker.requests)
    assert measured["total_input_tokens"] == sum(it.prompt_tokens for it in worker.requests)
    latencies = sorted(
        first + sum(others)
        for first, others in zip(measured["ttfts"], measured["itls"], strict=True)
    )
    logged = sorted((it.end_ns - it.begin_ns) / 1e9 for it in worker.requests)
    late = [client - server for client, server in zip(latencies, logged, strict=True)]
    print("seconds of the client beyond those of the engine:", late)
    assert min(late) > -0.001  # the rest is of HTTP, and of a busy machine without a bound
