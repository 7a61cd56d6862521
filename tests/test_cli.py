"""The command line and the server of ``view``: what they print or serve, where,
with which exit code.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from browser import served
from drawn_summaries import summary
from step_folders import build_step
from test_top import CLI, write_run

from verl_profiling.cli import COMMANDS, EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.commands.view import TimelineServer
from verl_profiling.watch.log_writer import WatchLog


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_help_shows_an_example_or_the_exit_codes(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main([*command, "--help"])
    assert left.value.code == 0
    printed = capsys.readouterr().out
    assert ("example: verl-profiling" if command else "exit codes:") in printed


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    folder = build_step(tmp_path)
    command = f"{sys.executable} -m verl_profiling.cli report {folder} | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert "step 12" in done.stdout


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_option_may_stand_anywhere_among_the_paths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: int
) -> None:
    words = [str(build_step(tmp_path / name)) for name in "ab"]
    words.insert(place, "--json")
    assert main(["diff", *words]) == EXIT_OK
    assert '"changes"' in capsys.readouterr().out
    assert main(["diff", *words, "--jsn"]) == EXIT_BAD_INPUT
    assert "unknown argument --jsn" in capsys.readouterr().err


def test_merge_options_reach_the_timeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The summary says what was left out; a size that cannot be met is said with exit code 1."""
    folder = build_step(tmp_path)
    slim = ["--stages", "rollout", "--ranks", "0", "--min-us", "1", "--max-bytes", "1M"]
    assert main(["merge", str(folder), *slim]) == EXIT_OK
    assert "left out" in capsys.readouterr().out
    [path] = folder.glob("timeline*")
    assert path.name.startswith("timeline.ranks_0.stages_rollout.min_us_1")
    assert main(["merge", str(folder), "--max-bytes", "100"]) == EXIT_FINDING
    assert (
        "timeline.max_bytes_100.json.gz: larger than --max-bytes 100 bytes: "
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--stages", "rolout"], "did you mean 'rollout'"),
        (["--ranks", "7"], "selects nothing"),
        (["--ranks", "one"], "is not a list of ranks"),
        (["--ranks", "0-3000000"], "'0-3000000' is not a range of ranks"),
    ],
)
def test_bad_merge_options_are_one_line_and_exit_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], problem: str
) -> None:
    """A selection that cannot be met is refused before anything is written."""
    folder = build_step(tmp_path)
    assert main(["merge", str(folder), *options]) == EXIT_BAD_INPUT
    assert problem in capsys.readouterr().err
    assert not (folder / "timeline.json.gz").exists()


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--min-us", ("nan", "inf", "-3", "few")),
        ("--jobs", ("0", "-1", "two")),
        ("--max-bytes", ("0", "-1", "10X", "nan")),
    ],
)
def test_a_number_that_makes_no_sense_is_refused(
    capsys: pytest.CaptureFixture[str], option: str, values: tuple[str, ...]
) -> None:
    for value in values:
        with pytest.raises(SystemExit) as left:
            main(["merge", "folder", f"{option}={value}"])
        assert left.value.code == EXIT_BAD_INPUT
        assert f"{option}: {value!r} is not a" in capsys.readouterr().err


def test_what_cannot_be_written_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the name that was asked for, and not by that of a temporary file."""
    wanted = tmp_path / "no" / "out.json.gz"
    assert main(["merge", str(build_step(tmp_path)), "-o", str(wanted)]) == EXIT_BAD_INPUT
    assert (
        capsys.readouterr().err == f"verl-profiling: error: {wanted}: No such file or directory\n"
    )


@contextmanager
def viewed(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[str]]]:
    """Run ``view`` on a free port; yield the process,
    and the addresses of the timeline and of the report.
    """
    pytest.importorskip("viztracer")
    command = [*CLI, "view", str(folder), "--no-browser", "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process, [process.stdout.readline().split()[-1] for _ in range(2)]
        finally:
            process.kill()


def fetched(address: str) -> bytes:
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read()


def test_view_serves_until_interrupted(tmp_path: Path) -> None:
    """It merges and reports if needed, prints both addresses, and exits with 0 after Ctrl-C."""
    with viewed(build_step(tmp_path)) as (process, (timeline, report)):
        assert b"<!doctype html>" in fetched(report)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert "timeline.json.gz" in timeline
    assert (process.returncode, errors) == (EXIT_OK, "")


def test_view_refuses_a_port_that_is_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A number beyond all ports is bad input, like a port that is taken."""
    pytest.importorskip("viztracer")
    assert main(["view", str(build_step(tmp_path)), "--port", "99999"]) == EXIT_BAD_INPUT
    assert "--port: 99999 cannot be used" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["a file", "a link"])
