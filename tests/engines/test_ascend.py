"""Engines on an Ascend NPU: what they can record,
and captures by their own profilers on stand-in CANN.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integrations.wheels import sources
from tests.npu import artifacts_of, engine_sources, outcomes_of
from verl_profiling import ConfigError, ProfilingConfig
from verl_profiling.analysis import CapturedStep
from verl_profiling.engines import adapter, adapter_named, vllm
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.run_files import rank_of_recording
from verl_profiling.settings.config import RolloutOptions
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.trace import Trace
from verl_profiling.timeline.merge import merge
from verl_profiling.tools.npu import NpuOptions, NpuTool
from verl_profiling.workers import RequestLog, SGLangCaptureMixin

Outcome = dict[str, Any]


class Manager:
    """What the adapter reads of an SGLang ``Engine`` before it starts anything."""

    def __init__(self, device: str, **sizes: int) -> None:
        sizes = {"tp_size": 1, "pp_size": 1, "dp_size": 1, **sizes}
        self.server_args = type("ServerArgs", (), {"device": device, **sizes})()
        self.tokenizer_manager = self

    async def start_profile(
        self, output_dir: str | None = None, start_step: int | None = None
    ) -> None:
        """Start nothing."""

    async def stop_profile(self) -> None:
        """Stop nothing."""


def settings(**fields: Any) -> ProfilingConfig:
    return ProfilingConfig.from_any({"enable": True, "tool": "npu", **fields})


@pytest.mark.parametrize(
    ("engine", "options", "key", "remedy"),
    [
        ("vllm", {"stack": True}, "stack", "stack=false"),
        ("vllm", {"level": "level0"}, "level", "level=level1"),
        ("vllm", {"activities": ["npu"]}, "activities", "activities=[cpu,npu]"),
        ("sglang", {"memory": True}, "memory", "memory=false"),
        ("sglang", {"level": "level2"}, "level", "level=level1"),
        ("sglang", {"mini_batches": {"active": 1}}, "mini_batches", "mini_batches=null"),
    ],
)
def test_an_option_that_an_engine_does_not_have_is_refused(
    engine: str, options: Outcome, key: str, remedy: str
) -> None:
    """The key is named, and what to set for the engine alone."""
    with pytest.raises(ConfigError) as caught:
        adapter_named(engine).tool_of(settings(tools={"npu": options}).for_role("rollout"))
    assert caught.value.key == f"tools.npu.{key}"
    assert f"set roles.rollout.tools.npu.{remedy}" in str(caught.value)


def test_what_cannot_be_told_apart_is_refused() -> None:
    """A folder of torch_npu names its rank, but no data-parallel rank."""
    with pytest.raises(ConfigError, match="data-parallel ranks"):
        SGLangCaptureMixin().init_capture(
            settings(), engine=Manager("npu", dp_size=2), requests=RequestLog()
        )


@pytest.mark.parametrize(
    ("device", "tool", "right"), [("npu", "torch", "npu"), ("cuda", "npu", "torch")]
)
def test_the_tool_has_to_fit_the_device(device: str, tool: str, right: str) -> None:
    """With torch an engine on an NPU would write what nobody looks for, and the reverse."""
    config = ProfilingConfig.from_any({"enable": True, "tool": tool})
    with pytest.raises(
        ConfigError, match=f"{tool} records nothing of SGLang on {device}; set tool {right}"
    ):
        SGLangCaptureMixin().init_capture(config, engine=Manager(device), requests=RequestLog())


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Have every package be of a version, or be missing."""

    def look_up(version: str | None, package: str) -> str:
        if version is None:
            raise PackageNotFoundError(package)
        return version

    return lambda version: monkeypatch.setattr(
        adapter.metadata, "version", partial(look_up, version)
    )


