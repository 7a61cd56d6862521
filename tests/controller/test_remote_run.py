"""Runs behind a URL: what arrives there, in which order,
and what happens when the store does not work.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import ray
from conftest import Pool
from fleet import TrainWorker
from fsspec.implementations.memory import MemoryFileSystem
from test_watch import after_a_while

from verl_profiling import ConfigError, ProfilingCallback, ProfilingConfig
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.commands.live_run import LiveRun
from verl_profiling.commands.view import Mirror
from verl_profiling.files.run_files import read_manifest, read_run
from verl_profiling.files.watch_log import WatchLogReader
from verl_profiling.manifest import Manifest
from verl_profiling.report.run_page import render_run
from verl_profiling.steps.check import check


class Store(MemoryFileSystem):
    protocol = "faulty"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]
    faults: dict[str, int] = {}
    arrived: list[str] = []
    gate = threading.Event()

    @classmethod
    def fault(cls, kind: str) -> bool:
        """Return whether a fault of a kind is due now."""
        left = cls.faults.get(kind, 0)
        cls.faults[kind] = max(0, left - 1)
        return left > 0

    def put_file(self, lpath: Any, rpath: str, *args: Any, **kwargs: Any) -> None:
        if self.fault("refuse") or (
            rpath.endswith("manifest.json") and self.fault("refuse the manifest")
        ):
            raise PermissionError("the token has expired")
        if self.fault("hang"):
            self.gate.wait(60)
        super().put_file(lpath, rpath, *args, **kwargs)
        if self.fault("cut"):
            path = self._strip_protocol(rpath)
            self.pipe_file(path, self.cat_file(path)[:-1])
        self.arrived.append(rpath.rpartition("faulty:")[2])

    def ls(self, path: str, *args: Any, **kwargs: Any) -> Any:
        if self.fault("down"):
            raise ConnectionError("no route to the store")
        return super().ls(path, *args, **kwargs)


fsspec.register_implementation("faulty", Store, clobber=True)


@pytest.fixture(autouse=True)
def store() -> Iterator[type[Store]]:
    Store.store.clear()
    Store.pseudo_dirs[:] = [""]
    Store.faults.clear()
    Store.arrived.clear()
    Store.gate.clear()
    yield Store
    Store.gate.set()


def settings(tmp_path: Path, url: str = "faulty://bucket/run", **more: Any) -> ProfilingConfig:
    """Return settings that record steps 2 and 4."""
    given = {
        "enable": True,
        "save_path": url,
        "schedule": {"steps": [2, 4]},
        "timeouts": {"finish_s": 20, "start_s": 10},
        "remote": {"staging": str(tmp_path / "staging"), "retry_s": 5},
        **more,
    }
    return ProfilingConfig.from_any(given)


def train(config: ProfilingConfig, workers: list[Any] | None = None) -> None:
    """Run a loop of five steps, with a worker of this process unless there are others."""
    callback = ProfilingCallback(config)
    if workers is None:
        workers = [TrainWorker()]
        workers[0].set_up(config)
    callback.add_workers("actor", workers)
    with callback:
        for step in range(1, 6):
            callback.on_step_begin(step)
            if isinstance(workers[0], TrainWorker):
                workers[0].work()
            else:
                ray.get([worker.work.remote() for worker in workers])
            callback.on_step_end({"reward": 0.5})
            callback.add_metrics(step, {"later": 1.0})


def copied(tmp_path: Path, url: str = "faulty://bucket/run") -> Path:
    fs, path = fsspec.core.url_to_fs(url)
    fs.get(path, str(tmp_path / "copy"), recursive=True)
    return tmp_path / "copy"


def waiting(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "staging").rglob("*") if path.is_file())


def manifest(tmp_path: Path, step: int = 2) -> Manifest:
    return read_manifest(copied(tmp_path) / f"step_{step:06d}")


def test_a_run_behind_a_url_is_whole_there_and_gone_here(tmp_path: Path, session: Session) -> None:
    """Artifacts, results, manifests and run.json;
    each process's result comes after what it names.
    """
    train(settings(tmp_path))
    run = copied(tmp_path)
    assert check(run).ok
    assert read_run(run) is not None
    for step in (2, 4):
        folder = run / f"step_{step:06d}"
        found = read_manifest(folder)
        assert [artifact.status for worker in found.workers for artifact in worker.artifacts] == [
            "ok"
        ]
        assert found.metrics == {"reward": 0.5, "later": 1.0}
        assert {path.name for path in folder.iterdir()} == {
            "manifest.json",
            "actor_rank0.result.json",
            "actor_rank0.torch.json.gz",
        }
        names = [path.rpartition("/")[2] for path in Store.arrived if f"step_{step:06d}" in path]
        assert names.count("actor_rank0.torch.json.gz") == 1
        assert names.index("actor_rank0.torch.json.gz") < names.index("actor_rank0.result.json")
    assert not any((tmp_path / "staging").iterdir())


def test_ray_workers_upload_their_own(tmp_path: Path, pool: Pool) -> None:
    """Each process uploads what it wrote, here to a folder behind file://."""
    url = f"file://{tmp_path}/store/run"
    config = settings(tmp_path, url)
    ray.get([worker.set_up.remote(config, rank=rank) for rank, worker in enumerate(pool.sync)])
    train(config, pool.sync)
    run = tmp_path / "store" / "run"
    assert check(run).ok
    assert len(list((run / "step_000004").glob("actor_rank*.torch.json.gz"))) == 3
    assert waiting(tmp_path) == []


