"""Which events are work of a device, on real traces of several vendors and on ones
that nobody has seen.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from drawn_steps import Worker, drawn_inputs
from step_outcome import printed

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.errors import ConfigError, TraceFormatError
from verl_profiling.numbers.report_columns import WorkerRow
from verl_profiling.report.model import Report
from verl_profiling.steps.kinds import PATTERNS, Pattern, communicates, own_name

DATA = Path(__file__).parents[1] / "data"
BASE_NS = 1_700_000_000_000_000_000
HOST = 4242


def covered_us(events: Iterable[dict[str, Any]]) -> float:
    """Return the time covered by events, one after the other: not the arithmetic of the package."""
    total, reached = 0.0, float("-inf")
    for begin, took in sorted((float(event["ts"]), event["dur"]) for event in events):
        total += max(begin + took - max(begin, reached), 0.0)
        reached = max(reached, begin + took)
    return total


def complete(name: str) -> list[dict[str, Any]]:
    """Return the events with a duration of a file of the test data."""
    content = json.loads(gzip.decompress((DATA / name).read_bytes()))
    events = content["traceEvents"] if isinstance(content, dict) else content
    return [event for event in events if event["ph"] == "X"]


def only_row(name: str) -> WorkerRow:
    """Return the one row of the report of a file of the test data."""
    (row,) = open_step(DATA / name).report().workers
    return row


def event(
    category: str, begin: float, end: float, *, pid: object = 0, **more: Any
) -> dict[str, Any]:
    times = {"ts": begin, "dur": end - begin}
    return {"ph": "X", "cat": category, "name": "work", "pid": pid, "tid": 7, **times, **more}


def labelled(pid: object, label: str) -> dict[str, Any]:
    """Return the metadata that says what a process stands for."""
    return {"ph": "M", "name": "process_labels", "pid": pid, "tid": 0, "args": {"labels": label}}


IN_A_GROUP = {"Collective name": "allreduce", "Process Group Ranks": "[0, 1]", "Group size": 2}
OPERATOR = event("cpu_op", 0, 40, pid=HOST, name="aten::mm")
LAUNCH = event("cuda_runtime", 1, 3, pid=HOST, name="cudaLaunchKernel")


def report_of(folder: Path, events: list[dict[str, Any]], **header: Any) -> Report:
    """Return the report of a trace with these events."""
    content = {"baseTimeNanoseconds": BASE_NS, **header, "traceEvents": events}
    (folder / "rank0.json").write_text(json.dumps(content))
    return open_step(folder).report()


def test_a_damaged_or_odd_trace_costs_itself(tmp_path: Path) -> None:
    """An empty event behind the last is none; a whole trace without work is noted,
    and costs its lane.
    """
    report = report_of(tmp_path, [event("kernel", 0, 10), event("kernel", 20, 30), {}])
    assert (report.coverage.missing, report.coverage.events, report.notes) == ([], 2, [])
    assert report.workers[0].busy_us == 20
    odd = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [event("odd", 0, 9, pid=HOST)] * 3}
    (tmp_path / "rank1.json").write_text(json.dumps(odd))
    report = report_of(tmp_path, [event("kernel", 0, 10)])
    assert [row.name for row in report.workers] == ["worker_rank0"]
    assert report.coverage.missing == []
    assert report.notes == ["rank1.json: no event is work of a device or an operator, only odd"]


def test_an_mtia_accelerator_is_a_device() -> None:
    """As HolisticTraceAnalysis has it, but for waits for events, which are no work."""
    row = only_row("mtia.json.gz")
    device = [e for e in complete("mtia.json.gz") if e["cat"] == "mtia_ccp_events"]
    assert (row.device, row.accelerator) == (True, "MTIA 9")
    assert row.busy_us == pytest.approx(covered_us(device), abs=1)
    assert row.memcpy_us == pytest.approx(
        covered_us(e for e in device if e["name"] == "dma_request"), abs=1
    )
    assert 100 * row.idle_us / row.span_us == pytest.approx(42.22, abs=0.1)
    assert 100 * row.compute_us / row.span_us == pytest.approx(54.84, abs=0.1)
    row = only_row("mtia_inference.json.gz")
    device = [e for e in complete("mtia_inference.json.gz") if e["cat"] == "mtia_ccp_events"]
    waits = ("event_wait", "event_record")
    work = [e for e in device if e["name"] not in waits]
    assert row.busy_us == pytest.approx(covered_us(work), abs=1)
    computes = [e for e in work if e["name"] != "dma_request"]
    assert row.compute_us == pytest.approx(covered_us(computes), abs=1)
    assert 100 * row.idle_us / row.span_us == pytest.approx(4.74, abs=0.01)
    assert 100 * row.compute_us / row.span_us == pytest.approx(93.55, abs=0.01)


def test_tasks_of_an_npu_add_up_to_its_own_analysis() -> None:
    """Tasks of the type ``Other`` compute, if they have the name of an operator:
    1,788 of 11,270 us.
    """
    row = only_row("ascend_trace_view.json.gz")
    theirs = covered_us(
        e for e in complete("ascend_trace_view.json.gz") if e["name"] == "Computing"
    )
    assert (row.device, row.accelerator) == (True, "NPU")
    assert row.compute_us == pytest.approx(theirs, abs=1)
    assert row.compute_us == pytest.approx(1788, abs=1)
    assert row.span_us == pytest.approx(11_270, abs=1)
    assert not open_step(DATA / "ascend_trace_view.json.gz").report().notes


@pytest.mark.parametrize("label", ["ZPU 3", ""])
def test_a_device_of_nobody_is_shown_as_such(label: str, tmp_path: Path) -> None:
    """Its events are of no known kind, busy, named in a note, and the trace is none of a CPU."""
    work = [event("zpu_task", 10, 30, pid=3, args={"stream": 1}), event("zpu_task", 50, 60, pid=3)]
    report = report_of(tmp_path, [OPERATOR, *work, *([labelled(3, label)] if label else [])])
    (row,) = report.workers
    assert row.device
    assert row.accelerator == (label or "GPU 3")
    assert (row.unrecognised_us, row.busy_us, row.compute_us, row.span_us) == (30, 30, 0, 50)
    assert "zpu_task" in report.notes[0]
    assert [op.name for op in report.kernels] == ["work"]
    assert "nised" in printed(report)


def test_what_is_unknown_makes_no_device_and_no_work(tmp_path: Path) -> None:
    events = [event("kernel", 10, 20), event("gpu_new_mark", 0, 90), event("kernel", 30, 40)]
    report = report_of(tmp_path, events)
    (row,) = report.workers
    assert (row.busy_us, row.span_us, row.unrecognised_us) == (20, 30, 0)
    assert "90.0 us of events of unknown categories (gpu_new_mark)" in report.notes[0]
    assert report.kernels[0].calls == 2
    own = event("my_library", 0, 500, pid=HOST)
    for more in ([], [labelled(HOST, "CPU")]):
        report = report_of(tmp_path, [OPERATOR, own, *more])
        (row,) = report.workers
        assert (row.device, row.busy_us) == (False, 40)
        assert report.notes == []


@pytest.mark.parametrize(
    "events", [[], [event("python_function", 0, 9, pid=HOST), event("odd", 0, 9, pid=HOST)]]
)
def test_nothing_recognised_is_not_zero(
    events: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace without known work says what is in it, and exits with an error."""
    with pytest.raises(
        TraceFormatError, match="only odd, python_function" if events else "holds no events"
    ):
        report_of(tmp_path, events)
    assert main(["report", str(tmp_path)]) != 0
    assert "busy" not in capsys.readouterr().out


