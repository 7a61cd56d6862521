"""Folders that others made or may write: nothing outside is opened, written or listed."""

from __future__ import annotations

import ast
import json
import random
import shutil
from pathlib import Path

import pytest
from conftest import RunPython
from drawn_summaries import summary
from step_folders import build_step
from test_package import MODULES
from test_top import write_run

from verl_profiling import ConfigError, ProfilingCallback
from verl_profiling.watch.log_writer import WatchLog

OPENING = {
    "open",
    "read_text",
    "read_bytes",
    "write_text",
    "write_bytes",
    "touch",
    "connect",
    "put_file",
}
MOVING = {"shutil.move", "shutil.copy", "shutil.copyfile", "shutil.copytree"}
NO_FILES = {
    *("webbrowser", "capture", "log", "self.requests", "self._requests", "self._log"),
    "self._tracker",
}
NOT_READ = ("files.opener", "files.host_use", "files.cpu_waits")  # two read /proc alone
OTHERS = {
    "cli os.open": "the null device",
    " Path('/proc/self/schedstat').read_text": "of the kernel",
    "clock Path('/proc/sys/kernel/random/boot_id').read_text": "of the kernel",
    "identity Path(f'/proc/{pid}/stat').read_text": "of the kernel",
    "files.machine os.open": "of the kernel",
    "files.machine (root / 'proc/self/cgroup').read_text": "of the kernel",
    "files.machine path.read_text": "of the kernel",
    "files.machine (folder / files.limit).read_text": "of the kernel",
    "files.machine (folder / files.usage).read_text": "of the kernel",
    "report.html (resources.files('verl_profiling.report') / 'page' / "
    "name).read_text": "of the package",
    "steps.databases sqlite3.connect": "SQLite opens by name; it is opened and checked "
    "right before",
    "settings.roles file.read_bytes": "the user's model",
    "engines.vllm Path(f'/proc/{pid}/stat').read_text": "of the kernel",
    "tools.npu shutil.move": "a folder of torch_npu is renamed; the engine writes it by name",
    "files.remote self._fs.put_file": "file systems of fsspec read by name, from a private "
    "staging folder",
}
"""Calls that open a file by name outside of the module that opens all others, and why."""


def test_one_module_opens_the_files_of_a_run() -> None:
    """Calls of opening functions, but for those that unpack an open file, or open no file."""
    found = set()
    for module, path in MODULES.items():
        calls = (
            node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)
        )
        for call in calls if module not in NOT_READ else ():
            called = ast.unparse(call.func)
            owner, _, name = called.rpartition(".")
            is_packed = (
                called in ("gzip.open", "igzip.open") and ast.unparse(call.args[0]) != "path"
            )
            if called in MOVING or (name in OPENING and owner not in NO_FILES and not is_packed):
                found.add(f"{module} {called}")
    assert found == set(OTHERS)


COMMANDS = """
    import os, sys
    from pathlib import Path
    from verl_profiling.cli import main

    outside = os.path.realpath(sys.argv[1])
    opened = []

    def note(event, arguments):
        if event not in ("open", "os.listdir", "os.scandir") or not isinstance(arguments[0], str):
            return
        is_safe = event == "open" and arguments[2] & os.O_NOFOLLOW
        if not is_safe and os.path.realpath(arguments[0]).startswith(outside):
            opened.append(arguments[0])

    sys.addaudithook(note)
    for run in map(Path, sys.argv[2:]):
        for command in (["check"], ["report", "--save"], ["merge"], ["what-if"], ["diff", run],
                        ["collect"],
                        ["top", "--once"], ["trigger"], ["report", "--csv", run / "csv"], ["plan"]):
            place = run / "run.json" if command == ["plan"] else run
            code = main([command[0], str(place), *map(str, command[1:])])
            assert code in (0, 1, 2), (command, code)
    print("opened outside:", sorted(set(opened)))
"""


