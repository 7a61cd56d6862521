"""Everything of ours starts engines on a CPU in float32: in bfloat16 some CPUs end them (docs/engines.md)."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.engines.server import SGLANG_ON_CPU

ROOT = Path(__file__).resolve().parents[2]
# What takes an engine's options: vLLM's arguments, vLLM's and SGLang's engines.
STARTS = re.compile(r"\b(?:AsyncEngineArgs|LLM|Engine)\(")
OPTION = re.compile(r"\bmodel(_path)?=|\*\*")
# Options that a caller hands on: the shared ones, and those of a command line.
HANDED_ON = re.compile(r"\*\*(?:\{\*\*SGLANG_ON_CPU|options)\b")
ON_A_COMMAND_LINE = re.compile(r"profile_(\w+) +MODEL +(\S+=.*)")


def arguments(text: str, begin: int) -> str:
    """Return what stands between an opening parenthesis and the one that closes it."""
    depth = 1
    for place in range(begin, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return text[begin:place]
    raise AssertionError("a parenthesis that nothing closes")


def in_float32(options: str) -> bool:
    """Return whether an engine with these options computes in float32."""
    return 'dtype="float32"' in options or HANDED_ON.search(options) is not None


def starts() -> Iterator[tuple[str, str]]:
    """Yield each place in recipes, tests and benchmarks that starts an engine, with the options it passes."""
    for folder in ("recipes", "tests", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            text = path.read_text()
            for found in STARTS.finditer(text):
                line = text.count("\n", 0, found.start()) + 1
                options = arguments(text, found.end())
                if OPTION.search(options):  # stand-ins and base classes take none
                    yield f"{path.relative_to(ROOT)}:{line}", options


def test_engines_are_started_in_float32() -> None:
    """Every call names the type, or hands options on that name it; the engines known today are among them."""
    found = dict(starts())
    wrong = [place for place, options in found.items() if not in_float32(options)]
    assert not wrong
    places = {place.partition(":")[0] for place in found}
    assert places >= {
        "recipes/grpo_tiny/rollout.py",
        "recipes/rollout_only/profile_sglang.py",
        "recipes/rollout_only/profile_vllm.py",
        "tests/engines/test_sglang.py",
        "tests/engines/test_vllm.py",
        "tests/engines/test_vllm_processes.py",
    }


def test_the_shared_options_name_the_type() -> None:
    """What the tests of SGLang hand on."""
    assert SGLANG_ON_CPU["dtype"] == "float32"


def test_the_commands_for_a_cpu_name_the_type() -> None:
    """Each command of recipes/rollout_only that is for a machine without an accelerator."""
    page = (ROOT / "recipes/rollout_only/README.md").read_text().replace("\\\n", " ")
    for_a_cpu = dict(ON_A_COMMAND_LINE.findall(page))
    assert for_a_cpu.keys() == {"vllm", "sglang"}
    assert all("dtype=float32" in options.split() for options in for_a_cpu.values())


def test_verl_on_a_cpu_rolls_out_in_float32() -> None:
    """The recipe overrules verl, which asks vLLM and SGLang for bfloat16."""
    settings = yaml.safe_load((ROOT / "recipes/verl_grpo_cpu/grpo_cpu.yaml").read_text())
    assert settings["trainer"]["device"] == "cpu"
    assert settings["actor_rollout_ref"]["rollout"]["dtype"] == "float32"


@pytest.mark.parametrize(
    "path",
    ["recipes/verl_grpo_cpu/make_assets.py", "tests/engines/conftest.py", "recipes/grpo_tiny/model.py"],
)
def test_models_for_a_cpu_are_saved_in_float32(path: str) -> None:
    """Without a dtype in the settings an engine uses that of the model."""
    assert not re.search(r"bfloat16|float16|\.half\(", (ROOT / path).read_text())
