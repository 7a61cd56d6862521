"""Fixtures of all tests. The first one proves that no test leaves anything behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import hypothesis
import psutil
import pytest
from reader import Reader

from verl_profiling.capture.session import Session, process_session
from verl_profiling.cli import main
from verl_profiling.files import engine_marks, process_marks
from verl_profiling.testing import leaks

# The same examples every time, so that no landing depends on dice; soaks and fuzzing throw their
# own.
hypothesis.settings.register_profile("same", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("same")
ROOT = Path(__file__).resolve().parent.parent
_VERDICT = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a file with a Ray cluster of its own come before those that share one."""
    items.sort(key=lambda item: item.path.name != "test_cluster.py")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_VERDICT] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """End a process that drove Ray without Ray's exit handlers."""
    if "ray" in sys.modules and config.stash.get(_VERDICT, pytest.ExitCode.USAGE_ERROR) <= 1:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash[_VERDICT])


@pytest.fixture(autouse=True)
def _nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """No capture, profiler, thread, child process or stray file outlives a test."""
    folder = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    children = _children()
    outputs = Path("outputs/profiling").exists()
    yield
    process_session().stop("no such capture", finish_s=30)
    # The start of this test's engines is not of the next test's processes.
    process_marks._marks.clear()
    engine_marks._own = ""
    os.environ.pop(engine_marks.VARIABLE, None)
    assert _after_a_while(leaks) == []
    assert _after_a_while(lambda: [str(child) for child in _children() - children]) == []
    assert outputs or not Path("outputs/profiling").exists(), "written into the working directory"
    if folder is not None:
        assert _after_a_while(lambda: _parts(folder)) == []


@pytest.fixture(scope="session", autouse=True)
def _no_unfinished_files(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nor do folders that several tests share keep an unfinished file."""
    yield
    assert _after_a_while(lambda: _parts(tmp_path_factory.getbasetemp())) == []


def _parts(folder: Path) -> list[str]:
    """Return the unfinished files in a folder; others may write and remove there meanwhile."""
    return [
        str(Path(inside, name))
        for inside, _, names in os.walk(folder)
        for name in names
        # a process that is ended while its record is written leaves a part of the record
        if name.startswith(".") and ".part" in name and Path(inside).name != "processes"
    ]


def _children() -> set[psutil.Process]:
    """Return what this process has started; Linux knows that without a look at every process."""
    try:
        tasks = [path.read_text().split() for path in Path("/proc/self/task").glob("*/children")]
        found = [psutil.Process(int(pid)) for pids in tasks for pid in pids]
    except (OSError, psutil.Error):  # a thread or a child ended meanwhile
        tasks, found = [], []
    return {
        child
        for child in (found if tasks else psutil.Process().children())
        if not any("resource_tracker" in part or "forkserver" in part for part in _command(child))
    }


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() if process.status() != psutil.STATUS_ZOMBIE else []
    except psutil.Error:
        return []


def _after_a_while(look: Callable[[], list[str]], seconds: float = 20.0) -> list[str]:
    """Return what ``look`` sees once it sees nothing, or when the time is up."""
    deadline = time.monotonic() + seconds
    while (seen := look()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return seen


@pytest.fixture
def session() -> Iterator[Session]:
    """The session of this process, knowing no worker."""
    process_session().reset()
    yield process_session()
    process_session().leave()
    process_session().reset()


@pytest.fixture(scope="session")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Reader:
    """Types the commands of the documentation, each once,
    however many tests look at what they leave.
    """
    return Reader(tmp_path_factory.mktemp("reader"))


RunPython = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def run_python(tmp_path: Path) -> RunPython:
    """Run code in an interpreter of its own, in the test's folder;
    it must exit with that status.
    """

    def run(code: str, *arguments: object, status: int = 0) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests"))),
        }
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == status, (
            f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run


@contextmanager
def disk_of(size: str, folder: Path) -> Iterator[Path]:
    """Mount a file system of a size in a folder; skip the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a small file system cannot be mounted")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture(scope="session")
def _ray_ends() -> Iterator[None]:
    """Ray is shut down when all tests have run."""
    yield
    pytest.importorskip("ray").shutdown()


@pytest.fixture(scope="session")
def stand_in_nsys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stand-in for Nsight Systems,
    which the nodes of the small Ray cluster find.
    """
    from tools.nsys_stand_in import install

    folder = tmp_path_factory.mktemp("nsys")
    install(folder, folder / "log")
    return folder


@pytest.fixture(scope="module")
def ray_cluster(_ray_ends: None, stand_in_nsys: Path) -> None:
    """The small Ray cluster that the test files share."""
    ray = pytest.importorskip("ray")
    if ray.is_initialized():
        return
    environment = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    from tools.nsys_stand_in import found_first

    for attempts_left in (2, 1, 0):
        try:
            with found_first(stand_in_nsys):
                ray.init(
                    address="local",  # whatever cluster runs on this machine
                    num_cpus=4,
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    configure_logging=False,
                    runtime_env={"env_vars": environment},
                )
        except (
            Exception
        ):  # "timed out during startup": Ray waits for 30 s, which a busy machine may need
            ray.shutdown()
            if not attempts_left:
                raise
        else:
            break


@dataclass
class Pool:
    """Ray actors that the tests share; ``set_up`` makes each as good as new."""

    sync: list[Any]
    asynchronous: Any
    threaded: Any


@pytest.fixture(scope="module")
def pool(ray_cluster: None) -> Pool:
    """Three ordinary actors, an async one and one with several threads: the same in every file."""
    import ray

    return _pool_of(ray.get_runtime_context().get_node_id())


@cache
def _pool_of(cluster: str) -> Pool:
    import fleet
    import ray

    plain, coroutines = (
        ray.remote(num_cpus=0)(fleet.TrainWorker),
        ray.remote(num_cpus=0)(fleet.AsyncWorker),
    )
    pool = Pool(
        [plain.remote() for _ in range(3)],
        coroutines.remote(),
        plain.options(max_concurrency=4).remote(),
    )
    ray.get([actor.counts.remote() for actor in (*pool.sync, pool.asynchronous, pool.threaded)])
    return pool


@pytest.fixture
def reports(capsys: pytest.CaptureFixture[str]) -> Callable[[Path], list[dict[str, Any]]]:
    """Return the function that gives what ``report --json`` prints of a path."""

    def of(path: Path) -> list[dict[str, Any]]:
        capsys.readouterr()
        main(["report", str(path), "--json"])
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    return of
