"""Files that only other nodes have, read there by real Ray.

Each node is a raylet with its own host name, and its own file system at the folder of the run.
Namespaces of one machine give it both.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
import pytest
from conftest import ROOT
from drawn_logs import add_log
from step_folders import build_step, rewrite_worker

from verl_profiling.cli import main
from verl_profiling.files.run_files import read_manifest, write_result
from verl_profiling.files.trajectory_log import (
    LoopRecord,
    SpanRecord,
    StatusChange,
    TrajectoryLog,
    TrajectoryRecord,
)
from verl_profiling.manifest import Artifact

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.timeout(600)
NODES = ("node1", "node2")
EARLIER = {
    "first": "rollout0_rank0",
    "second": "actor_rank0",
}  # further traces of an actor, their owners
START = """
hostname "$0"
mount --bind "$1" "$2"
exec "$3" -m ray.scripts.scripts start --address "$4" --num-cpus 0 --num-gpus 0 --block
"""
QUIET: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


class Cluster(NamedTuple):
    """A running cluster.

    Attributes:
        disk: Folder of the step's run, which is another file system on each node.
        disks: The file system of each node, as seen from here.
        nodes: The command that runs each node.
    """

    disk: Path
    disks: dict[str, Path]
    nodes: dict[str, subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Three nodes without free CPU: this process is on the first;
    the others have their name and disk.
    """
    if subprocess.run(
        ["unshare", "--uts", "--mount", "true"], capture_output=True, check=False
    ).returncode:
        pytest.skip("namespaces are not allowed")
    ray.shutdown()
    disk = tmp_path_factory.mktemp("run")
    disks = {name: tmp_path_factory.mktemp(name) for name in NODES}
    paths = {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "tests")))}
    # the nodes note their cluster there, as that of this machine, and leave the note, so it is
    # removed at the end; short, as the paths of sockets are
    temporary = tempfile.mkdtemp()
    ray.init(
        "local",
        _temp_dir=temporary,
        num_cpus=0,
        include_dashboard=False,
        log_to_driver=False,
        runtime_env={"env_vars": paths},
        _system_config={"health_check_period_ms": 500},  # so that a dead node is found soon
    )
    address = ray.get_runtime_context().gcs_address
    nodes: dict[str, subprocess.Popen[bytes]] = {}
    while missing := [
        name for name in NODES if name not in alive()
    ]:  # on a busy machine, a raylet gives up
        for name in missing:
            command = ["sh", "-c", START, name, disks[name], disk, sys.executable, address]
            command = ["unshare", "--uts", "--mount", *command]
            nodes[name] = subprocess.Popen(command, env={**os.environ, **paths}, **QUIET)
        until(lambda: all(name in alive() or nodes[name].poll() is not None for name in missing))
    yield Cluster(disk, disks, nodes)
    for node in nodes.values():
        node.terminate()
        node.wait(60)
    ray.shutdown()
    shutil.rmtree(temporary)
    # the note of "this machine's cluster", which every later ray.init("auto") would read
    notes = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray").glob("ray_current_cluster*")
    assert [note for note in notes if address in note.read_text()] == []


def alive() -> set[str]:
    return {node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]}


