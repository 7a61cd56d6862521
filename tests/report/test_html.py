"""The HTML report: one file, complete and small, whatever the names in it are."""

from __future__ import annotations

import json
import re
from importlib import resources
from pathlib import Path

import msgspec
import pytest
from drawn_steps import whole_step
from html_elements import Elements
from step_folders import build_step

from verl_profiling.analysis import open_step
from verl_profiling.numbers.report_columns import CollectiveRow, GanttSpan, KernelRow, StragglerRow
from verl_profiling.report.html import render_html, table
from verl_profiling.report.model import Finding, Report
from verl_profiling.report.tables import named


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    return open_step(build_step(tmp_path_factory.mktemp("run"), rank1_clock_ns=5_000)).report()


def test_the_page_is_well_formed_and_self_contained(report: Report) -> None:
    """Every element is closed, nothing is fetched,
    and libraries have their versions and licences in it.
    """
    page = render_html(report)
    assert Elements(page).outside == []
    assert not re.search(r"@import|url\((?!data:|#)", page)
    library = (resources.files("verl_profiling.report") / "page" / "d3.min.js").read_text()
    assert library in page
    root = Path(__file__).resolve().parents[2]
    pinned = json.loads((root / "requirements/page/package.json").read_text())["dependencies"]
    for name, version in pinned.items():
        assert name == "esbuild" or f"{name} {version}" in library
    assert "Permission to use, copy, modify" in library
    assert "Redistributions in binary form" in library


def test_what_the_loop_reported_is_on_the_page(report: Report) -> None:
    """Every number that the loop logged for the step is next to what was measured."""
    metrics = {"critic/score/mean": 0.25, "timing_s/<step>": 12.5}
    page = render_html(msgspec.structs.replace(report, metrics=metrics))
    section = page.partition('id="reported-by-the-loop"')[2].partition("</section>")[0]
    assert "critic/score/mean" in section
    assert ">0.25<" in section
    assert "timing_s/&lt;step&gt;" in section


HOSTILE = [
    '</script><img src=x onerror=alert(1)>"&',
    "<!--<script>\u202egnp.exe\u2066 \u2028\u2029\x00\x1b[31m" + "a" * 5000,
]


def hostile(report: Report, name: str) -> Report:
    """Return the report with a name in every place that another program fills."""
    first, *others = report.workers
    return msgspec.structs.replace(
        report,
        directory=name,
        step=None,
        gantt=[GanttSpan(lane=name, name=name, begin_us=0, end_us=9, depth=0), *report.gantt],
        workers=[msgspec.structs.replace(first, name=name, role=name), *others],
        stages=[msgspec.structs.replace(report.stages[0], name=name), *report.stages],
        lost=[msgspec.structs.replace(row, cause=name) for row in report.lost],
        stragglers=[
            StragglerRow(
                stage=name,
                role=name,
                workers=9,
                slowest=name,
                slowest_us=9e9,
                median_us=1,
                wait_us=1,
            )
        ],
        collectives=[
            CollectiveRow(
                name=name, role=name, calls=9, median_us=1.0, wait_us=9e9, late=name, late_share=1.0
            )
        ],
        kernels=[KernelRow(name=name, stage=name, calls=1, self_us=1, share=1)],
        findings=[Finding(rule=name, text=name, advice=name, seconds=1.0, lanes=[name])] * 2,
        metrics={f"{name}/{name}": 1.0, name: float("nan")},
        notes=[name],
    )


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_names_cannot_break_out_of_the_page(report: Report, name: str) -> None:
    """Any characters of a stage, lane, kernel, cause, metric or folder are text:
    no element comes of them.
    """
    page = render_html(hostile(report, name))
    elements = Elements(page)
    assert elements.outside == []
    assert not set(elements.tags) & {"img", "textarea"}
    assert elements.tags.count("script") == 4
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.S)[1])  # type: ignore[index]
    assert data["stages"][0]["name"] == name


def test_64_ranks_stay_below_1_mb(tmp_path: Path) -> None:
    """The page of a large step, with all of its curves, is small enough to send to somebody."""
    report = whole_step(tmp_path, ranks=64, replicas=16, fault="slow rank")
    kernels = [
        KernelRow(name=f"{'k' * 200}{i}", stage="update_actor", calls=i, self_us=i, share=0.01)
        for i in range(900)
    ]
    metrics = {f"critic/metric/{i}": i / 7 for i in range(300)}
    page = render_html(
        msgspec.structs.replace(report, gantt=report.gantt * 4, kernels=kernels, metrics=metrics)
    )
    assert len(page.encode()) < 1_000_000


def test_a_long_name_is_cut_with_a_sign_and_opens() -> None:
    name = "void at::native::" + "x" * 200 + "_float4"
    cell = table("kernels", ("kernel",), [(named(name),)])
    (short,) = re.findall(r"<summary><bdi>(.*?)</bdi>", cell)
    assert len(short) == 64
    assert short.startswith("void at::native::")
    assert short.endswith("_float4")
    assert "…" in short
    assert f"<bdi>{name}</bdi></details>" in cell
