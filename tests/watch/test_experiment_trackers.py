"""``watch.sinks``: what a tracker has after a run, and that a dead one costs the loop nothing."""

from __future__ import annotations

import os
import pty
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from verl_profiling import ProfilingCallback
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.watch import experiment_trackers
from verl_profiling.workers import CaptureMixin

STEPS, HUNG, CAPTURED = 16, 14, 15
SLOW = (11, 12)
NOTICED = ("hang", "slow_stage")
STEP_S = "profiling/watch/step_s"


class Found(NamedTuple):
    """What a tracker has of a run.

    Attributes:
        steps: The loop's steps of the curve of their durations.
        notices: Texts of notices by kind.
        finding: The first finding of the captured step.
        page: The page of its report, or a text that leads there.
    """

    steps: list[int]
    notices: dict[str, str]
    finding: str
    page: str


def train(folder: Path, sink: str, hung_s: float = 0.1) -> None:
    """Run a loop with a slow step, one that may hang, and a captured step."""
    times_s = {**dict.fromkeys(SLOW, 0.9), HUNG: hung_s}
    watch = {"enable": True, "sinks": [sink], "hang_s": 1.0, "first_hang_s": 1.0, "every": 1}
    watch["trigger"] = {"slow_step": None, "leader": None, "max_captures": 0}
    settings = {
        "enable": True,
        "save_path": str(folder),
        "schedule": {"steps": [CAPTURED]},
        "tool": "spans",
        "watch": watch,
    }
    worker = CaptureMixin()
    worker.init_capture(settings, role="actor", rank=0)
    with ProfilingCallback(settings) as callback:
        callback.add_workers("actor", [worker])
        for step in range(1, STEPS + 1):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                time.sleep(times_s.get(step, 0.1))
            callback.on_step_end()


def in_tensorboard(run: Path) -> Found:
    """Read the event file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(run / "tensorboard")).Reload()

    def text(tag: str) -> str:
        return str(read.Tensors(f"profiling/{tag}")[-1].tensor_proto.string_val[0], "utf-8")

    finding, _, path = text("report").partition("\n\n")
    notices = {kind: text(kind) for kind in NOTICED}
    steps = [point.step for point in read.Scalars(STEP_S)]
    return Found(steps, notices, finding, Path(path.strip("`")).read_text())


def in_wandb(run: Path) -> Found:
    """Read the log of the run that is offline, in LevelDB's format."""
    from wandb.proto.wandb_internal_pb2 import Record

    [path] = run.parent.glob("wandb/offline-run-*/run-*.wandb")
    data, at, record, records = path.read_bytes(), 7, b"", []
    while at + 7 < len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        size, kind = struct.unpack_from("<HB", data, at + 4)
        record += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            records.append(Record.FromString(record))
            record = b""
    points = [{item.nested_key[0]: item.value_json for item in one.history.item} for one in records]
    steps = [int(point["profiling/step"]) for point in points if STEP_S in point]
    alerts = [one.alert for one in records if one.HasField("alert")]
    notices = {alert.title.partition(" in ")[0]: alert.text for alert in alerts}
    artifacts = [one.artifact for one in records if one.HasField("artifact")]
    [artifact] = [one for one in artifacts if one.type == "profiling"]
    [file] = artifact.manifest.contents
    return Found(steps, notices, artifact.description, Path(file.local_path).read_text())


def in_mlflow(run: Path) -> Found:
    """Read the store."""
    import mlflow

    client = mlflow.MlflowClient()
    [found] = client.search_runs(["0"])
    assert found.info.status == "FINISHED"
    tags = found.data.tags
    notices = {name.split("/")[1]: tags[name] for name in tags if name.startswith("profiling/")}
    steps = [point.step for point in client.get_metric_history(found.info.run_id, STEP_S)]
    page = client.download_artifacts(
        found.info.run_id, f"profiling/step_{CAPTURED:06d}/report.html"
    )
    finding = tags[f"profiling/finding/step {CAPTURED}"]
    return Found(sorted(steps), notices, finding, Path(page).read_text())


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Trackers that need no server, in a folder of the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    yield
    if "wandb" in sys.modules:
        sys.modules["wandb"].teardown()


