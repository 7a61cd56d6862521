"""``replay`` on real engines: the load of a step that another server answered."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from tests.agent_load import record_load
from tests.engines.server import SGLANG_ON_CPU
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_OK, main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.integrations.replay import EngineServer

SPECIAL_IDS = (0, 1, 2)  # of tiny_model
VLLM: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "dtype": "float32",  # with bfloat16, workers are killed on some CPUs
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enable_prefix_caching": True,
    "block_size": 32,  # of 128 on CPUs, the shared block of 64 tokens would fill none
}
SGLANG: dict[str, Any] = {
    **SGLANG_ON_CPU,
    "skip_tokenizer_init": True,
    "disable_radix_cache": False,
}


@pytest.mark.parametrize(
    ("engine", "model_option", "options"),
    [
        pytest.param("vllm", "model", VLLM, marks=pytest.mark.vllm, id="vllm"),
        pytest.param("sglang", "model_path", SGLANG, marks=pytest.mark.sglang, id="sglang"),
    ],
)
@pytest.mark.timeout(600)
def test_an_engine_answers_the_load_with_the_recorded_lengths(
    engine: str,
    model_option: str,
    options: dict[str, Any],
    tiny_model: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Twice, each time with an empty cache; the group's prompt comes out of it then.

    The engine gets no token that its model says is special.
    """
    generate, sent = EngineServer.generate, set[int]()

    async def noted(self: Any, id: str, prompt: list[int], tokens: int) -> None:
        sent.update(prompt)
        await generate(self, id, prompt, tokens)

    monkeypatch.setattr(EngineServer, "generate", noted)
    folder = record_load(tmp_path / "run", prompt_hashes=True)
    settings = {model_option: str(tiny_model), **options}
    words = ["replay", str(folder), "--engine", engine, "--times", "2"]
    words += [
        *("--output", str(tmp_path / "again"), "--json"),
        *(
            word
            for name, value in settings.items()
            for word in ("--set", f"{name}={json.dumps(value)}")
        ),
    ]
    assert main(words) == EXIT_OK
    assert min(sent) > max(SPECIAL_IDS)
    for number in (1, 2):
        manifest = read_manifest(tmp_path / "again" / f"step_{number:06}")
        requests = [one for worker in manifest.workers for one in worker.requests]
        lengths = sorted((one.prompt_tokens, one.response_tokens) for one in requests)
        assert lengths == [(3, 5), (100, 20), (100, 30), (140, 7)]
        (turn,) = (one for one in requests if one.prompt_tokens == 140)
        assert turn.cached_tokens is not None
        assert turn.cached_tokens >= 64
        assert not any(one.failed for one in requests)

    for process in multiprocessing.active_children():
        process.join(30)
    assert main([*words, "--set", "max_seqs=8"]) == EXIT_BAD_INPUT
    assert "--set max_seqs" in capfd.readouterr().err