def test_view_serves_nothing_that_lay_in_the_folder_already(tmp_path: Path, kind: str) -> None:
    """The page is made of the step's data; a link in the place of a result is not followed."""
    folder = build_step(tmp_path / "run")
    stranger = tmp_path / "stranger"
    stranger.write_text("<script>steal()</script>")
    names = ["report.html", "timeline.json.gz"] if kind == "a link" else ["report.html"]
    for name in names:
        shutil.copy(stranger, folder / name) if kind == "a file" else (folder / name).symlink_to(
            stranger
        )
    with viewed(folder) as (_, (timeline, report)):
        page = fetched(report)
        trace = fetched(timeline.partition("url=")[2])
    assert page.startswith(b"<!doctype html>")
    assert b"steal" not in page + trace
    assert trace[:2] == b"\x1f\x8b"
    assert "steal" in (folder / "report.html").read_text()
    assert stranger.read_text() == "<script>steal()</script>"


def test_every_command_runs_in_an_ascii_locale_without_torch_and_ray(tmp_path: Path) -> None:
    """Nobody sees a traceback; the name of the run is not ASCII."""
    run = tmp_path / "l\u00e4uft"
    folders = [str(build_step(run, step=step)) for step in (1, 2)]
    write_run(run)
    log = WatchLog(run)
    for number in range(4):
        log(summary(number, {"r\u00f6llout": 5000 + number}))
    (tmp_path / "k\u00f6nfig.yaml").write_text(
        "enable: true\nsave_path: l\u00e4uft\n", encoding="utf-8"
    )
    commands = [
        ["report", str(run), "--save", "--csv", str(tmp_path / "csv")],
        ["report", folders[0], "--all"],
        ["merge", str(run)],
        ["check", str(run)],
        ["diff", *folders],
        ["top", str(run), "--once"],
        ["plan", str(tmp_path / "k\u00f6nfig.yaml")],
        ["trigger", str(run)],
        ["doctor"],
    ]
    program = (
        "import sys\nfrom itertools import groupby\nsys.modules.update(torch=None, ray=None, "
        "vllm=None)\n"
        "from verl_profiling.cli import main\ngiven = groupby(sys.argv[1:], key=lambda word: "
        "word == ';')\n"
        "print([main(list(words)) for ends, words in given if not ends])"
    )
    given = [word for command in commands for word in (*command, ";")]
    done = subprocess.run(
        [sys.executable, "-c", program, *given],
        env={**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
        capture_output=True,
        check=False,
    )
    assert (done.returncode, b"Traceback" in done.stderr) == (0, False), done.stderr
    printed = done.stdout.decode("ascii")
    assert printed.splitlines()[-1] == str([EXIT_OK] * len(commands))
    assert "? Lanes" in printed


def test_trigger_says_that_a_step_is_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = build_step(tmp_path / "run")
    assert main(["trigger", str(folder)]) == EXIT_BAD_INPUT
    error = capsys.readouterr().err
    assert error == f"verl-profiling: error: {folder}: is a step; give its run, {folder.parent}\n"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def _led_out(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/hostname")


@pytest.mark.parametrize(
    "harm", [_cut, Path.unlink, _led_out], ids=["cut off", "deleted", "refused"]
)
@pytest.mark.parametrize("command", [["merge"], ["report"]], ids=" ".join)
def test_an_artifact_that_cannot_be_used_is_a_finding(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    harm: Callable[[Path], None],
) -> None:
    """It is named, the others are used, and the exit code is 1, of a run and of its step."""
    folder = build_step(tmp_path / "run")
    assert main([*command, str(folder)]) == EXIT_OK
    harm(folder / "actor_rank1.torch.json.gz")
    for path in (folder, folder.parent):
        capsys.readouterr()
        assert main([*command, str(path)]) == EXIT_FINDING
        printed = capsys.readouterr()
        assert "actor_rank1.torch.json.gz" in printed.out + printed.err


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tmp_path = tmp_path_factory.mktemp("served")
    (tmp_path / "served").mkdir()
    (tmp_path / "served" / "timeline.json.gz").write_bytes(b"timeline")
    (tmp_path / "served" / "report.html").write_bytes(b"report")
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / "index.html").write_bytes(b"<head></head>perfetto")
    return tmp_path


@pytest.fixture(scope="module")
def offline(folder: Path) -> Iterator[TimelineServer]:
    with served(folder / "served", folder / "ui") as server:
        yield server


@pytest.fixture(scope="module")
def online(folder: Path) -> Iterator[TimelineServer]:
    with served(folder / "served", None) as server:
        yield server


def get(address: str) -> tuple[bytes, str | None]:
    """Return the content of an address, and who may read it."""
    with urllib.request.urlopen(address, timeout=60) as answer:
        return answer.read(), answer.headers["Access-Control-Allow-Origin"]


def test_files_and_ui_are_served(offline: TimelineServer) -> None:
    """The timeline and the report by name, everything else from the UI."""
    assert get(offline.address("timeline.json.gz"))[0] == b"timeline"
    assert get(offline.address("report.html"))[0] == b"report"
    for page in ("", "index.html"):
        assert get(offline.address(page))[0] == b"<head></head>perfetto"
    assert offline.timeline_address("timeline.json.gz").startswith(
        offline.address("#!/?url=http://127.0.0.1:")
    )


def test_the_online_ui_may_fetch_the_timeline(online: TimelineServer) -> None:
    assert get(online.address("timeline.json.gz")) == (b"timeline", "https://ui.perfetto.dev")
    assert online.timeline_address("t").startswith(
        "https://ui.perfetto.dev/#!/?url=http://127.0.0.1:"
    )


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:9001", "127.0.0.1.evil.example:80", ""]
)
def test_a_page_under_another_name_gets_nothing(online: TimelineServer, host: str) -> None:
    """DNS rebinding: the browser believes that this server is the page's own,
    and says so in Host.
    """
    request = urllib.request.Request(online.address("timeline.json.gz"), headers={"Host": host})
    with pytest.raises(urllib.error.HTTPError, match="421"):
        urllib.request.urlopen(request, timeout=60)


