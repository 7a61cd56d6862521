"""The ``nsys`` tool: how many ranges, through real Ray under a stand-in ``nsys``,
and what is collected.
"""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tools.nsys_stand_in import TOOL, Worker, found_first
from verl_profiling import ConfigError, ProfilingCallback, ProfilingConfig, ToolUnavailableError
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.manifest import Artifact
from verl_profiling.steps.inputs import find_steps
from verl_profiling.steps.nsys import convert_nsys, read_ranges
from verl_profiling.steps.trace import Trace
from verl_profiling.workers import CaptureMixin
from verl_profiling.workers.nsys_launch import expected_ranges, nsys_runtime_env

STAGES = ["old_log_prob", "update_actor"]


def ranges(last_step: int | None = None, role: str = "actor", **given: Any) -> int:
    """Return the computed number of ranges of a role."""
    config = ProfilingConfig.from_any({"enable": True, "tool": "nsys", **given})
    return expected_ranges(config.for_role(role), config.schedule, last_step)


@pytest.mark.parametrize(
    ("role", "given", "last_step", "expected"),
    [
        ("actor", {"schedule": {"steps": [2, 5, 9]}}, None, 3),
        ("actor", {"schedule": {"steps": [2, 3, 7], "continuous": True}}, None, 2),
        ("actor", {"schedule": {"every": 10}}, 35, 4),  # a loop may begin with step 0
        ("actor", {"schedule": {"wait": 1, "warmup": 1, "active": 2, "repeat": 2}}, None, 6),
        (
            "actor",
            {"schedule": {"steps": [2, 3]}, "mode": "discrete", "select": {"stages": STAGES}},
            None,
            4,
        ),
        ("rollout", {"schedule": {"steps": [2, 3, 7], "continuous": True}}, None, 2),
        (
            "rollout",
            {"schedule": {"steps": [2, 3], "continuous": True}, "mode": "discrete"},
            None,
            2,
        ),
    ],
)
def test_ranges_follow_from_schedule_and_stages(
    role: str, given: dict[str, Any], last_step: int | None, expected: int
) -> None:
    """One a capture in e2e mode (a warm-up is one too), one a step and stage in discrete mode.

    A rollout engine has one window a step: stages are the trainer's.
    """
    assert ranges(last_step, role, **given) == expected


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"schedule": {"every": 10}}, "schedule"),
        ({"schedule": {"steps": [2]}, "mode": "discrete"}, "select.stages"),
    ],
)
def test_ranges_that_cannot_be_known_are_an_error(given: dict[str, Any], key: str) -> None:
    """Nothing is assumed: the error names the key and what to set."""
    with pytest.raises(ConfigError) as caught:
        ranges(**given)
    assert caught.value.key == key


def test_without_nsys_no_worker_is_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The error says what to install; one that was not started under it says so,
    other roles need nothing.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ToolUnavailableError, match="install NVIDIA Nsight Systems"):
        nsys_runtime_env({"enable": True, "tool": "nsys", "schedule": {"steps": [1]}}, role="actor")
    with pytest.raises(ToolUnavailableError, match="nsys_runtime_env"):
        CaptureMixin().init_capture({"enable": True, "tool": "nsys"}, role="actor")
    config = {"enable": True, "tool": "spans", "schedule": {"steps": [1]}}
    assert nsys_runtime_env(config, role="actor") == {}


@pytest.fixture(scope="module")
def cluster(ray_cluster: None, stand_in_nsys: Path) -> Iterator[Path]:
    """The log of a stand-in ``nsys`` that a real Ray cluster starts workers with."""
    with found_first(stand_in_nsys):
        yield stand_in_nsys / "log"


def config_of(run: Path, **given: Any) -> dict[str, Any]:
    return {
        "enable": True,
        "tool": TOOL,
        "save_path": str(run),
        "schedule": {"steps": [2, 3]},
        **given,
    }


