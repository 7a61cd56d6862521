"""A tiny model, the environment of offline CPU engines, and a table of what ran."""

from __future__ import annotations

import importlib.util
import os
from collections import defaultdict
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


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print engine x case, each cell passed or with its reason."""
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            engine = dict(getattr(report, "user_properties", [])).get("engine")
            if engine is None or (report.when != "call" and outcome == "passed"):
                continue
            reason = ""
            if outcome == "skipped":
                reason = ": " + str(report.longrepr[2]).removeprefix("Skipped: ")
            cells[report.nodeid.rsplit("::", 1)[-1].removeprefix("test_")][engine] = outcome + reason
    if not cells:
        return
    terminalreporter.section("engines")
    for case, by_engine in cells.items():
        for engine, cell in by_engine.items():
            terminalreporter.write_line(f"{engine:<22} {case:<62} {cell}")