@pytest.mark.parametrize(
    "path", ["../secret", "%2e%2e/secret", "nothing.txt", "%00", "a" * 5000, "timeline.json.gz%00"]
)
def test_nothing_else_is_served(
    offline: TimelineServer, online: TimelineServer, folder: Path, path: str
) -> None:
    """Files outside of the UI's folder stay where they are."""
    (folder / "secret").write_bytes(b"secret")
    for server in (offline, online):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.address(path))


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_timeline_that_was_replaced_is_not_served(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    """What is in its place is neither followed nor waited for; the pages are served as before."""
    timeline = tmp_path / "timeline.json.gz"
    timeline.write_bytes(b"timeline")
    (tmp_path / "report.html").write_bytes(b"report")
    with served(tmp_path, None) as server:
        assert get(server.address(timeline.name))[0] == b"timeline"
        timeline.unlink()
        {
            "link": lambda: timeline.symlink_to("/etc/hostname"),
            "pipe": lambda: os.mkfifo(timeline),
        }.get(kind, timeline.mkdir)()
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(server.address(timeline.name))
        assert get(server.address("report.html"))[0] == b"report"
    assert capfd.readouterr().err == ""


def test_only_this_machine_is_served(offline: TimelineServer) -> None:
    assert offline.server_address[0] == "127.0.0.1"
