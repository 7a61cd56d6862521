"""vLLM in the other places it runs in: `LLM` with and without processes of its own, and a Ray actor."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed; make test-vllm builds its environment")

pytestmark = pytest.mark.vllm


@pytest.fixture(autouse=True)
def engine_of_the_table(record_property: pytest.FixtureRequest) -> None:
    import vllm

    record_property("engine", f"vLLM {vllm.__version__}")


LLM_SCRIPT = """
import json, sys
from pathlib import Path

def main():
    from vllm import LLM, SamplingParams
    from verl_profiling import ProfilingCallback, stage
    from verl_profiling.workers import VLLMCaptureMixin

    model, folder, mode = sys.argv[1:]
    profiling = {"enable": True, "save_path": folder, "mode": mode, "schedule": {"steps": [1, 3]}}

    class Server(VLLMCaptureMixin):
        def __init__(self):
            self.engine = LLM(
                model=model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=128, max_num_seqs=4,
                dtype="bfloat16", **self.engine_args(profiling),
            )
            self.init_capture(profiling)

        def generate(self):
            prompts = [{"prompt_token_ids": [5, 6, 7]}] * 2
            self.engine.generate(
                prompts, SamplingParams(max_tokens=4, ignore_eos=True, detokenize=False), use_tqdm=False
            )

    server = Server()
    callback = ProfilingCallback(profiling)
    callback.add_rollout(server)
    callback.on_train_begin()
    for step in (1, 2, 3):
        callback.on_step_begin(step)
        callback.on_rollout_begin()
        server.generate()
        callback.on_rollout_end()
        callback.on_step_end()
    callback.on_train_end()
    workers = {}
    for path in sorted(Path(folder).glob("step_*/manifest.json")):
        [worker] = json.loads(path.read_text())["workers"]
        workers[path.parent.name] = {
            "status": worker["status"], "reason": worker.get("reason"),
            "artifacts": [[a["path"], a["status"]] for a in worker["artifacts"]],
            "requests": [[r["prompt_tokens"], r["response_tokens"]] for r in worker["requests"]],
        }
    print(json.dumps(workers))

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
@pytest.mark.parametrize("processes", ["1", "0"])
def test_llm_behind_the_callback(
    tiny_model: Path, tmp_path: Path, mode: str, processes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sync `LLM`, its core in a process of its own or in this one: two steps, complete folders."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", processes)
    if processes == "0":
        mode_arguments = LLM_SCRIPT.replace(
            'dtype="bfloat16"', 'dtype="bfloat16", distributed_executor_backend="uni"'
        )
    else:
        mode_arguments = LLM_SCRIPT
    script = tmp_path / "script.py"
    script.write_text(mode_arguments)
    run = subprocess.run(
        [sys.executable, script, tiny_model, tmp_path / "out", mode],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    workers = json.loads(run.stdout.strip().splitlines()[-1])
    name = "rollout0_rank0.torch.json.gz" if mode == "e2e" else "rollout0_rank0.rollout.torch.json.gz"
    assert sorted(workers) == ["step_000001", "step_000003"]
    for worker in workers.values():
        assert worker == {
            "status": "ok",
            "reason": "",
            "artifacts": [[name, "ok"]],
            "requests": [[3, 4], [3, 4]],
        }
