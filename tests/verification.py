"""How each tool was verified, on each kind of worker, in each mode: the table in the README.

``python -m tests.verification REPORT.xml ...`` prints the table from the JUnit reports of the
suites that ran (``make verification`` runs them): a cell holds only when its tests were run and
passed.
"""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["CELLS", "Cell", "outcomes", "table"]

REAL = "real library, CPU"
CONTRACT = "contract"
NOT_RUN = "not run"
NOTHING = "-"

WORKERS = ("FSDP", "Megatron", "any `CaptureMixin`", "vLLM", "SGLang", "transformers")
MODES = ("e2e", "discrete")

_GRPO = "tests.recipes.test_grpo_tiny::test_every_artifact_is_there"
_MEGATRON = "tests.workers.test_megatron::"
_SGLANG = "tests.engines.test_sglang.TestEngine::"
_VLLM = "tests.engines.test_vllm.TestAsyncLLM::"
_BY_STAGE = "test_discrete_windows_are_named_by_stage_and_occurrence"
_NPU = "tests.tools.test_npu.TestRealTorchNpu::"
_ASCEND = "tests.engines.test_ascend.TestOwnProfilers::"
_MSPROBE = "tests.tools.test_precision.TestRealMsprobe::"
_VLLM_NSYS = "tests.engines.test_vllm_nsys::test_the_engine_opens_the_ranges_that_nsys_expects"
_NSYS = "tests.tools.test_nsys.TestUnderRay::"
_SESSION = "tests.capture.test_session::"
_MIXIN = "any `CaptureMixin`"


@dataclass(frozen=True)
class Cell:
    """One verified combination.

    Attributes:
        tool: Name of the tool.
        worker: Kind of worker.
        mode: ``e2e`` or ``discrete``.
        how: What ran: the real library on CPU; or, as a contract, the real library against
            stand-ins for what only hardware has.
        tests: The tests that must have passed, as ``module[.Class]::name``.
    """

    tool: str
    worker: str
    mode: str
    how: str
    tests: tuple[str, ...]


# Tool, worker, how, and the tests of each mode.
_ROWS: tuple[tuple[str, str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("torch", "FSDP", REAL, (f"{_GRPO}[e2e]",), (f"{_GRPO}[discrete]",)),
    (
        "torch",
        "Megatron",
        REAL,
        (f"{_MEGATRON}test_tensor_parallel_ranks",),
        (f"{_MEGATRON}test_pipeline_stages",),
    ),
    (
        "torch",
        _MIXIN,
        REAL,
        ("tests.tools.test_torch::test_a_trace_holds_ops_stages_and_who_recorded",),
        (f"{_SESSION}test_discrete_mode_records_each_stage_apart",),
    ),
    ("torch", "vLLM", REAL, (f"{_GRPO}[e2e-vllm]",), (f"{_VLLM}{_BY_STAGE}",)),
    ("torch", "SGLang", REAL, (f"{_GRPO}[e2e-sglang]",), (f"{_SGLANG}{_BY_STAGE}",)),
    ("torch", "transformers", REAL, (f"{_GRPO}[e2e]",), (f"{_GRPO}[discrete]",)),
    (
        "torch_memory",
        _MIXIN,
        CONTRACT,
        (f"{_NPU}test_the_memory_tool_beside_it",),
        (f"{_NPU}test_the_memory_tool_by_stage",),
    ),
    ("nsys", _MIXIN, CONTRACT, (f"{_NSYS}test_e2e",), (f"{_NSYS}test_discrete_with_a_stage_that_raises",)),
    ("nsys", "vLLM", CONTRACT, (f"{_VLLM_NSYS}[e2e]",), (f"{_VLLM_NSYS}[discrete]",)),
    (
        "npu",
        _MIXIN,
        CONTRACT,
        (f"{_NPU}test_a_whole_step", f"{_NPU}test_the_timeline_reads_what_the_parser_wrote"),
        (f"{_NPU}test_each_stage_apart",),
    ),
    (
        "npu",
        "vLLM",
        CONTRACT,
        (f"{_ASCEND}test_a_window_of_vllm",),
        (f"{_ASCEND}test_vllm_by_stage_of_the_loop",),
    ),
    (
        "npu",
        "SGLang",
        CONTRACT,
        (f"{_ASCEND}test_a_window_of_sglang",),
        (f"{_ASCEND}test_sglang_by_stage_of_the_loop",),
    ),
    (
        "precision",
        _MIXIN,
        REAL,
        (f"{_MSPROBE}test_a_step_holds_what_torch_was_called_with",),
        (f"{_MSPROBE}test_a_stage_that_raises",),
    ),
    (
        "spans",
        _MIXIN,
        REAL,
        (f"{_SESSION}test_a_capture_goes_from_start_to_stop",),
        ("tests.tools.test_spans::test_it_writes_no_artifact_and_switches_nothing_on[discrete]",),
    ),
    ("spans", "vLLM", REAL, ("tests.engines.test_vllm::test_engine_without_a_profiler",), ()),
)
CELLS = tuple(
    Cell(tool, worker, mode, how, tests)
    for tool, worker, how, *modes in _ROWS
    for mode, tests in zip(MODES, modes, strict=True)
    if tests
)


def outcomes(reports: Iterable[Path]) -> dict[str, bool]:
    """Return whether each test that ran passed, from JUnit reports; one that was skipped did not run."""
    found: dict[str, bool] = {}
    for report in reports:
        for case in ET.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                name = f"{case.get('classname')}::{case.get('name')}"
                failed = case.find("failure") is not None or case.find("error") is not None
                found[name] = found.get(name, True) and not failed
    return found


def table(results: Mapping[str, bool] | None = None) -> str:
    """Return the table in Markdown.

    Args:
        results: What passed; ``None`` for the table of a complete run.
    """
    tools = dict.fromkeys(cell.tool for cell in CELLS)
    lines = [f"| tool | mode | {' | '.join(WORKERS)} |", f"|---|---|{'---|' * len(WORKERS)}"]
    for tool in tools:
        for mode in MODES:
            entries = [_entry(tool, worker, mode, results) for worker in WORKERS]
            if any(entry != NOTHING for entry in entries):
                lines.append(f"| `{tool}` | {mode} | {' | '.join(entries)} |")
    return "\n".join(lines) + "\n"


def _entry(tool: str, worker: str, mode: str, results: Mapping[str, bool] | None) -> str:
    for cell in CELLS:
        if (cell.tool, cell.worker, cell.mode) == (tool, worker, mode):
            if results is None or all(results.get(test) for test in cell.tests):
                return cell.how
            return "FAILED" if any(results.get(test) is False for test in cell.tests) else NOT_RUN
    return NOTHING


if __name__ == "__main__":
    print(table(outcomes(map(Path, sys.argv[1:]))), end="")
