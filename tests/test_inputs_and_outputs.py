"""What the commands take as input, where whole results go, and that these never meet."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import disk_of
from step_folders import build_step, rewrite

from verl_profiling.analysis import open_run, open_step, open_steps
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.errors import TraceFormatError
from verl_profiling.files.run_files import write_json_atomically
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import RUN_NAME, RunInfo
from verl_profiling.steps.inputs import find_steps

DATA = Path(__file__).parent / "data"
RANKS = ("megatron_tp2_rank0.json.gz", "megatron_tp2_rank1.json.gz")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    """A folder with the real traces of two ranks."""
    folder = tmp_path / "traces"
    folder.mkdir()
    for name in RANKS:
        shutil.copy(DATA / name, folder)
    return folder


def lanes(*paths: Path) -> list[str]:
    """Return the lanes of the one step that some paths are."""
    ((step,), problems) = open_steps(paths)
    assert problems == []
    return [source.lane for source in step.inputs.sources]


def files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_no_result_is_taken_for_input(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every face of every command, under any name."""
    assert main(["merge", str(traces)]) == EXIT_OK
    assert main(["merge", str(traces), "-o", str(traces / "all.json.gz")]) == EXIT_OK
    assert (
        main(["merge", str(traces), "--ranks", "0", "-o", str(traces / "one.pt.trace.json.gz")])
        == EXIT_OK
    )
    assert main(["report", str(traces), "--save", "--csv", str(traces / "csv")]) == EXIT_OK
    assert main(["report", str(traces / RANKS[0]), "--save"]) == EXIT_OK
    shutil.copy(traces / "report.json", traces / "saved_elsewhere.json")
    assert lanes(traces) == ["worker_rank0", "worker_rank1"]
    open_step(traces).merge(traces / "all.json.gz")
    assert main(["report", str(traces / "all.json.gz")]) == EXIT_BAD_INPUT
    assert "is a timeline written by merge; give the original traces" in capsys.readouterr().err
    assert main(["check", str(traces / "all.json.gz")]) == EXIT_OK


SELECTIONS = (
    ["--ranks", "0"],
    ["--ranks", "0-1"],
    ["--min-us", "5"],
    ["--min-us", "0.5"],
    ["--max-bytes", "20K"],
    ["--ranks", "1", "--min-us", "5"],
)


def test_no_selection_overwrites_another(traces: Path) -> None:
    """Each part of a step has a file of its own, which says what it holds;
    the whole stays the whole.
    """
    assert main(["merge", str(traces)]) == EXIT_OK
    before = files(traces)
    for selection in SELECTIONS:
        assert main(["merge", str(traces), *selection]) == EXIT_OK
        after = files(traces)
        assert before.items() <= after.items()
        assert len(after) == len(before) + 1
        before = after
    assert {
        "timeline.json.gz",
        "timeline.ranks_0.json.gz",
        "timeline.ranks_1.min_us_5.json.gz",
        "timeline.max_bytes_20000.json.gz",
    } < before.keys()


def test_reports_of_parts_of_a_folder_stay_apart(traces: Path) -> None:
    """One file, the other, both, and the folder: four reports, each with its lanes."""
    one, other = (str(traces / name) for name in RANKS)
    for paths in ([one], [other], [one, other], [str(traces)]):
        assert main(["report", *paths, "--save"]) == EXIT_OK
    found = {
        path.name: [row["name"] for row in json.loads(path.read_text())["workers"]]
        for path in traces.glob("report*.json")
    }
    assert found == {
        "report.megatron_tp2_rank0.json": ["worker_rank0"],
        "report.megatron_tp2_rank1.json": ["worker_rank1"],
        "report.megatron_tp2_rank0+megatron_tp2_rank1.json": ["worker_rank0", "worker_rank1"],
        "report.json": ["worker_rank0", "worker_rank1"],
    }
    assert all((traces / name).with_suffix(".html").is_file() for name in found)


def test_a_trace_is_never_overwritten(traces: Path, capsys: pytest.CaptureFixture[str]) -> None:
    link = traces.parent / "link.json.gz"
    link.symlink_to(traces / RANKS[1])
    before = files(traces)
    for target in (traces / RANKS[0], link):
        assert main(["merge", str(traces), "-o", str(target)]) == EXIT_BAD_INPUT
        assert f"{target} is one of the input traces" in capsys.readouterr().err
    assert files(traces) == before