@pytest.mark.parametrize(
    ("sink", "read"),
    [
        pytest.param("tensorboard", in_tensorboard),
        pytest.param("wandb", in_wandb, marks=pytest.mark.trackers),
        pytest.param("mlflow", in_mlflow, marks=pytest.mark.trackers),
    ],
)
def test_a_tracker_has_numbers_notices_and_reports(
    tmp_path: Path, offline: None, sink: str, read: Callable[[Path], Found]
) -> None:
    """Of a run with a step that hung and was slow, and with a captured step."""
    pytest.importorskip(sink)
    run = tmp_path / "run"
    train(run, sink, hung_s=4.0)
    found = read(run)
    assert found.steps == [*range(1, STEPS + 1)]
    assert f"step {HUNG} hangs: in update_actor" in found.notices["hang"]
    assert "update_actor took" in found.notices["slow_stage"]
    assert found.finding
    assert "update_actor" in found.page


class DeadTracker:
    """A tracker whose calls raise, or never return."""

    def __init__(self, blocks: bool) -> None:
        self.revived = threading.Event()
        self._blocks = blocks

    def open(self) -> None:
        """Open, as it lives still."""

    def add(self, *_: object) -> None:
        """Raise, or block."""
        if not self._blocks:
            raise RuntimeError("its server is gone")
        self.revived.wait()

    note = attach = close = add


@pytest.mark.parametrize("blocks", [False, True])
def test_a_dead_tracker_costs_the_loop_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    blocks: bool,
) -> None:
    """No step and no line of the log; one warning, and the end waits a bounded time for it."""
    dead = DeadTracker(blocks)
    monkeypatch.setitem(experiment_trackers.TRACKERS, "wandb", lambda run: dead)
    monkeypatch.setattr(experiment_trackers, "_LONGEST_CALL_S", 0.3)
    monkeypatch.setattr(experiment_trackers, "_MOST_QUEUED", 4)
    began_s = time.monotonic()
    train(tmp_path, "wandb")
    dead.revived.set()
    assert time.monotonic() - began_s < 10
    assert [step.step for step in WatchLogReader(tmp_path).read()] == [*range(1, STEPS + 1)]
    said = {text for text in caplog.messages if text.startswith("watch.sinks: ")}
    if blocks:
        assert {text.partition(", and ")[0] for text in said} == {
            "watch.sinks: wandb is too slow",
            "watch.sinks: wandb does not answer",
        }
    else:
        assert said == {"watch.sinks: wandb failed: RuntimeError: its server is gone"}


@pytest.mark.trackers
def test_mlflow_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that takes the connection, and says nothing."""
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setattr(experiment_trackers, "_LONGEST_CALL_S", 2.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{server.getsockname()[1]}")
        train(tmp_path, "mlflow")
    assert "watch.sinks: mlflow does not answer, and training ends without it" in caplog.messages
    assert len([*WatchLogReader(tmp_path).read()]) == STEPS


@pytest.mark.trackers
def test_the_loops_own_runs_are_kept_whole(
    tmp_path: Path, offline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """MLflow's active run gets the metrics; W&B's keeps its points, and has a run beside it."""
    mlflow, wandb = pytest.importorskip("mlflow"), pytest.importorskip("wandb")
    with mlflow.start_run() as active:
        train(tmp_path / "mlflow", "mlflow")
    client = mlflow.MlflowClient()
    assert len(client.get_metric_history(active.info.run_id, STEP_S)) == STEPS
    assert len(client.search_runs(["0"])) == 1
    with wandb.init(project="grpo", name="first") as loop:
        train(tmp_path / "wandb", "wandb")
        assert wandb.run is loop
        assert loop.step == 0
        loop.log({"loss": 1.0}, step=0)
    assert len([*tmp_path.glob("wandb/offline-run-*")]) == 2


@pytest.mark.trackers
def test_wandb_asks_nobody_on_a_terminal(tmp_path: Path) -> None:
    """It would ask from the tracker's thread, for ever, and the interpreter could not exit."""
    pytest.importorskip("wandb")
    program = f"""
import sys
sys.path[:0] = {sys.path!r}
from tests.watch.test_experiment_trackers import train
from pathlib import Path
train(Path({str(tmp_path)!r}), "wandb")
"""
    environment = {"HOME": str(tmp_path), "PATH": os.environ["PATH"], "TERM": "xterm"}
    code, shown = on_a_terminal([sys.executable, "-c", program], environment)
    assert code == 0
    assert "wandb failed: ToolUnavailableError: not logged in" in shown
    assert "Enter your choice" not in shown


def on_a_terminal(command: list[str], environment: dict[str, str]) -> tuple[int, str]:
    """Run a command whose input and output are a terminal; return its exit code and output."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execve(command[0], command, environment)
    shown = b""
    with suppress(OSError):  # the end of the other side
        while part := os.read(terminal, 4096):
            shown += part
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode(errors="replace")
