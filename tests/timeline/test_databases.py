"""Databases of Nsight Systems and of torch_npu are traces: what they hold is read,
or said not to be.
"""

from __future__ import annotations

import csv
import json
import random
import sqlite3
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.cli import main
from verl_profiling.steps.nsys import convert_nsys

ASCEND = Path(__file__).parents[1] / "data" / "ascend_level1.tar.gz"
START_NS = 1_767_225_600_000_000_000
MS = 1_000_000
Json = dict[str, Any]
Reports = Callable[[Path], list[Json]]
DEVICE = (
    "start INTEGER, end INTEGER, deviceId INTEGER, streamId INTEGER, correlationId "
    "INTEGER, globalPid INTEGER"
)
TABLES = {
    "StringIds": "id INTEGER PRIMARY KEY, value TEXT",
    "TARGET_INFO_SESSION_START_TIME": "utcEpochNs INTEGER",
    "CUPTI_ACTIVITY_KIND_KERNEL": f"{DEVICE}, demangledName INTEGER",
    "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": f"{DEVICE}, graphId INTEGER",
    "CUPTI_ACTIVITY_KIND_RUNTIME": (
        "start INTEGER, end INTEGER, globalTid INTEGER, correlationId INTEGER, nameId INTEGER"
    ),
    "NVTX_EVENTS": (
        "start INTEGER, end INTEGER, eventType INTEGER, text TEXT, globalTid INTEGER, textId "
        "INTEGER"
    ),
    "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": "start INTEGER, end INTEGER",
    "OSRT_API": "start INTEGER, end INTEGER",
}