def test_several_devices_are_one_row_each(tmp_path: Path) -> None:
    """A process that drives two GPUs has two rows, which add up, and share host,
    file and collectives.
    """
    reduce = {"name": "ncclDevKernel_AllReduce", "args": IN_A_GROUP}
    first = [event("kernel", 0, 10, pid=0), event("kernel", 20, 50, pid=0, **reduce)]
    second = [event("kernel", 0, 5, pid=1), event("kernel", 30, 50, pid=1, **reduce)]
    report = report_of(tmp_path, [OPERATOR, *first, *second, labelled(1, "GPU 1")])
    rows = {row.name: row for row in report.workers}
    assert list(rows) == ["worker_rank0 GPU 0", "worker_rank0 GPU 1"]
    assert [row.busy_us for row in rows.values()] == [40, 25]
    assert [row.compute_us for row in rows.values()] == [10, 5]
    assert [row.traces for row in rows.values()] == [["rank0.json"]] * 2
    assert sum(op.self_us for op in report.kernels) == 65
    assert (report.coverage.read, report.coverage.events) == (1, 6)
    assert report.collectives[0].late == "worker_rank0 GPU 1"


def test_a_stray_copy_on_another_device_hides_no_collective(tmp_path: Path) -> None:
    """A rank that touches a second GPU without communicating there is compared
    with the others as before.
    """
    for rank, end in ((0, 50), (1, 40)):
        reduce = event("kernel", 20, end, pid=rank, name="ncclDevKernel_AllReduce", args=IN_A_GROUP)
        stray = [event("gpu_memcpy", 0, 1, pid=0, name="Memcpy")] if rank else []
        content = {"baseTimeNanoseconds": BASE_NS, "traceEvents": [reduce, *stray]}
        (tmp_path / f"rank{rank}.json").write_text(json.dumps(content))
    report = open_step(tmp_path).report()
    assert [row.name for row in report.workers] == [
        "worker_rank0",
        "worker_rank1 GPU 0",
        "worker_rank1 GPU 1",
    ]
    (collective,) = report.collectives
    assert (collective.late, collective.wait_us) == ("worker_rank1 GPU 1", 10)


