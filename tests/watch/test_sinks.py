"""Where the numbers of steps go: in order, beside the loop, and never its problem."""

from __future__ import annotations

import importlib.util
import logging
import resource
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
from drawn_accounts import MS, account

from verl_profiling import ProfilingCallback, ProfilingConfig
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.step_account import Doubt, ExposedStage, SpanTotal
from verl_profiling.watch.log import WatchLog
from verl_profiling.watch.outlet import Outlet
from verl_profiling.watch.sinks import MlflowSink, TensorBoardSink, WandbSink
from verl_profiling.watch.values import values_of
from verl_profiling.watch_log import WATCH_LOG, WatchLogReader


class Recorder:
    """A sink of a user's own."""

    written: ClassVar[list[tuple[int, dict[str, float]]]] = []
    closed: ClassVar[list[str]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Keep the step."""
        self.written.append((step, dict(values)))

    def close(self) -> None:
        """Keep the thread."""
        self.closed.append(threading.current_thread().name)


class Broken:
    """One that raises."""

    calls: ClassVar[list[int]] = []

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Raise."""
        self.calls.append(step)
        raise ConnectionError("no route to host")

    def close(self) -> None:
        """Raise, too."""
        raise ConnectionError("no route to host")


class Unopened:
    """One that cannot be made."""

    def __init__(self) -> None:
        raise PermissionError("no login")

    write = close = print


RECORDER, BROKEN, UNOPENED = (f"{__name__}:{cls.__name__}" for cls in (Recorder, Broken, Unopened))


@pytest.fixture(autouse=True)
def _nothing_written() -> None:
    Recorder.written.clear()
    Recorder.closed.clear()
    Broken.calls.clear()


class TestValues:
    """What a step is called in numbers."""

    def test_a_stage_has_exposed_time_leader_and_imbalance(self) -> None:
        """Beside the step's duration, and the memory of each role."""
        values = values_of(account(7))
        assert values["profiling/watch/step_s"] == 9.5
        assert values["profiling/watch/rollout/exposed_s"] == 5.0
        assert values["profiling/watch/rollout/leader_rank"] == 2.0
        assert values["profiling/watch/rollout/imbalance"] == 1.25
        assert values["profiling/watch/in_no_stage/exposed_s"] == 0.5
        assert "profiling/watch/in_no_stage/imbalance" not in values
        assert values["profiling/watch/memory/actor/peak_bytes"] == 9e9
        assert values["profiling/watch/memory/actor/held_bytes"] == 3e9

    def test_the_spans_of_trajectories_have_their_sum_and_number(self) -> None:
        """Of all processes together, by name."""
        spans = [SpanTotal("tool:search", 240, 12_300 * MS, 3)]
        one, *others = account(7).workers
        workers = [msgspec.structs.replace(one, spans=spans), msgspec.structs.replace(others[0], spans=spans)]
        values = values_of(msgspec.structs.replace(account(7), workers=workers))
        found = {name: value for name, value in values.items() if "/spans/" in name}
        assert found == {
            "profiling/watch/spans/tool:search/total_s": 24.6,
            "profiling/watch/spans/tool:search/count": 480.0,
            "profiling/watch/spans/tool:search/failed": 6.0,
        }

    def test_exposed_times_add_up_to_the_step(self) -> None:
        """Also where a stage has several rows."""
        rows = [ExposedStage(name="a", exposed_ns=3), ExposedStage(name="a", exposed_ns=4)]
        step = msgspec.structs.replace(account(1), begin_ns=0, end_ns=7, exposed=rows)
        values = values_of(step)
        assert values["profiling/watch/a/exposed_s"] == pytest.approx(values["profiling/watch/step_s"])

    def test_a_step_in_which_the_clock_was_set_back_took_no_time(self) -> None:
        """It is no step of minus an hour, which would be all that is seen of the curve."""
        made = account(7)
        back = msgspec.structs.replace(made, end_ns=made.begin_ns - 3600 * 10**9)
        assert values_of(back)["profiling/watch/step_s"] == 0

    def test_a_leader_in_doubt_has_no_rank(self) -> None:
        """Nor has one that is unknown."""
        for step in (account(1, doubt="tied"), account(1, leader="somebody")):
            assert "profiling/watch/rollout/leader_rank" not in values_of(step)


class TestOutlet:
    """Beside the loop."""

    def test_the_log_has_a_step_at_once_and_whole_later(self, tmp_path: Path) -> None:
        """So that ``top`` is not late by as many steps as pass between two readings."""
        outlet = Outlet(tmp_path, [], WatchLog(tmp_path))
        outlet.step_ended(account(1, doubt="not read"))
        outlet.completed(account(1))
        outlet.close(10)
        doubts = [step.exposed[0].doubt for step in WatchLogReader(tmp_path).read()]
        assert doubts == ["not read", ""]

    def test_sinks_get_a_batch_step_by_step(self, tmp_path: Path) -> None:
        """One with each step of the loop, the rest when training ends; in order, on another thread."""
        outlet = Outlet(tmp_path, [RECORDER], None)
        for number in range(5):
            outlet.completed(account(number))
        outlet.step_ended(account(5))
        outlet.step_ended(account(6))
        outlet._work.drain(10)
        assert [step for step, _ in Recorder.written] == [0, 1]
        outlet.close(10)
        assert [step for step, _ in Recorder.written] == [0, 1, 2, 3, 4]
        assert Recorder.closed == ["verl-profiling-watch"]

    def test_a_sink_that_raises_is_switched_off_and_named_once(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        """The others go on."""
        outlet = Outlet(tmp_path, [UNOPENED, BROKEN, RECORDER, "wandb"], None)
        with caplog.at_level(logging.WARNING):
            for number in range(3):
                outlet.completed(account(number))
            outlet.close(10)
        said = [record.getMessage() for record in caplog.records]
        assert said == [
            f"watch.sinks: {UNOPENED} gets nothing: PermissionError: no login",
            "watch.sinks: wandb gets nothing: ToolUnavailableError: this process has no active run of W&B; "
            "call wandb.init() before",
            f"watch.sinks: {BROKEN} is switched off: ConnectionError: no route to host",
        ]
        assert Broken.calls == [0]
        assert [step for step, _ in Recorder.written] == [0, 1, 2]

    def test_a_sink_that_hangs_holds_nobody_up(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Not the loop, not its end, and not its memory: what piles up is left out, and that is said once."""
        free = threading.Event()
        monkeypatch.setattr(Recorder, "write", lambda *_: free.wait(20))
        monkeypatch.setattr("verl_profiling.watch.outlet._MOST_PENDING", 10)
        outlet = Outlet(tmp_path, [RECORDER], None)
        begin = time.monotonic()
        with caplog.at_level(logging.WARNING):
            for number in range(50):
                outlet.completed(account(number))
                outlet.step_ended(account(number))
            outlet.close(0.1)
        assert time.monotonic() - begin < 5
        assert "piles up" in caplog.records[0].getMessage()
        assert "do not take the last steps within 0.1 s" in caplog.records[1].getMessage()
        assert len(caplog.records) == 2
        free.set()


class TestSettings:
    """``watch.sinks``."""

    @pytest.mark.parametrize(
        ("name", "problem"),
        [
            ("wandbb", "unknown sink 'wandbb'; did you mean 'wandb'"),
            ("no.such.module:Sink", "cannot be imported"),
            (f"{__name__}:TestSettings", "is no class with the methods write"),
        ],
    )
    def test_what_is_no_sink_is_refused_before_training(self, name: str, problem: str) -> None:
        """With the key and the remedy."""
        with pytest.raises(ConfigError, match=r"watch\.sinks") as raised:
            ProfilingConfig.from_any({"watch": {"sinks": [name]}})
        assert problem in str(raised.value)

    def test_a_run_has_its_log_and_its_sinks(self, tmp_path: Path) -> None:
        """With one line of settings, from a loop that captures nothing."""
        watch = {"enable": True, "sinks": [RECORDER]}
        config = {"enable": True, "save_path": str(tmp_path), "schedule": {"steps": []}, "watch": watch}
        callback = ProfilingCallback(config)
        callback.on_train_begin()
        for step in range(4):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                time.sleep(0.002)
            callback.on_step_end()
        callback.on_train_end()
        assert [step for step, _ in Recorder.written] == [0, 1, 2, 3]
        assert all(
            values["profiling/watch/update_actor/exposed_s"] >= 0.002 for _, values in Recorder.written
        )
        assert {step.step for step in WatchLogReader(tmp_path).read()} == {0, 1, 2, 3}

    def test_off_writes_nothing(self, tmp_path: Path) -> None:
        """Without the watch there is no log."""
        callback = ProfilingCallback({"enable": True, "save_path": str(tmp_path), "schedule": {"steps": [9]}})
        callback.on_train_begin()
        callback.on_step_begin(1)
        callback.on_step_end()
        callback.on_train_end()
        assert not list(tmp_path.rglob(WATCH_LOG))


class TestTensorBoard:
    """A file of events in the run's folder."""

    def test_each_number_is_a_curve(self, tmp_path: Path) -> None:
        """By step, and to be seen while training goes on."""
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sink = TensorBoardSink(tmp_path)
        for number in (3, 4):
            sink.write(number, values_of(account(number)))
        read = EventAccumulator(str(tmp_path)).Reload()
        points = read.Scalars("profiling/watch/rollout/exposed_s")
        assert [(point.step, point.value) for point in points] == [(3, 5.0), (4, 5.0)]
        sink.close()

    def test_a_full_disk_is_an_error_of_the_sink_and_no_traceback_of_tensorboard(
        self, tmp_path: Path, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """It is raised where it is written, so that the sink is switched off and named."""
        pytest.importorskip("tensorboard")
        sink = TensorBoardSink(tmp_path)
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
        try:
            with pytest.raises(OSError, match="File too large"):
                sink.write(3, values_of(account(3)))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert capfd.readouterr().err == ""

    def test_a_leader_in_doubt_is_no_point(self, tmp_path: Path) -> None:
        """No rank of before is repeated, and no number stands for none; the other curves have every step."""
        pytest.importorskip("tensorboard")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        sink = TensorBoardSink(tmp_path)
        for number in range(6):
            sink.write(number, values_of(account(number, doubt="tied" if number in (1, 2) else "")))
        sink.close()
        read = EventAccumulator(str(tmp_path)).Reload()
        leader = read.Scalars("profiling/watch/rollout/leader_rank")
        assert [(point.step, point.value) for point in leader] == [(0, 2.0), (3, 2.0), (4, 2.0), (5, 2.0)]
        for other in ("rollout/imbalance", "rollout/exposed_s", "step_s"):
            assert [point.step for point in read.Scalars(f"profiling/watch/{other}")] == list(range(6))


class TestWithoutARun:
    """W&B and MLflow, where the user has none."""

    @pytest.mark.parametrize(("sink", "module"), [(WandbSink, "wandb"), (MlflowSink, "mlflow")])
    def test_nothing_is_imported_and_no_run_is_made(
        self, monkeypatch: pytest.MonkeyPatch, sink: Callable[[], object], module: str
    ) -> None:
        """Whether the module was imported by somebody or not."""
        monkeypatch.delitem(sys.modules, module, raising=False)
        with pytest.raises(ToolUnavailableError, match="no active run"):
            sink()
        assert module not in sys.modules
        imported = ModuleType(module)
        vars(imported).update(run=None, active_run=lambda: None)
        monkeypatch.setitem(sys.modules, module, imported)
        with pytest.raises(ToolUnavailableError, match="no active run"):
            sink()

    def test_a_row_of_wandb_gets_one_step(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The user's steps do not move; what finds no row waits for the next one."""
        rows: list[tuple[int, float, bool]] = []
        run = SimpleNamespace(
            step=5,
            define_metric=lambda *names, **options: None,
            log=lambda row, commit: rows.append((run.step, row["profiling/watch/step"], commit)),
        )
        monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=run))
        sink = WandbSink()
        sink.write(1, {})
        sink.write(2, {})
        assert rows == [(5, 1, False)]
        run.step = 6
        sink.write(3, {})
        run.step = 7
        sink.close()
        assert rows == [(5, 1, False), (6, 2, False), (7, 3, False)]


def records_of(file: bytes) -> Iterator[bytes]:
    """Yield the records of an offline run: those of a log of LevelDB, after a header of 7 bytes."""
    at, begun = 7, b""
    while at + 7 <= len(file):
        _, size, kind = struct.unpack_from("<IHB", file, at)
        begun += file[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):
            yield begun
            begun = b""
        if 32768 - at % 32768 < 7:
            at += 32768 - at % 32768


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs wandb")
def test_a_real_run_of_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offline: the user's rows keep their numbers, and each has a step of the watch."""
    import wandb
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_SILENT", "true")
    run = wandb.init(project="p", mode="offline", dir=tmp_path)
    outlet = Outlet(tmp_path, ["wandb"], None)
    for number in range(4):
        outlet.completed(account(number, doubt="tied" if number == 2 else ""))
    for number in range(4):
        outlet.step_ended(account(number))
        outlet._work.drain(20)
        run.log({"loss": number / 10})
    outlet.close(20)
    assert run.step == 4
    run.finish()
    wandb.teardown()
    (file,) = tmp_path.rglob("*.wandb")
    rows = []
    for data in records_of(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.HasField("history"):
            items = record.history.item
            rows.append({item.key or "/".join(item.nested_key): float(item.value_json) for item in items})
    assert [(row["loss"], row["profiling/watch/step"]) for row in rows] == [
        (0.0, 0.0),
        (0.1, 1.0),
        (0.2, 2.0),
        (0.3, 3.0),
    ]
    assert all(row["profiling/watch/rollout/exposed_s"] == 5.0 for row in rows)
    leaders = [row.get("profiling/watch/rollout/leader_rank") for row in rows]
    assert leaders == [2.0, 2.0, None, 2.0], "one in doubt is no point of the curve"


@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="needs mlflow")
def test_a_real_run_of_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a local store: the steps are in the user's run, which stays open."""
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    with mlflow.start_run() as run:
        outlet = Outlet(tmp_path, ["mlflow"], None)
        for number in (3, 4):
            doubt: Doubt = "tied" if number == 4 else ""
            spans = [SpanTotal("tool:search", 240, 12_300 * MS)]
            outlet.completed(account(number, {"gen[0]": 10, "rollout": 5000}, doubt=doubt, spans=spans))
        outlet.close(60)
        assert mlflow.active_run() is not None
    client = mlflow.MlflowClient()
    history = client.get_metric_history(run.info.run_id, "profiling/watch/rollout/exposed_s")
    assert [(point.step, point.value) for point in history] == [(3, 5.0), (4, 5.0)]
    assert client.get_metric_history(run.info.run_id, "profiling/watch/gen_0_/exposed_s")
    assert len(client.get_metric_history(run.info.run_id, "profiling/watch/spans/tool_search/total_s")) == 2
    leader = client.get_metric_history(run.info.run_id, "profiling/watch/rollout/leader_rank")
    assert [point.step for point in leader] == [3], "one in doubt is no point of the curve"
