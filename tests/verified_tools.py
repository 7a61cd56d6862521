"""How each tool was verified, on each kind of worker, in each mode: the table in the README."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from pathlib import Path

REAL = "real library, CPU"
CONTRACT = "contract"
CAPTURES = "real captures"

MODES = ("e2e", "discrete")
_MIXIN = "any `CaptureMixin`"
WORKERS = ("FSDP", "Megatron", _MIXIN, "vLLM", "SGLang", "transformers")

_GRPO = "tests.recipes.test_grpo_tiny::test_every_artifact_is_there"
_MEGATRON = "tests.workers.test_megatron::"
_BY_STAGE = "test_discrete_windows_are_named_by_stage_and_occurrence"
_NPU = "tests.tools.test_npu.TestRealTorchNpu::"
_ASCEND = "tests.engines.test_ascend.TestOwnProfilers::"
_NPU_READ = "tests.timeline.test_databases::test_real_captures_of_npus_are_divided_as_by_torch_npu"
_MSPROBE = "tests.tools.test_precision.TestRealMsprobe::"
_VLLM_NSYS = "tests.engines.test_vllm_nsys::test_the_engine_opens_the_ranges_that_nsys_expects"
_NSYS = "tests.tools.test_nsys.TestUnderRay::"
_SESSION = "tests.capture.test_session::"
_SPANS = "tests.tools.test_spans::"

CELLS: dict[tuple[str, str], tuple[str, str, str]] = {
    ("torch", "FSDP"): (REAL, f"{_GRPO}[e2e]", f"{_GRPO}[discrete]"),
    ("torch", "Megatron"): (
        REAL,
        f"{_MEGATRON}test_tensor_parallel_ranks",
        f"{_MEGATRON}test_pipeline_stages",
    ),
    ("torch", _MIXIN): (
        REAL,
        "tests.tools.test_torch::test_a_trace_holds_ops_stages_and_who_recorded",
        f"{_SESSION}test_discrete_mode_records_each_stage_apart",
    ),
    ("torch", "vLLM"): (
        REAL,
        f"{_GRPO}[e2e-vllm]",
        f"tests.engines.test_vllm.TestAsyncLLM::{_BY_STAGE}",
    ),
    ("torch", "SGLang"): (
        REAL,
        f"{_GRPO}[e2e-sglang]",
        f"tests.engines.test_sglang.TestEngine::{_BY_STAGE}",
    ),
    ("torch", "transformers"): (REAL, f"{_GRPO}[e2e]", f"{_GRPO}[discrete]"),
    ("torch_memory", _MIXIN): (
        CONTRACT,
        f"{_NPU}test_the_memory_tool_beside_it",
        f"{_NPU}test_the_memory_tool_by_stage",
    ),
    ("nsys", _MIXIN): (
        CONTRACT,
        f"{_NSYS}test_e2e",
        f"{_NSYS}test_discrete_with_a_stage_that_raises",
    ),
    ("nsys", "vLLM"): (CONTRACT, f"{_VLLM_NSYS}[e2e]", f"{_VLLM_NSYS}[discrete]"),
    ("npu", _MIXIN): (CONTRACT, f"{_NPU}test_a_whole_step", f"{_NPU}test_each_stage_apart"),
    ("npu", "vLLM"): (
        CONTRACT,
        f"{_ASCEND}test_a_window_of_vllm",
        f"{_ASCEND}test_vllm_by_stage_of_the_loop",
    ),
    ("npu", "SGLang"): (
        CONTRACT,
        f"{_ASCEND}test_a_window_of_sglang",
        f"{_ASCEND}test_sglang_by_stage_of_the_loop",
    ),
    ("npu, read", _MIXIN): (CAPTURES, f"{_NPU_READ}[text-5616]", f"{_NPU_READ}[db-3518]"),
    ("precision", _MIXIN): (
        REAL,
        f"{_MSPROBE}test_a_step_holds_what_torch_was_called_with",
        f"{_MSPROBE}test_a_stage_that_raises",
    ),
    ("spans", _MIXIN): (
        REAL,
        f"{_SESSION}test_a_capture_goes_from_start_to_stop",
        f"{_SPANS}test_it_writes_no_artifact_and_switches_nothing_on[discrete]",
    ),
    ("spans", "vLLM"): (REAL, "tests.engines.test_vllm::test_engine_without_a_profiler", ""),
}
"""How a pair of tool and worker was verified, and the test of each mode,
as ``module[.Class]::name``.
"""


def outcomes(reports: Iterable[Path]) -> dict[str, bool]:
    """Return whether each test that ran passed, from JUnit reports;
    one that was skipped did not run.
    """
    found: dict[str, bool] = {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                name = f"{case.get('classname')}::{case.get('name')}"
                failed = case.find("failure") is not None or case.find("error") is not None
                found[name] = found.get(name, True) and not failed
    return found


def table(results: Mapping[str, bool] | None = None) -> str:
    """Return the table in Markdown, of what passed; without results, of a complete run."""
    lines = [f"| tool | {' | '.join(WORKERS)} |", f"|---|{'---|' * len(WORKERS)}"]
    for tool in dict.fromkeys(tool for tool, _ in CELLS):
        entries = [_entry(CELLS.get((tool, worker), ("-",)), results) for worker in WORKERS]
        lines.append(f"| `{tool}` | {' | '.join(entries)} |")
    return "\n".join(lines) + "\n"


def _entry(cell: tuple[str, ...], results: Mapping[str, bool] | None) -> str:
    """Return one outcome of both modes, or those of each mode that has a test."""
    how, *tests = cell
    by_mode = {
        mode: how
        if results is None or results.get(test)
        else "FAILED"
        if test in results
        else "not run"
        for mode, test in zip(MODES, tests, strict=False)
        if test
    }
    if len(by_mode) != 1 and len(set(by_mode.values())) <= 1:
        return next(iter(by_mode.values()), how)
    return ", ".join(f"{outcome} ({mode})" for mode, outcome in by_mode.items())


if __name__ == "__main__":
    print(table(outcomes(map(Path, sys.argv[1:]))), end="")