@pytest.mark.parametrize(
    ("version", "daemon", "said"),
    [
        (None, "0", r"is not installed.*vllm-ascend>=0\.16"),
        ("0.15.0rc1", "0", r"is not installed.*vllm-ascend>=0\.16"),
        ("0.26.0rc1", "1", "MSMONITOR_USE_DAEMON is set"),
    ],
)
def test_a_vllm_ascend_that_cannot_be_captured_is_named(
    version: str | None, daemon: str, said: str, monkeypatch: pytest.MonkeyPatch, installed: Any
) -> None:
    installed(version)
    monkeypatch.setenv("MSMONITOR_USE_DAEMON", daemon)
    with pytest.raises(ToolUnavailableError, match=said):
        vllm.check_vllm_ascend()


@pytest.mark.parametrize(("version", "counts"), [("0.18.0", False), ("0.20.2rc1", True)])
def test_a_vllm_ascend_that_counts_no_iterations_is_named(
    version: str, counts: bool, monkeypatch: pytest.MonkeyPatch, installed: Any
) -> None:
    installed(version)
    monkeypatch.setattr(vllm, "_version", lambda: "0.20.0")
    monkeypatch.setattr(vllm, "_known_options", lambda: {"max_iterations"})
    tool = NpuTool(NpuOptions())
    if counts:
        assert vllm._recording_window(RolloutOptions(count=3), tool).count == 3
    else:
        with pytest.raises(ConfigError, match=r"this vllm-ascend cannot count.*vllm-ascend>=0\.20"):
            vllm._recording_window(RolloutOptions(count=3), tool)


@pytest.mark.parametrize(
    ("names", "version", "refused"),
    [
        ({}, "0.5.22", True),
        ({}, "0.5.23", False),
        ({}, None, False),
        ({"_apply_patches": print}, "0.5.12", False),
    ],
)
def test_an_sglang_that_does_not_reach_torch_npu_is_refused(
    names: Outcome,
    version: str | None,
    refused: bool,
    monkeypatch: pytest.MonkeyPatch,
    installed: Any,
) -> None:
    """Its next start of the profiler would end all its processes; a newer one is trusted."""
    installed(version)
    monkeypatch.setitem(sys.modules, "torch_npu", SimpleNamespace(__version__="2.13.0", **names))
    set_up = partial(
        SGLangCaptureMixin().init_capture, settings(), engine=Manager("npu"), requests=RequestLog()
    )
    if refused:
        with pytest.raises(ToolUnavailableError, match="which torch_npu"):
            set_up()
    else:
        set_up()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Outcome:
    """Build the stand-in CANN, run every scenario, and return what came out."""
    packages = tmp_path_factory.mktemp("packages")
    wanted = (engine_sources.VLLM, engine_sources.VLLM_ASCEND, engine_sources.SGLANG)
    engine_sources.build(packages, {name: sources(name, request.config.cache) for name in wanted})
    return outcomes_of("engine_scenarios", tmp_path_factory, packages)


def artifacts(outcome: Outcome) -> list[list[tuple[str, str]]]:
    return [
        artifacts_of(worker) for manifest in outcome["manifests"] for worker in manifest["workers"]
    ]


def recorded(folder: str, path: str) -> tuple[Path, Outcome]:
    """Return the one recording of an artifact, and what torch_npu noted of how it recorded."""
    [found] = Path(folder, path).iterdir()
    [info] = found.glob("profiler_info*.json")
    about: Outcome = json.loads(info.read_text())
    return found, about["config"]


def products(folder: str, path: str) -> int:
    """Return the number of products of matrices in an artifact's trace."""
    [trace] = Path(folder, path).rglob("trace_view.json")
    events = [event for chunk in Trace(trace).chunks() for event in chunk]
    return sum(event.ph == "X" and event.name == "aten::matmul" for event in events)