def run_steps(config: dict[str, Any], fail_in: int | None = None, die_in: int | None = None) -> int:
    """Run three steps on one actor, started as the documentation says; return its process id."""
    import ray

    environment = nsys_runtime_env(config, role="actor")
    environment["env_vars"]["PYTHONPATH"] = str(Path.cwd())
    worker = ray.remote(num_cpus=1)(Worker).options(runtime_env=environment).remote(config, 0)
    pid = ray.get(worker.train.remote(), timeout=120)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", [worker])
    callback.on_train_begin()
    for step in (1, 2, 3):
        callback.on_step_begin(step)
        if step == die_in:
            worker.die.remote()
        elif step == fail_in:
            with pytest.raises(ray.exceptions.RayTaskError):
                ray.get(worker.train.remote(fail=True))
        else:
            ray.get(worker.train.remote())
        callback.on_step_end()
    callback.on_train_end()
    if die_in is None:
        worker.leave.remote()
    return int(pid)


def collected(run: Path, ready: Callable[[], bool]) -> int:
    """Run ``verl-profiling collect`` once the reports are there; return its exit code."""
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.1)
    return main(["collect", str(run)])


def reports(run: Path) -> int:
    return len(list((run / "nsys").glob("*.nsys-rep")))


def artifacts_of(run: Path, step: int) -> list[Artifact]:
    [worker] = read_manifest(run / f"step_{step:06d}").workers
    return worker.artifacts


def cuda_calls(run: Path, pid: int) -> list[str]:
    """Return the calls that the worker made of the CUDA profiler."""
    return (run / "nsys" / f"actor.{pid}.cuda-calls").read_text().split()


@pytest.mark.timeout(300)
class TestUnderRay:
    """The real runtime environment of Ray starts the worker under the stand-in."""

    def test_e2e(self, cluster: Path, tmp_path: Path) -> None:
        """One range a step; its report lands in the step's folder and in the manifest,
        after the process.
        """
        tmp_path = tmp_path / "a run (1)"
        config = config_of(tmp_path)
        pid = run_steps(config)
        options = json.loads(cluster.read_text().splitlines()[-1])
        assert options["o"] == f"{tmp_path}/nsys/actor.%p"
        assert options["capture-range"] == "cudaProfilerApi"
        assert options["capture-range-end"] == "repeat-shutdown:2"
        assert options["kill"] == "none"
        assert options["t"] == "cuda,nvtx,cublas"
        assert cuda_calls(tmp_path, pid) == ["start", "stop"] * 2, "as many ranges as nsys was told"
        [before] = artifacts_of(tmp_path, 2)
        assert before.status == "pending"
        assert "verl-profiling collect" in before.reason
        assert collected(tmp_path, lambda: reports(tmp_path) == 2) == 0
        for step in (2, 3):
            [artifact] = artifacts_of(tmp_path, step)
            assert (artifact.path, artifact.status, artifact.bytes) == (
                "actor_rank0.nsys-rep",
                "ok",
                6,
            )
            assert (tmp_path / f"step_{step:06d}" / "actor_rank0.nsys-rep").read_text() == "report"
        assert main(["check", str(tmp_path)]) == 0
        assert main(["collect", str(tmp_path)]) == 0, "collecting again changes nothing"

    def test_discrete_with_a_stage_that_raises(self, cluster: Path, tmp_path: Path) -> None:
        """One range a stage, closed when user code raises, and no more than announced."""
        config = config_of(tmp_path, mode="discrete", select={"stages": STAGES})
        pid = run_steps(config, fail_in=2)
        options = json.loads(cluster.read_text().splitlines()[-1])
        assert options["capture-range-end"] == "repeat-shutdown:4"
        assert cuda_calls(tmp_path, pid) == ["start", "stop"] * 4
        assert collected(tmp_path, lambda: reports(tmp_path) == 4) == 0
        for step in (2, 3):
            assert [
                (artifact.path, artifact.status) for artifact in artifacts_of(tmp_path, step)
            ] == [(f"actor_rank0.{name}.nsys-rep", "ok") for name in STAGES]
        [worker] = read_manifest(tmp_path / "step_000002").workers
        assert [(span.name, span.failed) for span in worker.stages] == list(
            zip(STAGES, [False, True], strict=True)
        )

    def test_a_worker_that_dies_inside_a_range(self, cluster: Path, tmp_path: Path) -> None:
        """Whole ranges are collected, the one it died in is marked as cut short,
        the worker stays failed.
        """
        run_steps(config_of(tmp_path), die_in=3)
        [output] = read_ranges(tmp_path / "nsys")[0]
        collected(tmp_path, lambda: True)
        for number in (1, 2):
            if not (tmp_path / f"step_{number + 1:06d}" / "actor_rank0.nsys-rep").exists():
                output.with_name(f"{output.name}.{number}.nsys-rep").write_text("report")
        assert collected(tmp_path, lambda: True) == 1
        [whole], [cut] = artifacts_of(tmp_path, 2), artifacts_of(tmp_path, 3)
        assert whole.status == "ok"
        assert (cut.status, cut.reason) == ("truncated", "the process ended inside this range")
        [worker] = read_manifest(tmp_path / "step_000003").workers
        assert worker.status == "failed", "the report does not mend that the worker died"


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Worker:
    """A worker in this process, which believes that it was started under Nsight Systems."""
    pytest.importorskip("nvtx", reason="nvtx is not installed")
    (tmp_path / "nsys").mkdir()
    monkeypatch.setenv("VERL_PROFILING_NSYS_OUTPUT", str(tmp_path / "nsys" / "actor"))
    monkeypatch.setenv("VERL_PROFILING_NSYS_RANGES", "1000")
    return Worker(config_of(tmp_path), 0)


