"""Lanes that share a device are one device in totals, shares and findings; the sums stay exact."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import drawn_steps
import pytest
from drawn_steps import STAGES, Worker, report_of
from step_outcome import csv_rows, printed

from verl_profiling.manifest import Device
from verl_profiling.report.files import scalars
from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report

GPU = Device(kind="cuda", index=0, uuid="8932f937-d72c-4106-c12f-20bd9faed9f6", place="node7/0")
OTHER = Device(kind="cuda", index=0, uuid="0032f937-d72c-4106-c12f-20bd9faed9f6", place="node8/0")


def colocated(folder: Path, actor: Sequence[Device], engine: Sequence[Device]) -> Report:
    """A step of 10 s: the engine computes 2 of the first 3 s, the actor 2 of the 3 of its update."""
    return report_of(
        folder,
        STAGES,
        [
            Worker("actor", stages=[("update_actor", 5, 8)], kernels=[("gemm", 5, 7)], devices=list(actor)),
            drawn_steps.engine(0, (0, 1), (2, 3), requests=[(0, 3, 8)], logged=True, devices=list(engine)),
        ],
    )


def seconds(lost_us: dict[str, float]) -> dict[str, float]:
    return {cause: us / 1e6 for cause, us in lost_us.items() if us}


def test_a_shared_device_is_busy_while_any_of_its_lanes_is(tmp_path: Path) -> None:
    """10 s of one device, not 20 s of two lanes."""
    report = colocated(tmp_path, [GPU], [GPU])
    [row] = report.devices
    assert (row.lanes, row.roles) == (["actor_rank0", "rollout0_rank0"], ["actor", "rollout"])
    assert (row.span_us, row.busy_us, row.idle_us) == (10e6, 4e6, 6e6)
    assert seconds(row.lost_us) == {
        "host_bound": 2.0,  # between iterations, where the actor waits; in the update, where the engine does
        "after_generation": 1.0,
        "other_stages": 1.0,
        "weight_sync": 1.0,
        "between_stages": 1.0,
    }
    assert sum(lost.seconds for lost in report.lost) == pytest.approx(6.0)
    assert report.working_share == pytest.approx(0.4)
    assert report.throughput.tokens_per_s_per_device == pytest.approx(report.throughput.tokens_per_s)
    assert {finding.rule for finding in report.findings} <= {"host_bound", "after_generation", "idle_stage"}
    finding = next(finding for finding in report.findings if finding.rule == "host_bound")
    assert finding.text.endswith("2.00 device-seconds (20% of the observed time).")
    assert finding.lanes == ["actor_rank0", "rollout0_rank0"]


def test_every_face_says_devices(tmp_path: Path) -> None:
    report = colocated(tmp_path, [GPU], [GPU])
    page = render_html(report)
    for text in (printed(report), page):
        assert "per second and GPU" in text
        assert "actor_rank0 + rollout0_rank0" in text
        assert "node7/0" in text
    assert "of 1 device (2 lanes)" in page
    [row] = csv_rows(tmp_path / "csv", report, table="devices")
    assert (row["lanes"], row["busy_us"]) == ("actor_rank0; rollout0_rank0", "4000000.0")
    numbers = dict(scalars(report))
    assert (numbers["busy_share"], numbers["lost/host_bound_s"]) == (0.4, 2.0)


@pytest.mark.parametrize(
    ("actor", "engine", "count"),
    [
        ([GPU], [GPU], 1),
        ([GPU], [OTHER], 2),
        ([GPU], [Device(kind="cuda", place="node7/0")], 1),  # an engine knows no UUID
        ([GPU], [Device(kind="cuda", uuid=OTHER.uuid, place="node7/0")], 2),  # two containers, both of GPU 0
        ([GPU], [], 2),
        ([Device(kind="cuda")], [Device(kind="cuda")], 2),
    ],
)
def test_what_says_that_two_lanes_are_one_device(
    tmp_path: Path, actor: list[Device], engine: list[Device], count: int
) -> None:
    """The UUID, else the place; what is not known is not made up."""
    assert len(colocated(tmp_path, actor, engine).devices) == count


def test_ranks_of_a_replica_have_the_devices_in_their_order(tmp_path: Path) -> None:
    """The rank inside the replica is the place in the list."""
    report = report_of(
        tmp_path,
        STAGES,
        [
            Worker("actor", 0, kernels=[("gemm", 5, 7)], devices=[OTHER]),
            Worker("rollout", replica=0, kernels=[("k", 0, 1)], devices=[OTHER, GPU]),
        ],
    )
    assert [row.lanes for row in report.devices] == [["actor_rank0", "rollout0_rank0"]]