@pytest.mark.npu
@pytest.mark.timeout(1200)
class TestOwnProfilers:
    """What the engines' own profilers and the real torch_npu do in our hands."""

    def test_a_window_of_vllm(self, outcomes: Outcome) -> None:
        """Its iterations count, in daemons that torch_npu refuses to analyse in:
        we do it afterwards.
        """
        outcome = outcomes["vllm_e2e"]
        # No device, so no data of it; all else is as it is to be.
        assert artifacts(outcome) == [
            [("rollout0_rank0.npu", "empty"), ("rollout0_rank1.npu", "empty")]
        ]
        [folder] = outcome["folders"]
        for rank in range(2):
            path = f"rollout0_rank{rank}.npu"
            found, config = recorded(folder, path)
            assert f"_tp{rank}_" in found.name
            assert (found / "ASCEND_PROFILER_OUTPUT" / "analyse.done").exists()
            assert config["common_config"]["profile_memory"]
            assert not config["common_config"]["with_modules"]
            assert products(folder, path) == 3, (
                "rollout.start=2 and rollout.count=3 of six iterations"
            )

    def test_vllm_by_stage_of_the_loop(self, outcomes: Outcome) -> None:
        """Each rollout has folders of its own, although the second restarts a profiler
        that was stopped.
        """
        outcome = outcomes["vllm_discrete"]
        both = [("rollout0_rank0.rollout.npu", "ok"), ("rollout0_rank1.rollout.npu", "ok")]
        assert artifacts(outcome) == [both, both]
        names = set()
        for folder in outcome["folders"]:
            found, config = recorded(folder, "rollout0_rank0.rollout.npu")
            names.add(found.name)
            assert config["common_config"]["with_modules"]
            assert not config["common_config"]["with_stack"]
            assert not (found / "ASCEND_PROFILER_OUTPUT").exists(), "tools.npu.analysis is false"
        assert len(names) == 2

    def test_a_window_of_sglang(self, outcomes: Outcome) -> None:
        """Its forward passes count, and each rank's folder is found by the rank inside."""
        outcome = outcomes["sglang_e2e"]
        assert artifacts(outcome) == [[("rollout0_rank0.npu", "ok"), ("rollout0_rank1.npu", "ok")]]
        [folder] = outcome["folders"]
        for rank in range(2):
            found, config = recorded(folder, f"rollout0_rank{rank}.npu")
            assert rank_of_recording(found) == rank
            assert not config["common_config"]["with_stack"]
            assert products(folder, f"rollout0_rank{rank}.npu") == 3

    def test_sglang_by_stage_of_the_loop(self, outcomes: Outcome) -> None:
        """Its schedulers analyse their recordings themselves, and that is not done twice."""
        outcome = outcomes["sglang_discrete"]
        both = [("rollout0_rank0.rollout.npu", "empty"), ("rollout0_rank1.rollout.npu", "empty")]
        assert artifacts(outcome) == [both, both]
        for folder in outcome["folders"]:
            found, config = recorded(folder, "rollout0_rank0.rollout.npu")
            assert config["common_config"]["record_shapes"]
            output = found / "ASCEND_PROFILER_OUTPUT"
            assert (output / "analyse.done").exists()
            assert not list(output.glob("*.db")), "the engine's own analysis writes text"
            assert products(folder, "rollout0_rank0.rollout.npu") == 6

    def test_nothing_is_left_beside_the_steps(self, outcomes: Outcome) -> None:
        for outcome in outcomes.values():
            assert not [name for name in outcome["left"] if name.startswith(".engines")]

    @pytest.mark.parametrize("name", ["vllm_e2e", "sglang_e2e"])
    def test_merge_and_report_read_them(self, outcomes: Outcome, name: str) -> None:
        """The lanes are the replica's ranks, with the operators in the rollout's window."""
        [folder] = outcomes[name]["folders"]
        [step] = find_steps(Path(folder))
        assert [source.lane for source in step.sources] == ["rollout0_rank0", "rollout0_rank1"]
        assert not merge(step, Path(folder) / "merged.json.gz").problems
        report = CapturedStep(step).report()
        assert [row.name for row in report.workers] == ["rollout0_rank0", "rollout0_rank1"]
        assert all(row.busy_us > 0 for row in report.workers)