def run_local(config: dict[str, Any], worker: Worker, *steps: int) -> None:
    with ProfilingCallback(config) as callback:
        callback.add_workers("actor", worker)
        for step in steps:
            callback.on_step_begin(step)
            worker.train()
            callback.on_step_end()


def test_each_of_two_runs_with_one_save_path_gets_its_own_reports(
    tmp_path: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nsight Systems leaves them in one folder; ``run_2`` is collected by itself,
    or with the other.
    """
    for _ in range(2):
        run_local(config_of(tmp_path), worker, 2)
    [(output, ranges)] = read_ranges(tmp_path / "nsys")[0].items()
    assert [noted.folder for noted in ranges] == ["step_000002", "run_2/step_000002"]
    for noted in ranges:
        output.with_name(f"{output.name}.{noted.number}.nsys-rep").write_text(noted.folder)
    assert main(["collect", str(tmp_path / "run_2")]) == 0
    assert capsys.readouterr().out.split() == ["ok", "run_2/step_000002/actor_rank0.nsys-rep"]
    assert artifacts_of(tmp_path, 2)[0].status == "pending"
    assert main(["collect", str(tmp_path)]) == 0
    for noted in ranges:
        assert (tmp_path / noted.folder / "actor_rank0.nsys-rep").read_text() == noted.folder
    for run in (tmp_path, tmp_path / "run_2"):
        assert artifacts_of(run, 2)[0].status == "ok"
    (tmp_path / "elsewhere").mkdir()
    assert main(["collect", str(tmp_path / "elsewhere")]) == 2
    assert "no file of the nsys tool" in capsys.readouterr().err


def test_a_process_that_is_still_running_has_no_report_yet(
    tmp_path: Path, worker: Worker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Collecting too early says so, with exit code 1, and can be repeated."""
    run_local(config_of(tmp_path), worker, 1, 2)
    assert main(["collect", str(tmp_path / "step_000002")]) == 1
    assert "has its process ended?" in capsys.readouterr().out
    assert artifacts_of(tmp_path, 2)[0].status == "pending"
    [(output, [noted])] = read_ranges(tmp_path / "nsys")[0].items()
    output.with_name(f"{output.name}.{noted.number}.nsys-rep").write_text("report")
    build_export(output.with_name(f"{output.name}.{noted.number}.sqlite"), noted.begin_ns)
    assert main(["collect", str(tmp_path)]) == 0
    assert [(artifact.path, artifact.status) for artifact in artifacts_of(tmp_path, 2)] == [
        ("actor_rank0.nsys-rep", "ok"),
        ("actor_rank0.nsys.json.gz", "ok"),
    ]
    assert main(["merge", str(tmp_path)]) == 0
    [step] = find_steps(tmp_path)
    assert [source.lane for source in step.sources] == ["actor_rank0"]


def build_export(path: Path, start_ns: int = 1_700_000_000_123_456_789) -> None:
    """Write a small database with tables and columns as the manual describes them."""
    process = 0x1234 << 24
    with sqlite3.connect(path) as database:
        database.executescript(
            f"""
            CREATE TABLE StringIds (id INTEGER PRIMARY KEY, value TEXT NOT NULL);
            CREATE TABLE TARGET_INFO_SESSION_START_TIME (
                utcEpochNs INTEGER, utcTime TEXT, localTime TEXT);
            CREATE TABLE CUPTI_ACTIVITY_KIND_KERNEL (start INTEGER, end INTEGER, deviceId INTEGER,
                contextId INTEGER, streamId INTEGER, correlationId INTEGER, globalPid INTEGER,
                demangledName INTEGER, shortName INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_MEMCPY (start INTEGER, end INTEGER, deviceId INTEGER,
                streamId INTEGER, correlationId INTEGER, bytes INTEGER, copyKind INTEGER);
            CREATE TABLE CUPTI_ACTIVITY_KIND_RUNTIME (start INTEGER, end INTEGER, globalTid INTEGER,
                correlationId INTEGER, nameId INTEGER, returnValue INTEGER);
            CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT,
                globalTid INTEGER, textId INTEGER, domainId INTEGER);
            INSERT INTO StringIds VALUES (1, 'void gemm<float>(int)'), (2, 'gemm'),
                (3, 'cudaLaunchKernel'),
                (4, 'old_log_prob');
            INSERT INTO TARGET_INFO_SESSION_START_TIME VALUES ({start_ns}, '', '');
            INSERT INTO CUPTI_ACTIVITY_KIND_KERNEL VALUES
                (5001, 9003, 0, 1, 7, 42, {process}, 1, 2);
            INSERT INTO CUPTI_ACTIVITY_KIND_MEMCPY VALUES (9100, 9200, 0, 7, 43, 4096, 1);
            INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME VALUES (4000, 4500, {process + 99}, 42, 3, 0);
            INSERT INTO NVTX_EVENTS VALUES
                (3000, 9900, 60, 'update_actor', {process + 99}, NULL, 1),
                (1000, 2000, 59, NULL, {process + 99}, 4, 1),
                (500, NULL, 34, 'a mark', {process + 99}, NULL, 1);
            """
        )
    database.close()


def test_an_export_becomes_a_trace(tmp_path: Path) -> None:
    """Kernels, copies, CUDA calls and NVTX ranges, on the wall clock to the nanosecond."""
    build_export(tmp_path / "report.sqlite")
    assert convert_nsys(tmp_path / "report.sqlite", tmp_path / "trace.json.gz", {"range": 1}) == 5
    trace = Trace(tmp_path / "trace.json.gz")
    events = {event.name: event for chunk in trace.chunks() for event in chunk}
    assert not trace.warnings
    kernel = events["void gemm<float>(int)"]
    assert trace.base_ns + round(kernel.ts * 1000) == 1_700_000_000_123_456_789 + 5001
    assert round(kernel.dur * 1000) == 4002
    assert (kernel.cat, kernel.pid, kernel.tid) == ("kernel", 0, 7)
    assert json.loads(bytes(kernel.args)) == {"device": 0, "stream": 7, "correlation": 42}
    call = events["cudaLaunchKernel"]
    assert (call.pid, call.tid) == (0x1234, 99)
    assert events["Memcpy HtoD"].cat == "gpu_memcpy"
    assert {"update_actor", "old_log_prob"} <= set(events)
    assert "a mark" not in events


def test_what_is_no_export_is_refused(tmp_path: Path) -> None:
    """The error names the file; no half trace is left."""
    from verl_profiling import TraceFormatError

    (tmp_path / "report.sqlite").write_bytes(b"no database")
    with pytest.raises(
        TraceFormatError, match=r"report\.sqlite.*is not an export of Nsight Systems"
    ):
        convert_nsys(tmp_path / "report.sqlite", tmp_path / "trace.json.gz", {})
    assert [path.name for path in tmp_path.iterdir()] == ["report.sqlite"]
