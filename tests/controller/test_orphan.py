"""A worker whose loop is gone stops recording by itself, and leaves what it has in the step folder."""

from __future__ import annotations

import os
import signal
import textwrap
import time
from pathlib import Path

import pytest
import ray
from conftest import RunPython
from fleet import Loop, TrainWorker
from test_callback import configured

from verl_profiling import ProfilingCallback
from verl_profiling.cli import main
from verl_profiling.report.recovery import recover
from verl_profiling.run_files import read_manifest

ALONE = """
    import multiprocessing, os, signal, sys, time
    from pathlib import Path
    from fleet import Loop, TrainWorker
    from verl_profiling import stage
    from verl_profiling.capture.messages import CaptureRequest
    from verl_profiling.identity import ProcessId

    CONFIG = {"enable": True, "tool": "tools.example_tool:CProfileTool", "save_path": "run"}

    def work(connection, others, request, how):
        others.close()
        worker = TrainWorker()
        worker.init_capture(CONFIG, role="actor")
        worker.start_capture(request)
        connection.send("records")
        if how == "waits":
            connection.recv()
        while worker.capture.sink is not None:
            with stage("update_actor"):
                time.sleep(0.05)

    if __name__ == "__main__":
        how, method = sys.argv[1:]
        folder = Path("run/step_000001").absolute()
        request = CaptureRequest(
            capture_id="1", run_id="1", step=1, folder=str(folder), loop=ProcessId.current()
        )
        context = multiprocessing.get_context(method)
        here, there = context.Pipe()
        child = context.Process(target=work, args=(there, here, request, how))
        child.start()
        there.close()
        here.recv()
        Path("child").write_text(str(child.pid))
        os.kill(os.getpid(), signal.SIGKILL)
"""


RUN = "import os, sys; os.execv(sys.executable, [sys.executable, 'alone.py', *sys.argv[1:]])"


def wait_for(path: Path, seconds: float = 30.0) -> None:
    """Wait until a file is there."""
    deadline = time.monotonic() + seconds
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not come"
        time.sleep(0.02)


@pytest.mark.parametrize(("how", "method"), [("works", "fork"), ("waits", "fork"), ("works", "spawn")])
def test_a_process_outlives_its_loop(tmp_path: Path, run_python: RunPython, how: str, method: str) -> None:
    """At work, it notices at the end of a stage; waiting for its parent, it ends, and writes before."""
    (tmp_path / "alone.py").write_text(textwrap.dedent(ALONE))
    with pytest.raises(AssertionError, match="exit status -9"):
        run_python(
            "import os, sys; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])",
            "alone.py",
            how,
            method,
        )
    folder = tmp_path / "run" / "step_000001"
    wait_for(folder / "actor_rank0.result.json")
    assert [step.artifacts for step in recover(folder)] == [(1, 1)]
    [worker] = read_manifest(folder).workers
    assert (worker.name, worker.status) == ("actor_rank0", "ok")


def test_a_detached_actor_outlives_its_loop(tmp_path: Path, ray_cluster: None) -> None:
    """It is idle then, so its main thread runs nothing but calls: it calls itself."""
    config = configured(tmp_path, tool="torch")
    workers = [
        ray.remote(num_cpus=0)(TrainWorker).options(lifetime="detached", name=f"{tmp_path}{rank}").remote()
        for rank in range(2)
    ]
    try:
        ray.get([worker.set_up.remote(config, "actor", rank) for rank, worker in enumerate(workers)])
        loop = ray.remote(num_cpus=0)(Loop).remote()
        os.kill(ray.get(loop.begin.remote(config, workers)), signal.SIGKILL)
        folder = Path(config.save_path) / "step_000002"
        for rank in range(2):
            wait_for(folder / f"actor_rank{rank}.result.json")
        assert main(["check", str(folder)]) == 1
        assert main(["recover", str(folder)]) == 0
        manifest = read_manifest(folder)
        assert [(worker.name, worker.status) for worker in manifest.workers] == [
            ("actor_rank0", "ok"),
            ("actor_rank1", "ok"),
        ]
        assert all("is gone" in worker.notes[-1] for worker in manifest.workers)
        assert [span.name for span in manifest.workers[0].stages] == ["update_actor"]
        assert main(["merge", str(folder)]) == 0
    finally:
        for worker in workers:
            ray.kill(worker)


def test_an_actor_that_is_terminated_writes_before_it_ends(tmp_path: Path, ray_cluster: None) -> None:
    """Ray runs exit handlers on SIGTERM, as it does when an idle actor is no longer referred to."""
    config = configured(tmp_path, tool="torch")
    worker = ray.remote(num_cpus=0)(TrainWorker).remote()
    pid = ray.get(worker.set_up.remote(config, "actor", 0))
    callback = ProfilingCallback(config)
    callback.add_workers("actor", [worker])
    callback.on_step_begin(2)
    ray.get(worker.work.remote())
    os.kill(pid, signal.SIGTERM)
    folder = Path(config.save_path) / "step_000002"
    wait_for(folder / "actor_rank0.result.json")
    callback.on_step_end()
    callback.on_train_end()
    assert main(["recover", str(folder), "--force"]) == 0
    [written] = read_manifest(folder).workers
    assert [artifact.status for artifact in written.artifacts] == ["ok"]
    assert not (folder / "actor_rank0.result.json").exists()
