"""Traces of other tools, with no manifest, find their role, rank and step by themselves."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from step_folders import read_events

from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.kinds import CATEGORIES, meaning_of
from verl_profiling.steps.step import StepInputs
from verl_profiling.steps.trace import Trace
from verl_profiling.timeline.merge import merge

DATA = Path(__file__).parents[1] / "data"
NO_TRACES = {"hta.json", "figures.json", "drawn_figures.json", "demo_figures.json"}
TRACES = sorted(path for path in DATA.glob("*.json*") if path.name not in NO_TRACES)


def lanes(inputs: StepInputs) -> list[str]:
    return [source.lane for source in inputs.sources]


def folder_of(tmp_path: Path, **names: str) -> Path:
    """Copy traces under new names, given as ``new=old``, and return the folder."""
    for new, old in names.items():
        target = tmp_path / new
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DATA / old, target)
    return tmp_path


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_real_trace_is_read_whole(path: Path) -> None:
    """Torch old and new, on GPU and CPU, vLLM, SGLang, Megatron, torch_npu: each event,
    no warning.
    """
    trace = Trace(path)
    names = [event.name for events in trace.chunks() for event in events]
    assert names == [event["name"] for event in read_events(path)]
    assert trace.warnings == []
    assert trace.base_ns > 1_600_000_000 * 10**9  # after 2020: the clock is unix time


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_every_real_trace_can_be_merged(path: Path, tmp_path: Path) -> None:
    (inputs,) = find_steps(path)
    result = merge(inputs, tmp_path / "timeline.json.gz")
    assert result.events == sum(event["ph"] != "M" for event in read_events(path))


MEGATRON = "megatron_tp2_rank{}.json.gz"


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (
            {
                f"rank{r}.1790857.pt.trace.json.gz": f"vllm_tp2_rank{r}.trace.json.gz"
                for r in (0, 1)
            },
            ["rollout0_rank0", "rollout0_rank1"],
        ),
        (
            {
                f"17-TP-0-{s}.trace.json.gz": f"sglang-TP-0-{s}.trace.json.gz"
                for s in ("EXTEND", "DECODE")
            },
            ["rollout0_rank0", "rollout0_rank0"],
        ),
        (
            {
                f"{x}/prof_rank-{r}.json.gz": MEGATRON.format(r)
                for x in ("actor", "ref")
                for r in (0, 1)
            },
            ["actor_rank0", "actor_rank1", "ref_rank0", "ref_rank1"],
        ),
    ],
    ids=["vLLM", "SGLang", "verl"],
)
def test_names_of_files_and_folders_give_the_lanes(
    names: dict[str, str], expected: list[str], tmp_path: Path
) -> None:
    """Ranks of one replica, stages of one process, roles of verl."""
    (inputs,) = find_steps(folder_of(tmp_path, **names))
    assert lanes(inputs) == expected


def test_steps_in_names_make_steps(tmp_path: Path) -> None:
    names = {f"actor_step{s}_rank0.json.gz": "megatron_tp2_rank0.json.gz" for s in (2, 10)}
    assert [step.step for step in find_steps(folder_of(tmp_path, **names))] == [2, 10]


def test_the_folder_of_traces_may_be_called_after_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(
        folder_of(tmp_path, **{f"step_12/{r}.json.gz": MEGATRON.format(r) for r in (0, 1)})
    )
    for path in ("step_12", tmp_path / "step_12", "step_12/0.json.gz"):
        [inputs] = find_steps(Path(path))
        assert (inputs.step, inputs.label) == (12, "0" if path == "step_12/0.json.gz" else "")


def test_different_processes_never_share_a_lane(tmp_path: Path) -> None:
    """Two files of the same time that claim the same rank, of different processes, stay apart."""
    folder = folder_of(tmp_path, **{"a.json.gz": "sampled_rank-0.json.gz"})
    events = read_events(folder / "a.json.gz")
    others = [event | {"pid": 99} if event.get("pid") == 4037 else event for event in events]
    (folder / "b.json").write_text(json.dumps({"schemaVersion": 1, "traceEvents": others}))
    (inputs,) = find_steps(folder)
    assert lanes(inputs) == ["worker_rank0", "worker_rank0.2"]


def test_each_category_has_one_meaning() -> None:
    """A name that is listed twice would take the meaning of the last row."""
    counts = Counter(name for row in CATEGORIES for name in row.names)
    assert [name for name, times in counts.items() if times > 1] == []


def test_every_category_of_the_installed_torch_is_known() -> None:
    """A category that a new torch brings has to be looked at: is it work, or a mark?"""
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        pytest.skip("torch is not installed; `make env` builds an environment")
    header = Path(found.origin).parent / "include" / "kineto" / "ActivityType.h"
    names = set(re.findall(r'\{"(\w+)", ActivityType::', header.read_text())) - {"ENUM_COUNT"}
    assert len(names) > 20
    assert {name for name in names if meaning_of(name) is None} == set()


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_trace_that_is_removed_meanwhile_is_reported(tmp_path: Path, jobs: int) -> None:
    names = {f"{rank}.json.gz": MEGATRON.format(rank) for rank in (0, 1)}
    [inputs] = find_steps(folder_of(tmp_path, **names))
    (tmp_path / "1.json.gz").unlink()
    [problem] = merge(inputs, jobs=jobs).problems
    assert "cannot be read" in problem
