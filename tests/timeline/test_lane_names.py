"""Lanes of the timeline are named by what they are, whatever comes first in a trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from step_folders import read_events

from verl_profiling.timeline.inputs import find_steps
from verl_profiling.timeline.merge import merge

HOST, DEVICE = 4242, 1
ARROW = {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": DEVICE, "tid": 7, "ts": 5.0, "id": 1, "bp": "e"}
KERNEL = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": DEVICE, "tid": 7, "ts": 5.0, "dur": 2.0}
OPERATOR = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": HOST, "tid": 9, "ts": 1.0, "dur": 3.0}
CANN = {"ph": "X", "name": "AscendCL@aclnnMatmul", "pid": 77, "tid": 9, "ts": 1.5, "dur": 1.0}


def labelled(pid: int, label: str, name: str = "python") -> list[dict[str, Any]]:
    """Return the metadata that kineto writes of a process."""
    return [
        {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "ts": 0, "args": {"name": name}},
        {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "ts": 0, "args": {"labels": label}},
    ]


def merged_names(folder: Path, events: list[dict[str, Any]]) -> dict[str, str]:
    """Return the name of the process of each named event of a merged trace."""
    trace = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(trace))
    (inputs,) = find_steps(folder)
    merged = read_events(merge(inputs, folder / "timeline.json.gz").path)
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    return {e["name"]: names[e["pid"]] for e in merged if e["ph"] in "Xf"}


@pytest.mark.parametrize(
    "events",
    [
        [ARROW, KERNEL, OPERATOR],
        [KERNEL, OPERATOR, ARROW],
        [CANN, OPERATOR, ARROW, KERNEL],
        [{**OPERATOR, "ph": "i"}, ARROW, OPERATOR, KERNEL],
    ],
)
def test_the_first_event_of_a_process_does_not_name_it(events: list[dict[str, Any]], tmp_path: Path) -> None:
    """An arrow that ends on a device, or a process of calls, may come before the host's own events."""
    names = merged_names(tmp_path, events)
    assert names["gemm"] == names["ac2g"] == "worker_rank0 GPU 1"
    assert names["aten::mm"] == "worker_rank0"
    assert names.get("AscendCL@aclnnMatmul", "worker_rank0 77") == "worker_rank0 77"


def test_a_device_has_the_name_of_its_label(tmp_path: Path) -> None:
    """Whatever the accelerator is and whatever its number: texts for processes are none of the host."""
    work = {**KERNEL, "cat": "mtia_ccp_events"}
    names = merged_names(tmp_path, [*labelled(DEVICE, "MTIA 1", "MTIA 1"), OPERATOR, work])
    assert names == {"gemm": "worker_rank0 MTIA 1", "aten::mm": "worker_rank0"}
    own = {**OPERATOR, "cat": "overhead", "pid": -1, "name": "Activity Buffer Request"}
    names = merged_names(tmp_path, [{**KERNEL, "pid": "[TP00] 0"}, own, {**OPERATOR, "cat": "", "pid": 9}])
    assert names["gemm"] == "worker_rank0 [TP00] 0"
    assert "-1" not in names["Activity Buffer Request"]


def test_names_have_a_bounded_length(tmp_path: Path) -> None:
    """Metadata that repeats counts once, and a name of any length is cut where nobody reads on."""
    other = {**OPERATOR, "pid": 88, "cat": "", "name": "call"}
    names = merged_names(tmp_path, [OPERATOR, other, *(labelled(88, "CPU", "x" * 5000) * 100)])
    assert names["call"].startswith("worker_rank0 xxx")
    assert len(names["call"]) == 120
    repeated = merged_names(tmp_path, [OPERATOR, other, *(labelled(88, "CPU", "CANN") * 100)])
    assert repeated["call"] == "worker_rank0 CANN CPU"


def test_a_process_is_not_told_by_its_device(tmp_path: Path) -> None:
    """Two processes of one rank, each of which names its device first, are two lanes."""
    for pid in (1001, 1002):
        about = [*labelled(DEVICE, "GPU 1"), *labelled(pid, "CPU"), {**OPERATOR, "pid": pid}]
        trace = {"baseTimeNanoseconds": 1_700_000_000_000_000_000, "traceEvents": about}
        (tmp_path / f"part{pid}.json").write_text(json.dumps(trace))
    (inputs,) = find_steps(tmp_path)
    assert [source.lane for source in inputs.sources] == ["worker_rank0", "worker_rank0.2"]