def until(holds: Callable[[], bool], seconds: float = 90.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, alive()
        time.sleep(0.2)


def build(folder: Path) -> Path:
    """Build a step with five traces, a snapshot and two logs; the second has the status of the
    first.

    The last actor has three traces, of different times.
    """
    step = build_step(folder)
    workers = {worker.name: worker for worker in read_manifest(step).workers}
    [trace] = workers["actor_rank1"].artifacts
    more = [
        msgspec.structs.replace(trace, path=f"actor_rank1.{name}.torch.json.gz") for name in EARLIER
    ]
    for artifact, owner in zip(more, EARLIER.values(), strict=True):
        shutil.copy(step / f"{owner}.torch.json.gz", step / artifact.path)
    rewrite_worker(step, "actor_rank1", artifacts=[trace, *more])
    snapshot = Artifact(
        path="actor_rank0.memory.pickle", lane="actor_rank0", tool="torch_memory", status="ok"
    )
    (step / snapshot.path).write_bytes(b"snapshot")
    rewrite_worker(step, "actor_rank0", artifacts=[*workers["actor_rank0"].artifacts, snapshot])
    begin_ns, ids = read_manifest(step).begin_ns, range(50)
    ends = [(begin_ns + 1_000 * id, begin_ns + 500_000 + 1_000 * id) for id in ids]
    trajectories = [TrajectoryRecord(id, f"g{id}", 0, *ends[id], "done", 0, "", {}) for id in ids]
    spans = [SpanRecord(id, id, -1, "tool:search", *ends[id], 7, 0, False, "", {}) for id in ids]
    lanes = [
        {"lane": f"agent_loop_rank{rank}", "begin_ns": begin_ns, "end_ns": ends[-1][1]}
        for rank in (0, 1)
    ]
    loops = [LoopRecord(0, 7, "loop")]
    add_log(step, TrajectoryLog(**lanes[0], loops=loops, trajectories=trajectories, spans=spans))
    statuses = [StatusChange("g3", None, "filtered", ends[-1][1])]
    add_log(
        step, TrajectoryLog(**lanes[1], loops=loops, spans=spans[:1], statuses=statuses), rank=1
    )
    return step


def moved(step: Path, cluster: Cluster) -> None:
    """Move all but one trace to the other nodes; the manifest says where they are.

    At the path of the trace that stays, the other nodes have one of another run.
    """
    other = next(step.glob("actor_rank0*.json.gz")).read_bytes()
    owners = {"actor_rank0": "node1", "agent_loop_rank0": "node1", "actor_rank1": "node2"}
    owners["agent_loop_rank1"] = "node2"
    for worker in read_manifest(step).workers:
        if node := owners.get(worker.name):
            there = cluster.disks[node] / step.name
            there.mkdir(exist_ok=True)
            artifacts = []
            for artifact in worker.artifacts:
                shutil.move(step / artifact.path, there / artifact.path)
                where = f"{node}:{step / artifact.path}"
                artifacts.append(msgspec.structs.replace(artifact, where=where))
            rewrite_worker(step, worker.name, artifacts=artifacts)
            write_result(
                there, msgspec.structs.replace(worker, capture_id=read_manifest(step).capture_id)
            )
    [rollout] = step.glob("rollout0*.gz")
    for disk in cluster.disks.values():
        (disk / step.name / rollout.name).write_bytes(other)


def outputs(
    step: Path, capsys: pytest.CaptureFixture[str], *options: str
) -> dict[str, tuple[int, bytes]]:
    """Return exit code and result of each command."""
    found = {}
    for command in ("merge", "report", "check", "what-if"):
        flags = [] if command == "merge" else ["--json"]
        code = main([command, str(step), *flags, *options])
        found[command] = code, capsys.readouterr().out.encode()
    found["timeline"] = 0, (step / "timeline.json.gz").read_bytes()
    return found


def test_files_of_other_nodes_give_the_same_results(
    cluster: Cluster, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte for byte those of one machine with all files; without Ray, files are missing."""
    step = build(cluster.disk)
    monkeypatch.chdir(cluster.disk)
    together = outputs(Path(step.name), capsys)
    moved(step, cluster)
    assert outputs(Path(step.name), capsys, "--ray") == together
    assert {code for code, _ in together.values()} == {0}
    assert b"filtered" in together["report"][1]
    assert main(["report", str(step)]) == 1


def test_a_host_opens_only_what_the_run_left_there(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """A manifest may name any file of a host: beside the result of another capture,
    or beside none.
    """
    step = next(cluster.disk.glob("step_*"))
    before = (step / "manifest.json").read_bytes()
    [worker] = [worker for worker in read_manifest(step).workers if worker.name == "actor_rank0"]
    trace = cluster.disks["node1"] / step.name / worker.artifacts[0].path
    other = cluster.disks["node1"] / "step_000099"
    other.mkdir()
    shutil.copy(trace, other)
    write_result(other, msgspec.structs.replace(worker, capture_id="another"))
    names = [
        f"step_000099/{trace.name}",
        f"{step.name}/../step_000099/{trace.name}",
        "gone/" + trace.name,
    ]
    for name in (*(str(cluster.disk / name) for name in names), "/etc/passwd", "/dev/zero", ""):
        artifact = msgspec.structs.replace(worker.artifacts[0], where=f"node1:{name}")
        rewrite_worker(step, worker.name, artifacts=[artifact])
        assert main(["check", str(step), "--ray"]) == 1
        assert "is not opened: no result of actor_rank0 of this capture" in capsys.readouterr().out
    (step / "manifest.json").write_bytes(before)


def test_a_dead_node_costs_its_files_and_is_named(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The results of the other nodes are as without those files."""
    step = next(cluster.disk.glob("step_*"))
    [raylet] = [
        one
        for one in psutil.Process(cluster.nodes["node2"].pid).children()
        if one.name() == "raylet"
    ]
    raylet.kill()
    until(lambda: "node2" not in alive())
    assert main(["report", str(step), "--json", "--ray"]) == 1
    report = msgspec.json.decode(
        capsys.readouterr().out.splitlines()[-1]
    )  # Ray reports the death above
    assert [row["name"] for row in report["workers"]] == ["actor_rank0", "rollout0_rank0"]
    missing = report["coverage"]["missing"]
    assert [
        Path(sentence.partition(":")[0]).name.partition(".torch")[0] for sentence in missing
    ] == [
        "actor_rank1.first",
        "actor_rank1.second",
        "actor_rank1",
        "agent_loop_rank1.trajectories.jsonl.gz",
    ]
    assert all(
        "cannot be read on node2: no node of the Ray cluster has this host name" in one
        for one in missing
    )
    for command in ("merge", "check", "what-if"):
        assert main([command, str(step), "--ray"]) == 1
        said = capsys.readouterr()
        assert "cannot be read on node2" in said.out + said.err


@pytest.mark.parametrize("address", ["nowhere", "127.0.0.1:1"])
def test_an_address_without_a_cluster_is_an_error(
    tmp_path: Path, run_python: Callable[..., Any], address: str
) -> None:
    """One line says so, in a process that no cluster knows."""
    code = "import sys; from verl_profiling.cli import main; sys.exit(main(sys.argv[1:]))"
    done = run_python(code, "report", build_step(tmp_path / "run"), "--ray", address, status=2)
    assert done.stderr.splitlines()[-1].startswith(f"verl-profiling: error: --ray {address}: ")