class Export:
    """A drawn export: the rows of its tables, and the truth of each process."""

    def __init__(self, draw: random.Random) -> None:
        self.rows: dict[str, list[tuple[Any, ...]]] = {name: [] for name in TABLES}
        self.rows["TARGET_INFO_SESSION_START_TIME"].append((START_NS,))
        names = ["gemm", "cudaGraphLaunch_v10000", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL"]
        self.rows["StringIds"] += enumerate(names)
        self.without_end = draw.randint(0, 3)
        self.busy_ms: list[int] = []
        self.collective_ms: list[int] = []
        pids = sorted(draw.sample(range(300, 60_000), draw.randint(1, 4)))
        shared = draw.random() < 0.3  # all processes use device 0
        lateness = [draw.randint(0, 20) for _ in pids]
        for number, pid in enumerate(pids):
            self._add_process(draw, pid, 0 if shared else number, lateness[number], max(lateness))
        for index in range(self.without_end):
            self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((index, None, 0, 7, 1, pids[0] << 24, 0))
        for table in draw.sample(
            ["CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "OSRT_API"], draw.randint(0, 2)
        ):
            self.rows[table] += [(0, 1)] * draw.randint(1, 9)

    def _add_process(
        self, draw: random.Random, pid: int, device: int, late_ms: int, latest_ms: int
    ) -> None:
        """Add graphs of 9 ms, kernels of 4 ms,
        and at 1 s a collective until all processes leave it.
        """
        globally = (1 << 56) | (pid << 24)
        graphs, kernels = draw.randint(0, 30), draw.randint(1, 20)
        for index in range(graphs + kernels):
            begin, launch = 10 * index * MS, 1 + index
            place = (device, 7, launch, globally)
            if index < graphs:
                row = (begin, begin + 9 * MS, *place, 5)
                self.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"].append(row)
                call = (begin, begin + 1000, globally + 9, launch, 1)
                self.rows["CUPTI_ACTIVITY_KIND_RUNTIME"].append(call)
            else:
                self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((begin, begin + 4 * MS, *place, 0))
            operator = f"aten::mm, seq = {index}, op_id = {990_000 + index}"
            self.rows["NVTX_EVENTS"].append((begin, begin + 2000, 59, operator, globally + 9, None))
        begin, end = (1000 + late_ms) * MS, (1030 + latest_ms) * MS
        self.rows["CUPTI_ACTIVITY_KIND_KERNEL"].append((begin, end, device, 20, 999, globally, 2))
        self.busy_ms.append(9 * graphs + 4 * kernels + 30 + latest_ms - late_ms)
        self.collective_ms.append(30 + latest_ms - late_ms)

    def unread(self) -> list[str]:
        """Return the tables of activity that nothing reads, with their rows."""
        named = ("CUPTI_ACTIVITY_KIND_SYNCHRONIZATION", "OSRT_API")
        return [f"{name} ({len(self.rows[name])})" for name in named if self.rows[name]]

    def write(self, path: Path) -> Path:
        """Write the tables that have rows, as Nsight Systems does."""
        with sqlite3.connect(path) as database:
            for name, rows in self.rows.items():
                if rows:
                    database.execute(f"CREATE TABLE {name} ({TABLES[name]})")
                    values = ", ".join("?" * len(rows[0]))
                    database.executemany(f"INSERT INTO {name} VALUES ({values})", rows)
        database.close()
        return path


@pytest.mark.parametrize("seed", range(24))
def test_each_process_of_an_export_is_a_lane_with_all_its_work(
    tmp_path: Path, reports: Reports, seed: int
) -> None:
    """Graphs count, operators have one name; waits are unknown without groups;
    what is not read is named.
    """
    export = Export(random.Random(seed))
    database = export.write(tmp_path / "rollout.sqlite")
    if seed % 2:
        convert_nsys(database, tmp_path / "rollout.nsys.json.gz", {})
        assert (
            "same recording" in reports(tmp_path)[0]["notes"][0]
        )  # a folder with both counts it once
        database = tmp_path / "rollout.nsys.json.gz"
    [report] = reports(database)
    workers = sorted(report["workers"], key=lambda row: row["rank"])
    assert [row["rank"] for row in workers] == list(range(len(export.busy_ms)))
    assert [row["busy_us"] / 1000 for row in workers] == export.busy_ms
    assert not any(row["waiting_us"] for row in workers)
    graphs_ms = 9 * len(export.rows["CUPTI_ACTIVITY_KIND_GRAPH_TRACE"])
    assert report["unmatched_us"] / 1000 == sum(export.collective_ms) + graphs_ms
    notes = " ".join(report["notes"])
    assert (
        f"{export.without_end} rows of CUPTI_ACTIVITY_KIND_KERNEL have no begin" in notes
    ) == bool(export.without_end)
    assert ("not read" in notes) == bool(export.unread())
    assert all(table in notes for table in export.unread())
    assert not report["coverage"]["missing"]


def test_processes_that_a_header_cannot_have_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A header of a stranger is an error with the file's name, as any other damage."""
    about = {"processes": [5], "notes": 7}
    (tmp_path / "x.json").write_text(
        json.dumps({"verl_profiling": about, "traceEvents": [{"ph": "i"}]})
    )
    assert main(["report", str(tmp_path / "x.json")]) == 2
    assert "x.json: lists no processes" in capsys.readouterr().err


@pytest.fixture
def captures(tmp_path: Path) -> Path:
    """Two ranks of one script on Ascend 910, as text and as database."""
    with tarfile.open(ASCEND) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def theirs(recording: Path) -> tuple[float, ...]:
    """Return torch_npu's division of the step (us): computing, communication, not overlapped."""
    for table in recording.rglob("step_trace_time.csv"):
        [row] = csv.DictReader(table.read_text().splitlines())
        return tuple(
            float(row[name])
            for name in ("Computing", "Communication", "Communication(Not Overlapped)")
        )
    [path] = recording.rglob("analysis.db")
    with sqlite3.connect(path) as database:
        columns = "computing, communication, communication_not_overlapped"
        [row] = database.execute(f"SELECT {columns} FROM StepTraceTime")
    database.close()
    return tuple(row)


@pytest.mark.parametrize(("kind", "waits_us"), [("text", 5_616), ("db", 3_518)])
def test_real_captures_of_npus_are_divided_as_by_torch_npu(
    captures: Path, reports: Reports, kind: str, waits_us: float
) -> None:
    """So is the wait in the first all-reduce; check and merge read the captures too."""
    [report] = reports(captures / kind)
    for rank, row in enumerate(report["workers"]):
        figures = (row["compute_us"], row["communication_us"], row["exposed_communication_us"])
        # Times of the text are rounded to a nanosecond, of which a step has hundreds.
        assert figures == pytest.approx(theirs(captures / kind / f"rank{rank}_ascend_pt"), abs=0.03)
        assert row["rank"] == rank
    assert report["workers"][0]["waiting_us"] == pytest.approx(waits_us, abs=10)
    assert main(["check", str(captures / kind)]) == main(["merge", str(captures / kind)]) == 0


def test_a_rank_that_nobody_analysed_is_missing(
    captures: Path, reports: Reports, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other rank is read; report and check give the command that analyses the missing one."""
    output = captures / "db" / "rank1_ascend_pt" / "ASCEND_PROFILER_OUTPUT"
    output.rename(output.with_name("FRAMEWORK"))
    (output.with_name("FRAMEWORK") / "ascend_pytorch_profiler_1.db").unlink()
    [report] = reports(captures / "db")
    assert [row["rank"] for row in report["workers"]] == [0]
    for command in ("report", "check"):
        capsys.readouterr()
        assert main([command, str(captures / "db")]) == 1
        printed = "".join(capsys.readouterr()).replace("\n", "")
        assert "torch_npu has not analysed it" in printed
        assert f"analyse('{output.parent}')" in printed
