"""recipes/rollout_only, run as its README says."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.watch_log import WatchLogReader

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = [
    "device=cpu",
    "attention_backend=torch_native",
    "sampling_backend=pytorch",
    "dtype=float32",
]


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> Path:
    """The tiny model, with a tokenizer of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {
        word: number
        for number, word in enumerate(("[PAD]", "[END]", "Count", "down", "from", "ten", ":"))
    }
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path / "model"
    shutil.copytree(tiny_model, folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[END]", pad_token="[PAD]"
    ).save_pretrained(folder)
    return folder


@pytest.mark.timeout(580)
@pytest.mark.parametrize(
    ("engine", "arguments"),
    [
        pytest.param("vllm", ["dtype=float32"], id="vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", ON_CPU, id="sglang", marks=pytest.mark.sglang),
    ],
)
def test_the_script_captures_a_batch(
    engine: str, arguments: list[str], model: Path, tmp_path: Path
) -> None:
    """One step folder without a fault, in which eight requests have their lengths;
    the plugin leaves the engine to the mixin.
    """
    pytest.importorskip(engine)
    path = os.pathsep.join([str(ROOT), str(ROOT / "recipes" / "sglang_cpu")])
    run = subprocess.run(
        [sys.executable, "-m", f"recipes.rollout_only.profile_{engine}", model, *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path, "VERL_PROFILING_RUN": str(tmp_path / "plugin")},
        capture_output=True,
        text=True,
        timeout=560,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    folder = tmp_path / "outputs" / "rollout_only" / "step_000001"
    assert f"verl-profiling report {folder}" in run.stdout
    assert main(["check", str(folder)]) == 0
    [worker] = read_manifest(folder).workers
    assert [artifact.path for artifact in worker.artifacts] == ["rollout0_rank0.torch.json.gz"]
    *_, summary = WatchLogReader(folder.parent).read()
    assert (summary.step, summary.captured) == (1, folder.name)
    assert not (tmp_path / "plugin").exists()
    assert sorted(noted.response_tokens for noted in worker.requests) == list(range(8, 65, 8))
