"""The terminal's report fits 80 columns, and shows when it leaves something out."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest
from drawn_steps import whole_step
from step_folders import build_step
from step_outcome import printed

from verl_profiling.analysis import open_step
from verl_profiling.cli import main
from verl_profiling.numbers.report_columns import SuspectRow
from verl_profiling.report.html import summary
from verl_profiling.report.model import Finding, Report


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """The report of a real step, with long names and many rows."""
    found = open_step(build_step(tmp_path_factory.mktemp("run"))).report()
    lanes = [msgspec.structs.replace(row, name=f"{row.name}.{'n' * 60}") for row in found.workers]
    engines = [msgspec.structs.replace(row, name=f"{row.name}.{'n' * 60}") for row in found.engines]
    ops = [msgspec.structs.replace(row, name=f"{row.name}<{'x' * 90}>") for row in found.kernels]
    return msgspec.structs.replace(
        found, workers=lanes, engines=engines, kernels=ops, stragglers=found.stragglers * 12
    )


@pytest.mark.parametrize(
    ("fault", "cause", "finding"),
    [
        ("healthy", "% waiting for rollout, nothing unusual", "no finding is above"),
        ("slow rank", "% waiting for other ranks", "actor_rank10 is slow in update_actor"),
        ("long tail", "% long tail", "Where: rollout3_rank0."),
        ("slow weight sync", "% weight sync", "Lanes were idle while weights went to the engines"),
    ],
)
def test_the_first_screen_says_what_is_wrong(
    tmp_path: Path, fault: str, cause: str, finding: str
) -> None:
    """In 45 lines; on the page, lost time has the cause of the first finding."""
    report = whole_step(tmp_path, ranks=16, replicas=4, fault=fault)
    shown = printed(report, 80, everything=False)
    assert len(shown.splitlines()) <= 45
    order = [
        "Step: ",
        "Tokens per second: ",
        "busy: ",
        "Lost: ",
        "• ",
        "\nStages",
        "\nLost ",
        "--all",
    ]
    at = [shown.index(part) for part in order]
    assert at == sorted(at)
    assert "lane-seconds" in shown
    assert ("no finding is above" in shown) == (fault == "healthy")
    page = " ".join(re.sub(r"<[^>]+>", " ", summary(report)).split())
    assert cause in page
    assert finding in page
    assert fault != "slow weight sync" or "Where:" not in page, "a list of every lane says no more"


@pytest.mark.parametrize("width", [80, 200])
def test_it_fits_the_terminal(report: Report, width: int) -> None:
    """From 80 to 100 columns; a number stays in one piece, and so does each name of a lane,
    if over lines.
    """
    text = printed(report, width)
    assert max(map(len, text.splitlines())) <= min(width, 100)
    assert not re.search(r"^ *(s|ms|us|ns)\b", text, re.MULTILINE)
    first_column = "".join(line.split(" ")[0] for line in text.splitlines())
    assert all(row.name in first_column for row in report.workers)


def test_a_pipe_gets_100_columns_without_colour(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(build_step(tmp_path)), "--all"]) == 0
    printed = capsys.readouterr().out
    assert 80 < max(map(len, printed.splitlines())) <= 100
    assert "\x1b" not in printed


def test_what_is_left_out_is_counted(report: Report) -> None:
    """Kernels beyond the first 64, the middle of a long name."""
    many = msgspec.structs.replace(report, kernels=report.kernels[:1] * 70)
    text = printed(many, 80)
    assert "6 more: --csv, --json" in text
    assert "…" in text


def test_an_option_is_shown_whole(report: Report) -> None:
    """However long, as it is typed; the change beside it is shortened."""
    option = "--unblock '__main__.Rollout.play_with_all_tools (my_project/agents/loop_plain.py:58)'"
    row = msgspec.structs.replace(report.what_would_help[0], option=option, change="c" * 90)
    for everything in (True, False):
        shown = printed(
            msgspec.structs.replace(report, what_would_help=[row]), 100, everything=everything
        )
        table = shown.partition("What would help")[2].partition("Predicted")[0]
        lines = [line.split("  ", 1)[-1] for line in table.splitlines()]
        typed = "".join(re.sub(r"  .*", "", line.strip()) for line in lines)
        assert "play_with_all_tools" in typed
        assert "loop_plain.py" in typed
        assert "…" not in typed.partition("--unblock")[2]


@pytest.mark.parametrize("suspects", [0, 9])
def test_long_names_make_the_first_screen_no_longer(report: Report, suspects: int) -> None:
    """At 100 columns, each row has one line; an option stays whole
    if the change beside it can be cut.
    """
    finding = Finding(rule="idle", text="t" * 190, advice="a" * 90, seconds=1.0)
    tool = {
        "change": "browser_open_and_screenshot_with_all_its_frames in 50% of its time",
        "option": "--tools browser_open_and_screenshot=0.5x",
        "hours_a_day": 12345.6,
        "unit": "GPU-hours",
    }
    suspect = SuspectRow(
        suspect="s" * 60, peers="p" * 60, kind="kernel", name="k" * 60, value=1.0, peer_value=2.0
    )
    worst = msgspec.structs.replace(
        report,
        findings=[finding] * 5,
        what_would_help=[msgspec.structs.replace(report.what_would_help[0], **tool)] * 5,
        notes=["n" * 100] * 20,
        stages=[msgspec.structs.replace(row, name="n" * 120) for row in report.stages * 9],
        suspects=suspects * [suspect],
        lost=report.lost * 9,
    )
    shown = printed(worst, 100, everything=False)
    assert len(shown.splitlines()) <= 45
    assert re.search(
        r"\nbrowser.*….* time +--tools browser_open_and_screenshot=0\.5x +\d.*hours\n", shown
    )
    assert "\n3 more findings and 18 more notes: --all\n" in shown
