"""A real vLLM in a Ray actor under the stand-in ``nsys``:
its own CUDA profiler mode opens the ranges.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tools.nsys_stand_in import install
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(580)]

ROOT = Path(__file__).resolve().parents[2]

SCRIPT = """
import os, sys, time
from pathlib import Path
import ray
from verl_profiling import ProfilingCallback
from verl_profiling.workers import VLLMCaptureMixin, nsys_runtime_env

model, folder, mode = sys.argv[1:]
settings = {
    "enable": True, "tool": "nsys", "mode": mode, "save_path": folder,
    "schedule": {"steps": [1, 3]}, "rollout": {"count": 2}, "select": {"stages": ["rollout"]},
    "timeouts": {"start_s": 200, "stop_s": 200},
}

@ray.remote(num_cpus=1)
class Server(VLLMCaptureMixin):
    async def start(self):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        output = os.environ["VERL_PROFILING_NSYS_OUTPUT"]
        os.environ["CUDA_CALLS"] = f"{output}.{os.getpid()}.cuda-calls"
        self.engine = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
                max_num_seqs=4, dtype="float32", **self.engine_args(settings),
            )
        )
        self.init_capture(settings)

    async def generate(self, name):
        from vllm import SamplingParams

        sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
        prompt = {"prompt_token_ids": [5, 6, 7]}
        async for _ in self.engine.generate(prompt, sampling, request_id=name):
            pass

    async def leave(self):
        self.engine.shutdown()
        ray.actor.exit_actor()

def run():
    ray.init("local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    server = Server.options(runtime_env=nsys_runtime_env(settings, role="rollout")).remote()
    ray.get(server.start.remote())
    callback = ProfilingCallback(settings)
    callback.add_rollout(server)
    callback.on_train_begin()
    for step in (1, 2, 3):
        callback.on_step_begin(step)
        callback.on_rollout_begin()
        ray.get(server.generate.remote(str(step)))
        callback.on_rollout_end()
        callback.on_step_end()
    callback.on_train_end()
    server.leave.remote()
    deadline = time.monotonic() + 120  # reports are written when the actor has ended
    while len(list(Path(folder, "nsys").glob("*.nsys-rep"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
    ray.shutdown()

if __name__ == "__main__":
    run()
"""


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_the_engine_opens_the_ranges_that_nsys_expects(
    tiny_model: Path, tmp_path: Path, mode: str
) -> None:
    """As many as announced, closed by the engine after two iterations;
    one report a replica and step.
    """
    install(tmp_path, tmp_path / "log")
    (tmp_path / "script.py").write_text(SCRIPT)
    run = tmp_path / "run"
    path = [str(tmp_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    python_path = [str(ROOT / "tests" / "engines" / "cuda_stand_in"), str(ROOT)]
    done = subprocess.run(
        [sys.executable, tmp_path / "script.py", tiny_model, run, mode],
        capture_output=True,
        text=True,
        timeout=560,
        env={
            **os.environ,
            "PATH": os.pathsep.join(path),
            "PYTHONPATH": os.pathsep.join(python_path),
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    options = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert options["capture-range-end"] == "repeat-shutdown:2"
    assert options["trace-fork-before-exec"] == "true"
    [calls] = (run / "nsys").glob("*.cuda-calls")
    assert calls.read_text().split() == ["start", "stop"] * 2
    name = {"e2e": "rollout0.nsys-rep", "discrete": "rollout0.rollout.nsys-rep"}[mode]
    for step in (1, 3):
        [worker] = read_manifest(run / f"step_{step:06d}").workers
        assert [(artifact.path, artifact.status) for artifact in worker.artifacts] == [
            (name, "pending")
        ]
        assert worker.tools == ["nsys"]
        assert [request.response_tokens for request in worker.requests] == [4]
    assert main(["collect", str(run)]) == 0
    for step in (1, 3):
        [worker] = read_manifest(run / f"step_{step:06d}").workers
        assert [(artifact.path, artifact.status) for artifact in worker.artifacts] == [(name, "ok")]
        assert (run / f"step_{step:06d}" / name).read_text() == "report"
