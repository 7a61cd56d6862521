"""Whole runs of real verl on CPU, and what they leave."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil

from verl_profiling.files.run_files import read_manifest
from verl_profiling.files.trajectory_log import LOG_SUFFIX, TrajectoryLog, read_log
from verl_profiling.manifest import CaptureResult, Manifest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "recipes/verl_grpo_cpu/run.sh"
ASSETS = ROOT / "outputs/verl_grpo_cpu/assets"
PLATFORM = "recipes.verl_grpo_cpu.cpu_platform"
PLUGINS = f"{PLATFORM},verl_profiling.integrations.verl"
LIMIT_S = 900
REFERENCE = (
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4",
)


@dataclass(frozen=True)
class Run:
    save_path: Path
    output: str
    code: int

    def manifest(self, step: int) -> Manifest:
        return read_manifest(self.save_path / f"step_{step:06d}")

    def worker(self, step: int, role: str) -> CaptureResult:
        """Return what the only worker of a role recorded."""
        (found,) = [w for w in self.manifest(step).workers if w.identity.role == role]
        return found

    def trajectories(self, step: int, role: str = "agent_loop", rank: int = 0) -> TrajectoryLog:
        """Return what a worker of a role recorded of trajectories."""
        return read_log(self.save_path / f"step_{step:06d}" / f"{role}_rank{rank}{LOG_SUFFIX}")


def search_path(*folders: Path) -> str:
    """Return the PYTHONPATH with these folders in front;
    `make test-verl VERL_SOURCE=DIR` sets it.
    """
    return os.pathsep.join([*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])])


def run_verl(
    folder: Path,
    *overrides: str,
    script: Path = SCRIPT,
    save_path_key: str = "profiling.save_path",
    **environment: str,
) -> Run:
    """Run a recipe for three steps, steps 2 and 3 profiled; leave no process behind."""
    temporary = tempfile.mkdtemp(prefix="verl-")  # short: Ray makes sockets in it
    save_path = folder / "profiling"
    command = [
        str(script),
        "trainer.total_training_steps=3",
        f"{save_path_key}={save_path}",
        f"hydra.run.dir={folder}",
        *overrides,
    ]
    variables = {
        **os.environ,
        "PYTHON": sys.executable,
        "ASSETS": str(ASSETS),
        "RAY_TMPDIR": temporary,
        "PYTHONPATH": search_path(ROOT / "tests"),  # for plugins that a test brings
        **environment,
    }
    log = folder / "output.txt"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=variables, start_new_session=True
        )
        try:
            code = process.wait(LIMIT_S)
        finally:
            _end_session(process.pid)
            process.wait()
            shutil.rmtree(temporary, ignore_errors=True)
    return Run(save_path, log.read_text(errors="replace"), code)


def _end_session(session: int) -> None:
    """Kill the processes that a run left; after a failure that may be all of Ray."""
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session:
                process.send_signal(signal.SIGKILL)
        except (OSError, psutil.Error):
            pass  # it has ended in the meantime
