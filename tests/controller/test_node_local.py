"""Hosts with file systems of their own: two nodes of a real Ray cluster, of which one has another mount."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from fleet import TrainWorker
from test_callback import configured, following, run

from verl_profiling.capture.messages import CaptureRequest, StartReply
from verl_profiling.capture.session import Session
from verl_profiling.cli import main
from verl_profiling.run_files import read_manifest

UNSHARE = ["unshare", "-m"] if os.geteuid() == 0 else ["unshare", "-rm"]


class Elsewhere(TrainWorker):
    """A worker that sees another folder under the same path."""

    elsewhere: Path

    def start_capture(self, request: CaptureRequest) -> StartReply:
        """Start, on a file system of its own."""
        folder = str(self.elsewhere / Path(request.folder).name)
        return super().start_capture(msgspec.structs.replace(request, folder=folder))


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_cannot_be_seen_is_named_with_its_host(
    tmp_path: Path, session: Session, capsys: pytest.CaptureFixture[str], shared: bool
) -> None:
    """In the manifest and by check, which exits with 1; of files on a shared file system nothing is said."""
    config, worker = configured(tmp_path, tool="torch"), TrainWorker() if shared else Elsewhere()
    if isinstance(worker, Elsewhere):
        worker.elsewhere = tmp_path / "elsewhere"
    worker.set_up(config)
    run(following(config, worker), lambda step: worker.work())
    folder = tmp_path / "run" / "step_000002"
    found = read_manifest(folder)
    [artifact] = found.workers[0].artifacts
    if shared:
        assert (artifact.where, found.notes, main(["check", str(folder)])) == ("", [], 0)
        return
    host = found.workers[0].identity.host
    assert artifact.status in ("pending", "ok"), "as the reply said, by whether it was compressed already"
    assert artifact.where == f"{host}:{tmp_path}/elsewhere/step_000002/actor_rank0.torch.json.gz"
    assert f"files of {host} are not seen from here" in " ".join(found.notes)
    assert main(["check", str(folder)]) == 1
    assert f"it is at {artifact.where}" in capsys.readouterr().out


CLUSTER = """
import json, os, subprocess, sys, time
from pathlib import Path

import ray
from ray.cluster_utils import Cluster
from fleet import TrainWorker
from verl_profiling import ProfilingCallback, ProfilingConfig

run, unshare = Path(sys.argv[1]), json.loads(sys.argv[2])
environment = {"PYTHONPATH": os.environ["PYTHONPATH"]}
head = {"num_cpus": 1, "resources": {"here": 1}, "include_dashboard": False}
cluster = Cluster(initialize_head=True, head_node_args=head)
start = [sys.executable, "-m", "ray.scripts.scripts", "start", "--address", cluster.address, "--num-cpus=1"]
script = f'mount -t tmpfs none {run.parent} && exec "$@"'
node = subprocess.Popen(
    [*unshare, "sh", "-c", script, "sh", *start, '--resources={"other": 1}', "--block"],
    stdout=subprocess.DEVNULL,
    start_new_session=True,
)
try:
    ray.init(address=cluster.address, log_to_driver=False, runtime_env={"env_vars": environment})
    while sum(node["Alive"] for node in ray.nodes()) < 2:
        time.sleep(0.1)
    config = ProfilingConfig(enable=True, save_path=str(run), schedule={"steps": [2]}, tool="torch")
    actors = [
        ray.remote(num_cpus=0, resources={place: 0.1})(TrainWorker).remote() for place in ("here", "other")
    ]
    ray.get([actor.set_up.remote(config, rank=rank) for rank, actor in enumerate(actors)])
    callback = ProfilingCallback(config)
    callback.add_workers("actor", actors)
    with callback:
        for step in (1, 2, 3):
            callback.on_step_begin(step)
            ray.get([actor.work.remote() for actor in actors])
            callback.on_step_end()

    from verl_profiling.cli import main
    from verl_profiling.run_files import read_manifest

    folder = run / "step_000002"
    artifacts = [worker.artifacts[0] for worker in read_manifest(folder).workers]
    assert artifacts[0].status == "ok", artifacts
    assert artifacts[1].status in ("pending", "ok"), "by whether it was compressed when it replied"
    assert not artifacts[0].where and artifacts[1].where.endswith(":" + str(folder / artifacts[1].path))
    assert not (folder / artifacts[1].path).exists()
    assert main(["check", str(run)]) == 1
    print("named")
finally:
    ray.shutdown()
    os.killpg(node.pid, 9)
    node.wait()
    cluster.shutdown()
"""


def test_the_manifest_names_what_a_node_has_for_itself(tmp_path: Path, run_python: Any) -> None:
    """With its host and path there; ``check`` finds that it is missing."""
    if subprocess.run([*UNSHARE, "mount", "-t", "tmpfs", "none", str(tmp_path)], check=False).returncode:
        pytest.skip("mounting is not permitted here, not even in a namespace")
    (tmp_path / "local").mkdir()
    done = run_python(CLUSTER, tmp_path / "local" / "run", json.dumps(UNSHARE), timeout_s=170)
    assert "named" in done.stdout