def watched_run(folder: Path) -> Path:
    """Build a run with two steps, results of commands, a watch log,
    and what nsys and hangs leave.
    """
    for step in (1, 2):
        place = build_step(folder, step=step)
        for name in ("timeline.json.gz", "report.json", "report.html", "actor_rank0.result.json"):
            (place / name).write_text("precious")
    write_run(folder)
    (folder / "index.html").write_text("precious")
    log = WatchLog(folder)
    for number in range(3):
        log(summary(number, {"rollout": 5000 + number}))
    for name in (
        "nsys/a.1.ranges.jsonl",
        "nsys/a.1.nsys-rep",
        "hangs/loop.json",
        "requests/0.json",
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("{}")
    return folder


def full_of_links(theirs: Path, run: Path, seed: int) -> Path:
    """Copy a run with links to it for files, for folders, or for some of both; return the copy."""
    chance = random.Random(seed)
    shutil.copytree(theirs, run)
    files = [path for path in run.rglob("*") if path.is_file()]
    folders = [path for path in run.iterdir() if path.is_dir()]
    shares = ((1.0, 0.0), (0.0, 1.0), (0.5, 0.15), (0.3, 0.1))[seed]
    for paths, share in zip((files, folders), shares, strict=True):
        for path in paths:
            if chance.random() < share:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
                path.symlink_to(theirs / path.relative_to(run))
    return run


def test_no_command_opens_what_a_folder_full_of_links_leads_to(
    tmp_path: Path, run_python: RunPython
) -> None:
    """All files, all folders, or some of both by chance: commands end,
    and nothing outside is opened.
    """
    outside = tmp_path / "outside"
    runs = [
        full_of_links(watched_run(outside / str(seed)), tmp_path / f"run{seed}", seed)
        for seed in range(4)
    ]
    before = {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()}
    assert run_python(COMMANDS, outside, *runs).stdout.splitlines()[-1] == "opened outside: []"
    assert {path: path.read_bytes() for path in outside.rglob("*") if path.is_file()} == before


JOB = """
    import os, shutil
    from pathlib import Path
    from verl_profiling import ProfilingCallback, stage
    from fleet import TrainWorker

    victim, run = Path("victim").absolute(), Path("run").absolute()

    def lead_away(name):
        place = run / name
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(exist_ok=True)
        (run / "new").symlink_to(victim / Path(name).name)
        (run / "new").rename(place)

    config = {
        "enable": True, "save_path": "run", "schedule": {"steps": [2, 4, 6]},
        "tool": ["torch", "spans"],
        "watch": {"enable": True, "sinks": ["tensorboard"]},
        "after": {"x": {"command": ["echo", "output"]}},
    }
    worker = TrainWorker()
    worker.set_up(config)
    steps = 0
    with ProfilingCallback(config) as profiling:
        profiling.add_workers("actor", worker)
        for step in range(1, 8):
            if step == 3:
                for name in ("watch.jsonl", "tensorboard", "hangs", "requests", "step_000006",
                             "after/step_000004.x.controller_rank0.log", "run.json"):
                    lead_away(name)
            profiling.on_step_begin(step)
            worker.work()
            profiling.on_step_end({"loss": 1.0})
            steps += 1
    print(steps)
"""


def test_a_job_writes_through_no_link_in_its_folder(tmp_path: Path, run_python: RunPython) -> None:
    """The loop goes on, and a folder in which everything was led away gets no byte."""
    victim = tmp_path / "victim"
    for name in ("tensorboard", "hangs", "requests", "step_000006"):
        (victim / name).mkdir(parents=True)
        (victim / name / "manifest.json").write_text("precious")
    for name in ("watch.jsonl", "step_000004.x.controller_rank0.log", "run.json"):
        (victim / name).write_text("precious")
    assert run_python(JOB).stdout.splitlines()[-1] == "7"
    files = [path for path in victim.rglob("*") if path.is_file()]
    assert (len(files), {path.read_text() for path in files}) == (7, {"precious"})
    manifest = json.loads((tmp_path / "run" / "step_000004" / "manifest.json").read_text())
    assert [worker["status"] for worker in manifest["workers"]] == ["ok"]


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o2775, 0o720, 0])
def test_a_staging_folder_of_others_is_refused(tmp_path: Path, mode: int) -> None:
    """At once, with the setting and a remedy that works, also where it becomes one later;
    0 is a link.
    """
    theirs, staging = tmp_path / "theirs", tmp_path / "staging"
    theirs.mkdir(mode=0o700)
    config = {
        "enable": True,
        "tool": "spans",
        "save_path": "memory://bucket/run",
        "schedule": {"steps": [1]},
        "remote": {"staging": str(staging)},
    }
    early = ProfilingCallback(config)
    staging.mkdir() if mode else staging.symlink_to(theirs)
    staging.chmod(mode or 0o700)
    remedy = "chmod go-w it, or choose another folder" if mode else "is a link"
    with pytest.raises(ConfigError, match=rf"remote\.staging: {staging}.*{remedy}"):
        ProfilingCallback(config)
    with early:
        early.on_step_begin(1)
        early.on_step_end()
    assert not any(staging.iterdir())
    if mode:
        staging.chmod(staging.stat().st_mode & ~0o022)
        ProfilingCallback(config)


def test_files_are_no_wider_than_the_folder_of_the_run(
    tmp_path: Path, run_python: RunPython
) -> None:
    """Nor than the umask allows; drawn modes of folders, and umasks, for jobs and for commands."""
    code = """
        import os, random, stat
        from pathlib import Path
        from verl_profiling import ProfilingCallback, stage
        from verl_profiling.cli import main

        for seed in range(8):
            chance, run = random.Random(seed), Path(f"run{seed}").absolute()
            mask = chance.choice((0, 0o002, 0o022, 0o027, 0o077))
            mode = chance.choice((0o700, 0o750, 0o770, 0o755))
            os.umask(0)
            run.mkdir(mode)
            os.umask(mask)
            config = {"enable": True, "tool": "spans", "save_path": str(run),
                      "schedule": {"steps": [1]},
                      "watch": {"enable": True, "sinks": ["tensorboard"]}}
            with ProfilingCallback(config) as profiling:
                profiling.on_step_begin(1)
                with profiling.stage("update_actor"):
                    pass
                profiling.on_step_end()
            for command in (["report", str(run), "--save"], ["merge", str(run)]):
                main(command)
            paths = [path for path in run.rglob("*")]
            assert len(paths) > 7, paths
            for path in paths:
                wide = stat.S_IMODE(path.stat().st_mode) & 0o077 & ~(mode & ~mask)
                assert not wide, (path, oct(path.stat().st_mode), oct(mode), oct(mask))
    """
    run_python(code)