@pytest.mark.parametrize("kind", ["refuse", "cut"])
def test_an_upload_is_tried_again_until_it_is_whole(
    tmp_path: Path, session: Session, kind: str
) -> None:
    """A refused one, and one of which a byte is missing."""
    Store.faults[kind] = 2
    train(settings(tmp_path))
    assert check(copied(tmp_path)).ok
    assert waiting(tmp_path) == []


def test_what_cannot_be_uploaded_stays_and_is_named(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """The loop ends; the log has the command that uploads the rest."""
    Store.faults["refuse"] = 1_000_000
    config = settings(tmp_path, remote={"staging": str(tmp_path / "staging"), "retry_s": 0.1})
    train(config)
    assert waiting(tmp_path).count("manifest.json") == 2
    assert waiting(tmp_path).count("actor_rank0.torch.json.gz") == 2
    assert "the token has expired" in caplog.text
    [staged] = (tmp_path / "staging").iterdir()
    put = (
        f"fs, path = fsspec.url_to_fs('faulty://bucket/run'); fs.put('{staged}/', path, "
        "recursive=True)"
    )
    assert f'python -c "import fsspec; {put}"' in caplog.text
    found = read_manifest(staged / "step_000002").workers[0].artifacts[0]
    assert found.status == "ok"
    assert found.where == f"{os.uname().nodename}:{staged}/step_000002/actor_rank0.torch.json.gz"
    assert "not uploaded: PermissionError" in found.reason
    Store.faults.clear()
    exec(f"import fsspec; {put}")
    assert check(copied(tmp_path)).ok


def test_the_password_of_a_url_is_in_no_file_and_no_log(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither here nor behind the URL, also of an upload that fails; the user name stays."""
    caplog.set_level("INFO")
    url = "faulty://me:s3cret@bucket/run"
    after = {"send": {"command": ["echo", "https://me:s3cret@host/"], "timeout_s": 0.5}}
    train(settings(tmp_path, save_path=url, after=after))
    Store.faults["refuse"] = 1_000_000
    staging = {"staging": str(tmp_path / "staging"), "retry_s": 0.1}
    train(settings(tmp_path, save_path=url, after=after, remote=staging))
    written = [path.read_bytes() for path in (tmp_path / "staging").rglob("*.json")]
    arrived = [file.getvalue() for name, file in Store.store.items() if name.endswith(".json")]
    assert min(len(written), len(arrived)) > 3
    assert any(b"faulty://me:***@bucket/run" in content for content in arrived)
    assert not [content for content in (*written, *arrived) if b"s3cret" in content]
    assert "faulty://me:***@bucket/run" in caplog.text
    assert "s3cret" not in caplog.text


def test_a_store_that_hangs_holds_nobody_up(tmp_path: Path, session: Session) -> None:
    """No hook but the last waits, and that one no longer than it may."""
    Store.faults["hang"] = 1_000_000
    config = settings(tmp_path, timeouts={"finish_s": 0.5, "start_s": 5})
    begin = time.monotonic()
    train(config)
    assert time.monotonic() - begin < 20
    [staged] = (tmp_path / "staging").iterdir()
    deadline = begin + 60
    while read_manifest(staged / "step_000004").workers[0].artifacts[0].status != "ok":
        assert time.monotonic() < deadline, "here it is"
    Store.gate.set()
    session.stop("no such capture", finish_s=20)
    assert session._slot.background.drain(20)


def test_runs_with_one_url_do_not_mix(tmp_path: Path, session: Session) -> None:
    """As with a folder: each goes to one of its own, those of one name, too."""
    config = settings(tmp_path, run_id="grpo", tool="spans")
    train(config)
    session.reset()
    train(settings(tmp_path, tool="spans"))
    run = copied(tmp_path)
    names = [info.run_id for info in map(read_run, (run, run / "run_2")) if info is not None]
    assert names[0] == "grpo" != names[1]
    assert check(run / "run_2").ok
    assert (run / "run_2" / "step_000002" / "actor_rank0.result.json").exists(), (
        "nothing was pending"
    )
    session.reset()
    train(config)
    run = copied(tmp_path / "again")
    assert {path.name for path in (run / "run_3").glob("step_*")} == {"step_000002", "step_000004"}


@pytest.mark.parametrize("times", [1, 2, 1_000])
def test_a_store_that_is_down_at_the_beginning_does_not_lose_the_run(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture, times: int
) -> None:
    """The claim is tried again; only then the run goes to a folder that nobody else can have."""
    Store.faults["down"] = times
    train(settings(tmp_path, timeouts={"finish_s": 20, "start_s": 10 if times < 9 else 1}))
    run = copied(tmp_path)
    if times < 9:
        assert "cannot be claimed now" not in caplog.text
    else:
        assert "cannot be claimed now (ConnectionError: no route to the store)" in caplog.text
        [run] = run.iterdir()
        assert run.name.startswith("run_")
    assert check(run).ok
    assert read_run(run) is not None
    assert waiting(tmp_path) == []


def test_hooks_are_told_the_url_once_all_is_there(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """And their output goes there, too; a manifest that is refused at first is waited for."""
    Store.faults["refuse the manifest"] = 2
    code = """if True:
        import os
        print("shipped", os.environ["VERL_PROFILING_FOLDER"], os.environ["VERL_PROFILING_RUN"])
    """
    hook = {"command": [sys.executable, "-c", code]}
    train(settings(tmp_path, after={"a": hook, "b": {**hook, "roles": ["actor"]}}))
    logs = copied(tmp_path) / "after"
    expected = "shipped faulty://bucket/run/step_000002 faulty://bucket/run\n"
    assert (logs / "step_000002.a.controller_rank0.log").read_text() == expected
    assert (logs / "step_000002.b.actor_rank0.log").read_text() == expected
    assert not any((tmp_path / "staging").iterdir())
    assert "wait in" not in caplog.text


def test_what_never_arrives_holds_no_hook_up_for_ever(
    tmp_path: Path, session: Session, caplog: pytest.LogCaptureFixture
) -> None:
    """Those of later captures neither; and a store that cannot be listed once loses no hook."""
    notes = tmp_path / "notes"
    hook = {"command": ["sh", "-c", f"echo $VERL_PROFILING_STEP >> {notes}"], "timeout_s": 2}
    remote = {"staging": str(tmp_path / "staging"), "retry_s": 0.1}
    config = settings(tmp_path, after={"note": hook}, remote=remote)
    worker = TrainWorker()
    worker.set_up(config)
    callback = ProfilingCallback(config)
    callback.add_workers("actor", [worker])
    with callback:
        for step in range(1, 5):
            callback.on_step_begin(step)
            if step == 2:
                Store.faults |= {"refuse the manifest": 1000, "down": 1}
            callback.on_step_end()
            if step == 2:
                assert after_a_while(lambda: "manifest.json was not uploaded" in caplog.text)
                Store.faults.clear()
        assert after_a_while(lambda: notes.exists() and notes.read_text().split() == ["2", "4"])


def test_no_file_system_for_a_url_is_said_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"save_path: .*nonsense"):
        ProfilingConfig(enable=True, tool="spans", save_path="nonsense://x")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(
        ConfigError, match=r"save_path: s3://b/r .*pip install 'verl-profiling\[remote\]'"
    ):
        ProfilingConfig(enable=True, tool="spans", save_path="s3://b/r")


@pytest.mark.parametrize("command", ["report", "check", "merge", "collect"])
def test_commands_refuse_urls_with_the_remedy(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "s3://bucket/run/step_000002"])
    assert ended.value.code == 2
    assert "is a URL" in capsys.readouterr().err


def test_the_log_of_the_watch_arrives_and_goes_on(
    tmp_path: Path, session: Session, store: type[Store]
) -> None:
    """With a capture and at the end; nothing waits here."""
    store.faults["cut"] = 1
    train(settings(tmp_path, run_id="one", watch={"enable": True}))
    run = copied(tmp_path)
    logged = {step.step: step.captured for step in WatchLogReader(run).read()}
    assert logged == {1: "", 2: "step_000002", 3: "", 4: "step_000004", 5: ""}
    assert waiting(tmp_path) == []


def test_a_hang_and_its_stacks_arrive_while_it_lasts(tmp_path: Path) -> None:
    """On the page of who follows the run from elsewhere; when the step goes on, they go away, and
    the stacks of the ended hang stay.
    """
    watch = {"enable": True, "every": 1, "hang_s": 1.0, "first_hang_s": 1.0}
    config = settings(tmp_path, watch=watch, schedule={"steps": []})
    mirror = Mirror("faulty://bucket/run", tmp_path / "followed")

    def page() -> str:
        mirror.fetch("none")  # at once, whenever it was fetched last
        return render_run(LiveRun(mirror.folder).read(), [])

    with ProfilingCallback(config) as callback:
        for step in (1, 2):
            callback.on_step_begin(step)
            with callback.stage("update_actor"):
                time.sleep(0.05)
                if step == 2:
                    assert after_a_while(
                        lambda: any("hangs/loop.json" in name for name in Store.arrived), 30
                    )
                    assert "test_a_hang_and_its_stacks" in page()
            callback.on_step_end()
        assert after_a_while(
            lambda: any("hangs/step_000002/" in name for name in Store.arrived), 30
        )
        assert after_a_while(lambda: ", ended" in page() and "Now: " not in page(), 30)
    assert not (mirror.folder / "hangs" / "loop.json").exists()
