"""vLLM's `LLM`, with and without processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiling.files.run_files import read_manifest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(580)]

SCRIPT = """
import sys
from pathlib import Path
from verl_profiling import ProfilingCallback

def settings(folder, mode):
    return {"enable": True, "save_path": str(folder), "mode": mode, "schedule": {"steps": [1, 3]}}

def run_steps(profiling, server, generate):
    callback = ProfilingCallback(profiling)
    callback.add_rollout(server)
    callback.on_train_begin()
    for step in (1, 2, 3):
        callback.on_step_begin(step, policy_version=step)
        callback.on_rollout_begin()
        generate()
        callback.on_rollout_end()
        callback.on_step_end()
    callback.on_train_end()

def main():
    from vllm import LLM, SamplingParams
    from verl_profiling.workers import VLLMCaptureMixin

    model, folder, backend = sys.argv[1:]

    class Server(VLLMCaptureMixin):
        def __init__(self):
            self.engine = LLM(
                model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128,
                max_num_seqs=4,
                dtype="float32", distributed_executor_backend=backend or None,
                **self.engine_args(settings(folder, "e2e")),
            )

        def generate(self):
            prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
            sampling = SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False)
            self.engine.generate(prompts, sampling, use_tqdm=False)

    server = Server()
    for mode in ("e2e", "discrete"):
        profiling = settings(Path(folder, mode), mode)
        server.init_capture(profiling)
        run_steps(profiling, server, server.generate)

if __name__ == "__main__":
    main()
"""


def assert_complete(model: Path, folder: Path, backend: str = "", **environment: str) -> None:
    """Run a training loop with an engine in both modes and check every manifest it wrote."""
    (folder / "script.py").write_text(SCRIPT)
    run = subprocess.run(
        [sys.executable, folder / "script.py", model, folder / "out", backend],
        capture_output=True,
        text=True,
        timeout=560,
        env={**os.environ, **environment},
    )
    assert run.returncode == 0, run.stderr[-3000:]
    for mode, name in (("e2e", "rollout0_rank0"), ("discrete", "rollout0_rank0.rollout")):
        assert sorted(path.name for path in (folder / "out" / mode).glob("step_*")) == [
            "step_000001",
            "step_000003",
        ]
        for step in (1, 3):
            [worker] = read_manifest(folder / "out" / mode / f"step_{step:06d}").workers
            [artifact] = worker.artifacts
            assert (worker.status, artifact.path, artifact.status) == (
                "ok",
                f"{name}.torch.json.gz",
                "ok",
            )
            assert artifact.events > 0
            requests = [
                (one.prompt_tokens, one.response_tokens, one.policy_version)
                for one in worker.requests
            ]
            assert requests == [(3, 4, step)] * 2


def test_llm_with_a_core_process(tiny_model: Path, tmp_path: Path) -> None:
    """A sync `LLM` as vLLM starts it: complete folders in both modes."""
    assert_complete(tiny_model, tmp_path)


def test_llm_in_this_process(tiny_model: Path, tmp_path: Path) -> None:
    """The session records an `LLM` without separate processes: complete folders in both modes."""
    assert_complete(tiny_model, tmp_path, "uni", VLLM_ENABLE_V1_MULTIPROCESSING="0")
