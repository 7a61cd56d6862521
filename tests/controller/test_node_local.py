"""Hosts with file systems of their own: a worker writes where the loop cannot see it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from fleet import TrainWorker
from test_callback import configured, following, run

from verl_profiling import trajectory
from verl_profiling.capture.protocol import CaptureStart, StartReply
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest


class Elsewhere(TrainWorker):
    """A worker that sees another folder under the same path."""

    elsewhere: Path

    def start_capture(self, request: CaptureStart) -> StartReply:
        folder = str(self.elsewhere / Path(request.folder).name)
        return super().start_capture(msgspec.structs.replace(request, folder=folder))


def test_a_file_that_cannot_be_seen_is_named_with_its_host(
    tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the manifest and by check, which exits with 1."""
    config, worker = configured(tmp_path, tool="torch"), Elsewhere()
    worker.elsewhere = tmp_path / "elsewhere"
    worker.set_up(config)
    run(following(config, worker), lambda step: worker.work())
    folder = tmp_path / "run" / "step_000002"
    found = read_manifest(folder)
    [artifact] = found.workers[0].artifacts
    host = found.workers[0].identity.host
    assert artifact.status in ("pending", "ok"), (
        "as the reply said, by whether it was compressed already"
    )
    assert artifact.where == f"{host}:{tmp_path}/elsewhere/step_000002/actor_rank0.torch.json.gz"
    assert f"files of {host} are not visible on this host" in " ".join(found.notes)
    assert main(["check", str(folder)]) == 1
    assert f"the file is at {artifact.where}" in capsys.readouterr().out


def test_a_log_that_is_still_written_is_not_on_another_disk(
    tmp_path: Path, session: Session
) -> None:
    """Trajectories are written in the background, after the stop;
    the process's result is there before.
    """
    config, worker = (
        configured(tmp_path, tool=["torch", "trajectories"], schedule={"every": 1}),
        TrainWorker(),
    )
    worker.set_up(config)

    async def work() -> None:
        async with trajectory(group="a"):
            worker.work()

    run(following(config, worker), lambda step: asyncio.run(work()), steps=8)
    found = [read_manifest(folder) for folder in sorted((tmp_path / "run").glob("step_*"))]
    assert [(one.notes, len(one.workers[0].artifacts)) for one in found] == [([], 2)] * 8