@pytest.mark.parametrize(
    ("events", "header"),
    [
        ([OPERATOR, LAUNCH], {}),
        ([OPERATOR], {"deviceProperties": [{"id": 0, "name": "NVIDIA H100"}]}),
        ([labelled(0, "GPU 0"), OPERATOR], {}),
    ],
)
def test_a_gpu_trace_cut_off_before_its_kernels_stays_one(
    events: list[dict[str, Any]], header: dict[str, Any], tmp_path: Path
) -> None:
    """Kineto writes the host first; without what follows, nothing is known of the device."""
    content = json.dumps(
        {"baseTimeNanoseconds": BASE_NS, **header, "traceEvents": [*events, OPERATOR]}
    )
    (tmp_path / "rank0.json").write_text(content[: content.rindex("dur")])
    report = open_step(tmp_path).report()
    (row,) = report.workers
    assert row.device
    assert (row.span_us, row.busy_us, row.idle_us) == (0, 0, 0)
    assert any(
        "so the work of the device is unknown" in missing for missing in report.coverage.missing
    )
    assert report.lost[0].seconds == 0


def test_a_whole_trace_of_launches_says_that_no_kernel_was_recorded(tmp_path: Path) -> None:
    """Where the device's profiler was not allowed to record, operators are all there is."""
    report = report_of(tmp_path, [OPERATOR, LAUNCH])
    assert not report.workers[0].device
    assert "none was recorded" in report.notes[0]


def test_users_add_names_of_communication(tmp_path: Path) -> None:
    """By an argument or an option; the report says that it was asked for."""
    report_of(
        tmp_path,
        [event("kernel", 0, 10, name="my_ring<int>"), event("kernel", 20, 25, name="gemm")],
    )
    report = open_step(tmp_path, communication=["^my_.*<int>"]).report()
    assert (report.workers[0].communication_us, report.workers[0].compute_us) == (10, 5)
    assert report.notes == ["counted as communication by the option: ^my_.*<int>"]
    report = open_step(tmp_path, communication=["ring", "gemm"]).report()
    assert report.workers[0].communication_us == 15
    with pytest.raises(ConfigError, match=r"--communication.*no regular expression"):
        open_step(tmp_path, communication=["("])
    assert main(["report", str(tmp_path), "--communication", "("]) == 2


