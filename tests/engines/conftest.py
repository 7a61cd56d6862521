"""A tiny model, and the environment of offline CPU engines."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}
SGLANG_ON_CPU = Path(__file__).resolve().parents[2] / "recipes" / "sglang_cpu"


if importlib.util.find_spec("sglang") is not None:
    from recipes.sglang_cpu import sitecustomize  # noqa: F401  it acts when it is imported

    os.environ["PYTHONPATH"] = os.pathsep.join(
        [str(SGLANG_ON_CPU), *filter(None, [os.environ.get("PYTHONPATH")])]
    )


@pytest.fixture(scope="session", autouse=True)
def offline_cpu_engines() -> None:
    """Engines read these when they are imported, and pass them to their processes."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a random Qwen2 with two layers, without a tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=False,
    )
    folder = tmp_path_factory.mktemp("model") / "tiny-qwen2"
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)
    return folder