def test_several_traces_are_one_capture(traces: Path, tmp_path: Path) -> None:
    """As files, as folders, twice, in any order, or from folders of two nodes."""
    one, other = (traces / name for name in RANKS)
    expected = ["worker_rank0", "worker_rank1"]
    assert (
        lanes(one, other)
        == lanes(other, one)
        == lanes(traces, one)
        == lanes(one, one, other)
        == expected
    )
    nodes = [tmp_path / "node0", tmp_path / "node1"]
    for node, trace in zip(nodes, (one, other), strict=True):
        node.mkdir()
        shutil.copy(trace, node)
    assert lanes(*nodes) == expected
    assert main(["merge", *map(str, nodes), "-o", str(tmp_path / "all.json.gz")]) == EXIT_OK
    assert json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))["traceEvents"]


@pytest.mark.parametrize(
    "names",
    [("a.json.gz", "b.json.gz"), ("step1_rank0.json.gz", "step2_rank0.json.gz")],
    ids=["times", "steps"],
)
def test_traces_given_by_name_are_one_capture(
    tmp_path: Path, names: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Recorded a year apart, or of two steps by their names:
    one timeline and one report have both.
    """
    taken = (RANKS[0], "nccl_data.json.gz")
    paths = [
        str(shutil.copy(DATA / source, tmp_path / name))
        for source, name in zip(taken, names, strict=True)
    ]
    assert main(["merge", *paths, "-o", str(tmp_path / "out.json.gz")]) == EXIT_OK
    capsys.readouterr()
    assert main(["report", "--json", *paths]) == EXIT_OK
    (report,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert report["coverage"]["read"] == 2
    assert report["step"] is None


def test_several_steps_and_runs_can_be_named(
    tmp_path: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Steps, whole runs and plain traces, each once; results of steps stay in their folders."""
    run = tmp_path / "run"
    one, two = (build_step(run, step=step) for step in (1, 2))
    other = build_step(tmp_path / "other", step=1)
    paths = [str(path) for path in (two, run, other.parent, traces)]
    assert main(["report", "--json", *paths]) == EXIT_OK
    reports = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [report["directory"] for report in reports] == [
        str(path) for path in (two, one, other, traces)
    ]
    assert main(["merge", *paths]) == EXIT_OK
    assert all((folder / "timeline.json.gz").is_file() for folder in (one, two, other, traces))
    capsys.readouterr()
    assert main(["merge", str(one), str(two), "-o", str(tmp_path / "t.json.gz")]) == EXIT_BAD_INPUT
    assert (
        "--output: needs a single step, but there are 2: step 1, step 2" in capsys.readouterr().err
    )


def test_several_paths_are_checked(
    tmp_path: Path, traces: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each file is named with its path, and one that is damaged decides the exit code."""
    step = build_step(tmp_path)
    assert main(["check", str(step), str(traces)]) == EXIT_OK
    assert f"{traces}/{RANKS[0]}" in capsys.readouterr().out
    (step / "actor_rank0.torch.json.gz").unlink()
    assert main(["check", str(traces), str(step)]) == EXIT_FINDING
    printed = capsys.readouterr().out
    assert f"missing     {step}/actor_rank0.torch.json.gz" in printed
    assert printed.splitlines()[-1].endswith("artifacts, 1 not ok")
    assert main(["check", "--json", str(traces), str(step)]) == EXIT_FINDING
    assert [json.loads(line)["ok"] for line in capsys.readouterr().out.splitlines()] == [
        True,
        False,
    ]


@pytest.mark.parametrize("command", ["merge", "report", "check"])
def test_a_wrong_path_is_one_line_and_said_before_any_work(
    traces: Path, tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A name that is not there, and a folder that holds nothing."""
    (tmp_path / "empty").mkdir()
    before = files(traces)
    for wrong, problem in (("gone", "no such file or folder"), ("empty", "and no trace files")):
        for paths in ([traces, tmp_path / wrong], [tmp_path / wrong]):
            assert main([command, *map(str, paths)]) == EXIT_BAD_INPUT
            printed = capsys.readouterr()
            assert (printed.out, printed.err.count("\n")) == ("", 1)
            assert printed.err.startswith(f"verl-profiling: error: {tmp_path / wrong}: ")
            assert problem in printed.err
    assert files(traces) == before


@pytest.mark.parametrize("command", ["report", "check", "view"])
def test_a_step_that_was_not_captured_is_told_from_a_wrong_path(
    tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the captured ones; a run may not have begun."""
    build_step(tmp_path)
    process = ProcessId.current()
    run = RunInfo(run_id="run", begin_ns=1, end_ns=2, process=process, config={}, versions={})
    write_json_atomically(tmp_path / "run.json", run)
    [captured] = [path.name for path in tmp_path.glob("step_*")]
    assert main([command, str(tmp_path / "step_999999")]) == EXIT_BAD_INPUT
    problem = f"this step was not captured; captured are {captured}\n"
    assert capsys.readouterr().err.endswith(problem)
    assert main([command, str(tmp_path / "new")]) == EXIT_BAD_INPUT
    assert ("if the job is starting" in capsys.readouterr().err) == (command == "view")


def test_what_else_is_in_a_folder_is_passed_over(traces: Path) -> None:
    """JSON of any other kind, lists among it, pipes, folders that are called like traces,
    hidden files.
    """
    (traces / "config.json").write_text("{}")
    (traces / "merges.json").write_text('[["a", "b"], {"prompt": "x"}]')
    (traces / "number.json").write_text("3")
    (traces / "data.json.gz").write_bytes(gzip.compress(b'{"rows": [1, 2]}'))
    (traces / "large.json").write_text(json.dumps({"rows": ["x" * 100] * 30_000}))
    (traces / "folder.json").mkdir()
    (traces / "._rank0.json").write_bytes(b"\0\5\26\7")
    (traces / ".ipynb_checkpoints").mkdir()
    shutil.copy(traces / RANKS[0], traces / ".ipynb_checkpoints")
    (traces / "loop").symlink_to(traces)
    assert lanes(traces) == ["worker_rank0", "worker_rank1"]


@pytest.mark.parametrize("name", ["with\nline.json.gz", "-o.json.gz", "[bold] é.json.gz"])
def test_any_name_of_a_trace_will_do(
    traces: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is shown on one line, and its results have a name that can be typed."""
    trace = traces / name
    shutil.copy(traces / RANKS[0], trace)
    assert main(["report", "--save", "--", str(trace)]) == EXIT_OK
    title = capsys.readouterr().out.splitlines()[0]
    assert title == name.replace("\n", "\\n")
    (step,) = find_steps(trace)
    assert step.output("report.json").is_file()
    assert main(["check", "--", str(trace)]) == EXIT_OK


def test_traces_may_be_links(traces: Path, tmp_path: Path) -> None:
    """As caches of data sets have them; two links to one trace are one trace."""
    folder = tmp_path / "snapshot"
    folder.mkdir()
    for number, name in enumerate((*RANKS, RANKS[0])):
        (folder / f"{number}.json.gz").symlink_to(traces / name)
    assert lanes(folder) == ["worker_rank0", "worker_rank1"]


WRITING = (["merge"], ["report", "--save"])


@pytest.mark.parametrize("command", WRITING, ids=" ".join)
def test_nothing_is_written_behind_a_step_folder_that_is_a_link(
    tmp_path: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The other steps are used; the link is named, with the folder to name instead."""
    build_step(tmp_path / "run", step=1)
    theirs = build_step(tmp_path / "theirs", step=2)
    link = tmp_path / "run" / "step_000002"
    link.symlink_to(theirs)
    before = files(theirs)
    code = main([*command, str(link.parent)])
    assert files(theirs) == before
    assert code == EXIT_FINDING
    assert f"{link}: is a link; give the folder itself, {theirs}" in capsys.readouterr().err
    assert main([*command, str(link)]) == EXIT_BAD_INPUT
    assert f"{link}: is a link; give the folder itself, {theirs}" in capsys.readouterr().err
    assert files(theirs) == before
    assert main([*command, str(theirs)]) == EXIT_OK


def test_a_step_folder_that_leads_back_to_its_run_is_in_nobodys_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The run is one run, its step is read, and no command takes the run for a step."""
    run = tmp_path / "run"
    build_step(run, step=1)
    info = RunInfo(
        run_id="run", begin_ns=1, process=ProcessId.current(), config={}, versions={}, end_ns=2
    )
    write_json_atomically(run / "run.json", info)
    (run / "step_000009").symlink_to(".")
    assert main(["check", str(run)]) == EXIT_FINDING
    for command in (["merge"], ["report", "--save"], ["report", "--json"]):
        capsys.readouterr()
        assert main([*command, str(run)]) == EXIT_FINDING
        printed = capsys.readouterr()
        assert f"{run}/step_000009: is a link" in printed.err
    assert json.loads(printed.out)["step"] == 1
    assert {path.name for path in run.iterdir()} == {
        "index.html",
        "run.json",
        "step_000001",
        "step_000009",
    }


BEGIN_NS = 1_700_000_000_000_000_000


def build_run(folder: Path, run_id: str, *steps: int) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    info = RunInfo(
        run_id=run_id, begin_ns=BEGIN_NS, process=ProcessId.current(), config={}, versions={}
    )
    write_json_atomically(folder / RUN_NAME, info)
    for step in steps:
        rewrite(build_step(folder, step=step), run_id=run_id)
    return folder


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    build_run(tmp_path / "run", "first", 1, 2)
    build_run(tmp_path / "run" / "run_2", "second", 1)
    return tmp_path


COMMANDS = (["merge"], ["report"], ["report", "--save"], ["view", "--no-browser"], ["check"])


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_command_lists_the_runs_and_asks_for_one(
    outputs: Path, command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2; each is named by a path to give; nothing was written.
    So does the folder above.
    """
    run = outputs / "run"
    before = sorted(outputs.rglob("*"))
    for path in (run, outputs):
        assert main([*command, str(path)]) == 2
        error = capsys.readouterr().err
        first, second = run / "run.json", run / "run_2" / "run.json"
        assert (
            error == f"verl-profiling: error: {path}: holds 2 runs; choose one of them: {first}, "
            f"{second}\n"
        )
    assert sorted(outputs.rglob("*")) == before


def test_runs_are_listed_in_order_of_their_numbers(
    outputs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    build_run(outputs / "run" / "run_10", "tenth", 1)
    assert main(["check", str(outputs)]) == 2
    listed = capsys.readouterr().err.split("choose one of them: ")[1].split(", ")
    assert [Path(one).parent.name for one in listed] == ["run", "run_2", "run_10"]


def test_a_diff_asks_on_either_side(outputs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two runs of one folder can be compared by name."""
    run = outputs / "run"
    for sides in ([run, run / "run_2"], [run / "run_2", run]):
        assert main(["diff", *map(str, sides)]) == 2
        assert "holds 2 runs" in capsys.readouterr().err
    assert main(["diff", str(run / "run.json"), str(run / "run_2")]) == 0


def test_each_run_can_be_named(outputs: Path) -> None:
    """By its folder or ``run.json``, a step by its own; a folder above a single run will do."""
    run = outputs / "run"
    assert [step.directory for step in find_steps(run / "run.json")] == [
        run / "step_000001",
        run / "step_000002",
    ]
    assert [step.directory for step in find_steps(run / "run_2")] == [run / "run_2" / "step_000001"]
    assert [step.directory for step in find_steps(run / "step_000002")] == [run / "step_000002"]
    assert [step.step for step in open_run(run / "run.json").steps()] == [1, 2]
    assert [step.step for step in find_steps(run / "step_000002" / "manifest.json")] == [2]
    assert main(["check", str(run / "run.json")]) == 0
    with pytest.raises(TraceFormatError, match="holds 2 runs"):
        open_run(run)
    only = build_run(outputs / "above" / "a" / "profiling", "only", 1)
    assert [step.directory for step in find_steps(outputs / "above")] == [only / "step_000001"]


@pytest.mark.parametrize("damage", [b"", b"\xff", b"[]"])
def test_a_run_whose_file_is_damaged_is_listed(outputs: Path, damage: bytes) -> None:
    (outputs / "run" / "run_2" / "run.json").write_bytes(damage)
    with pytest.raises(TraceFormatError, match=r"run_2/run\.json"):
        find_steps(outputs / "run")
    assert len(find_steps(outputs / "run" / "run_2")) == 1


KILLED = """
import os, signal, sys
from pathlib import Path
from verl_profiling.timeline import merge
from verl_profiling.cli import main

def killed(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)

merge._join = killed
main(sys.argv[1:])
"""


def hidden(folder: Path) -> list[str]:
    """Return the names of the temporary files in a folder."""
    return sorted(path.name for path in folder.glob(".*"))


def test_the_next_command_cleans_up_after_one_that_was_killed(tmp_path: Path) -> None:
    """SIGKILL leaves a temporary folder, which goes when it is a day old:
    its writer may still live.
    """
    step = build_step(tmp_path)
    done = subprocess.run([sys.executable, "-c", KILLED, "merge", str(step)], check=False)
    assert done.returncode == -signal.SIGKILL
    (left,) = hidden(step)
    assert main(["report", str(step)]) == 0
    assert hidden(step) == [left]
    long_ago = time.time() - 25 * 3600
    os.utime(step / left, (long_ago, long_ago))
    assert main(["report", str(step)]) == 0
    assert hidden(step) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    with disk_of("4m", tmp_path / "disk") as disk:
        yield disk


def fill(ballast: Path) -> None:
    """Fill a disk but for a few bytes."""
    with ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1024))
        except OSError:
            pass


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["merge", "-j", "1"], "timeline.json.gz"),
        (["report", "--save"], "report.json"),
        (["report", "--csv", "{step}/csv"], "csv/"),
    ],
)
def test_a_full_disk_is_named(
    small_disk: Path, capsys: pytest.CaptureFixture[str], command: list[str], name: str
) -> None:
    """The error is one line with the path, the exit code is 2, and no temporary file stays."""
    step = build_step(small_disk)
    fill(step / "ballast")
    first, *options = (word.format(step=step) for word in command)
    assert main([first, str(step), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"verl-profiling: error: {step / name}")
    assert line.endswith("No space left on device")
    assert hidden(step) == []
    (step / "ballast").unlink()
    assert main(["check", str(step)]) == 0