@pytest.mark.parametrize("vendor", ["mlu", "gcu", "zpu"])
def test_what_forks_of_kineto_call_their_own_is_known_by_its_end(
    vendor: str, tmp_path: Path
) -> None:
    """Forks name categories after their vendor and leave ``kernel`` as it is."""
    host = [event(f"{vendor}_runtime", 0, 90, pid=HOST), OPERATOR]
    marks = [event(f"{vendor}_user_annotation", 0, 80), event(f"{vendor}_sync", 60, 80)]
    work = [
        event("kernel", 10, 30),
        event(f"{vendor}_memcpy", 40, 45),
        event(f"{vendor}_memset", 50, 51),
    ]
    report = report_of(tmp_path, [*host, *marks, *work])
    (row,) = report.workers
    assert (row.compute_us, row.memcpy_us, row.busy_us, row.unrecognised_us) == (20, 6, 26, 0)
    assert report.notes == []


# Names as profilers wrote them.
COMMUNICATION = (
    "void (anonymous namespace)::multimem_all_reduce_kernel<c10::BFloat16, "
    "16>(c10::BFloat16*, unsigned)",
    "_ZN5aiter26cross_device_reduce_2stageIDF16bLi8ELb0EEEv",
    "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<1, "
    "half>(int)",
    "void deep_ep::legacy::intranode::notify_dispatch<8>(int const*)",
)
COMPUTATION = (
    "void SmallReduceKernel<float>(float*)",
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> "
    ">(at::native::ReduceOp<float>)",
    "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)",
    "void cutlass::device_kernel<cutlass::sm90_allreduce_nvls<float> >(Params)",
    "void fused_moe::combine<__nv_bfloat16>(int*)",
    "std::enable_if<(((8)>(0)))&&vllm::_typeConvert<half>::exists, void>::type "
    "vllm::fused_add_rms_norm",
    "void deep_ep::legacy::layout::get_dispatch_layout<256, 32, 8>(long const*)",
    "void at::native::(anonymous namespace)::scatter_reduce_kernel<deep_ep::Buffer>(int)",
    "void dpsk::ep::cuda::get_dispatch_layout<256>(long const*)",
)


@pytest.mark.parametrize("name", COMMUNICATION)
def test_these_kernels_communicate(name: str) -> None:
    """Demangled or not, in any namespace and with any parameters."""
    assert communicates()(name)


@pytest.mark.parametrize("name", COMPUTATION)
def test_these_kernels_compute(name: str) -> None:
    """Neither a similar word nor a type among the arguments makes a kernel one
    that communicates.
    """
    assert not communicates()(name)


def test_experts_are_dispatched_and_combined_by_communication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """DeepSeek's own kernels; the layout of a dispatch is computed."""
    names = ["internode::dispatch<4>", "intranode::combine<8>", "cuda::get_dispatch_layout<256>"]
    kernels = [(f"void dpsk::ep::{name}(int*)", at, at + 1.0) for at, name in enumerate(names)]
    drawn_inputs(tmp_path, [("update_actor", 0, 4)], [Worker("actor", kernels=kernels)], 4)
    assert main(["report", str(tmp_path), "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)["workers"]
    assert (row["busy_us"], row["communication_us"], row["compute_us"]) == (3e6, 2e6, 1e6)


@pytest.mark.parametrize("row", PATTERNS, ids=lambda row: row.library)
def test_a_row_of_the_table_matches_its_example(row: Pattern) -> None:
    assert communicates()(row.example)


@pytest.mark.parametrize(
    "name", ["<" * 100_000, "(" * 5_000 + ")" * 5_000, "x<" * 4_000 + ">" * 4_000, ""]
)
def test_names_of_any_form_are_looked_at_in_bounded_time(name: str) -> None:
    """Brackets without end, or without a name, are no reason to wait."""
    assert not communicates()(name)
    assert "<" not in own_name(name)[1:]
