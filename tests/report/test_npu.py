"""Device lanes of torch_npu: what the real parser wrote of the host,
and what msprof adds of an NPU.
"""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from step_folders import read_events

from verl_profiling.analysis import open_step
from verl_profiling.report.model import Report

HOST = Path(__file__).parents[1] / "data" / "npu_trace_view.json"
PROCESSES = {
    "CANN": ("CPU", {}),
    "Ascend Hardware": ("NPU 0", {2: "Stream 2", 5: "Stream 5"}),
    "Communication": ("NPU 0", {0: "Group hccl_world Communication", 1: "Plane 0"}),
    "Overlap Analysis": (
        "NPU 0",
        {0: "Communication", 1: "Communication(Not Overlapped)", 2: "Computing", 3: "Free"},
    ),
    "AI Core Freq": ("NPU 0", {}),
}
PIDS = {name: 2_094_647_552 + 32 * index for index, name in enumerate(PROCESSES)}
OLDER = {"Ascend Hardware": "Task Scheduler", "CANN": "AscendCL", "Communication": "HCCL"}
TASKS = [
    ("Ascend Hardware", 2, "aclnnMatmul_MatMulV3_MatMulV3", 0, 100, "AI_CORE"),
    ("Ascend Hardware", 2, "aclnnAdd_AddAiCore_Add", 100, 150, "AI_VECTOR_CORE"),
    ("Ascend Hardware", 2, "EVENT_WAIT", 150, 300, "EVENT_WAIT"),
    ("Ascend Hardware", 2, "aclnnFlashAttentionScore_FlashAttentionScore", 300, 400, "MIX_AIC"),
    ("Ascend Hardware", 2, "MEMCPY_ASYNC", 420, 440, "SDMA_SQE"),
    ("Ascend Hardware", 2, "PROFILING_DISABLE", 440, 500, "PLACE_HOLDER_SQE"),
    ("Ascend Hardware", 5, "hcom_allReduceAicpuKernel", 80, 260, "AI_CPU"),
    ("Ascend Hardware", 5, "NOTIFY_WAIT", 90, 250, "NOTIFY_WAIT_SQE"),
    ("Ascend Hardware", 5, "MsTx_1", 0, 500, None),
    ("Communication", 0, "hcom_allReduce__661_0_1", 80, 200, None),
    ("Communication", 0, "hcom_allReduce__661_1_1", 200, 260, None),
    ("Communication", 1, "Memcpy", 90, 230, None),
    ("Communication", 1, "Notify_Wait", 230, 258, None),
    ("CANN", 77, "AscendCL@aclnnMatmul", -50, -40, None),
]
OVERLAP = {
    "Computing": [(0, 150), (300, 400)],
    "Communication": [(80, 260)],
    "Communication(Not Overlapped)": [(150, 260)],
    "Free": [(260, 300)],
}


def device_events(begin_us: Decimal, *, older: bool = False) -> list[dict[str, Any]]:
    """Return a trace as msprof, or an older one, writes it of the device,
    with the names after the events.
    """

    def event(
        process: str, tid: int, name: str, begin: int, end: int, args: dict[str, Any]
    ) -> dict[str, Any]:
        times = {"ts": str(begin_us + begin), "dur": float(end - begin)}
        return {"name": name, "pid": PIDS[process], "tid": tid, **times, "args": args, "ph": "X"}

    events = [
        event(process, tid, name, begin, end, {"Task Type": task} if task else {"connection_id": 9})
        for process, tid, name, begin, end, task in TASKS
    ]
    for tid, (name, spans) in enumerate(OVERLAP.items()):
        events += [event("Overlap Analysis", tid, name, *span, {}) for span in spans]
    frequency = {"pid": PIDS["AI Core Freq"], "tid": 0, "ts": str(begin_us), "args": {"MHz": 1800}}
    events.append({"name": "AI Core Freq", "ph": "C", **frequency})
    for name, (label, threads) in PROCESSES.items():
        about = {"pid": PIDS[name], "ph": "M"}
        shown = OLDER.get(name, name) if older else name
        events.append({"name": "process_name", "tid": 0, "args": {"name": shown}, **about})
        events.append({"name": "process_labels", "tid": 0, "args": {"labels": label}, **about})
        events += [
            {"name": "thread_name", "tid": tid, "args": {"name": thread}, **about}
            for tid, thread in threads.items()
        ]
    return events


@pytest.fixture(params=[False, True], ids=["newer", "older"])
def report(tmp_path: Path, request: pytest.FixtureRequest) -> Report:
    """One folder as torch_npu leaves it: rank 3, the host's real events, then the device's."""
    host = read_events(HOST)
    begin_us = max(Decimal(event["ts"]) for event in host if "ts" in event)
    folder = tmp_path / "vm_1_2026_ascend_pt"
    (folder / "ASCEND_PROFILER_OUTPUT").mkdir(parents=True)
    (folder / "profiler_info_3.json").write_text("{}")
    trace = folder / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    trace.write_text(json.dumps(host + device_events(begin_us, older=request.param)))
    return open_step(tmp_path).report()


def test_figures_are_what_the_npu_did(report: Report) -> None:
    """Cores compute, DMA copies, waits do not count; a collective counts once,
    as in the overlap analysis.
    """
    (row,) = report.workers
    assert row.device
    assert row.rank == 3
    assert row.compute_us == 250
    assert row.memcpy_us == 20
    assert row.span_us == 440
    assert row.busy_us == 260 + 100 + 20
    theirs = {name: sum(end - begin for begin, end in spans) for name, spans in OVERLAP.items()}
    assert row.compute_us == theirs["Computing"]
    assert row.communication_us == theirs["Communication"]
    assert row.exposed_communication_us == theirs["Communication(Not Overlapped)"]
    assert (
        row.idle_us - theirs["Free"] == 20
    )  # between the last kernel and the copy, which it leaves out
    rows = {row.name: (row.calls, row.self_us) for row in report.kernels}
    assert rows == {
        "aclnnMatmul_MatMulV3_MatMulV3": (1, 100),
        "aclnnAdd_AddAiCore_Add": (1, 50),
        "aclnnFlashAttentionScore_FlashAttentionScore": (1, 100),
        "hcom_allReduce": (2, 180),
        "MEMCPY_ASYNC": (1, 20),
    }


def test_ranks_of_an_npu_wait_in_the_group_that_its_collectives_name(tmp_path: Path) -> None:
    """Of ``hcom_allReduce__661_0_1`` the first number is the group's;
    sends are between two ranks only.
    """
    begins = {0: ("661", 80), 1: ("661", 120), 2: ("204", 190), 3: ("204", 190)}
    for rank, (group, begin) in begins.items():
        events = device_events(Decimal(1_700_000_000_000_000))
        for event in events:
            if event["name"] == "hcom_allReduce__661_0_1":
                late = {"ts": str(Decimal(1_700_000_000_000_000) + begin), "dur": 200.0 - begin}
                event.update(late, name=f"hcom_allReduce__{group}_0_1")
            elif event["name"] == "hcom_allReduce__661_1_1":
                event.update(name=f"hcom_send__{group}_1_1", dur=event["dur"] - rank)
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(events))
    report = open_step(tmp_path).report()
    assert [row.waiting_us for row in report.workers] == [40, 0, 0, 0]
    assert [(row.group, row.wait_us, row.late) for row in report.collectives] == [
        ("661", 40, ""),
        ("204", 0, ""),
    ]
