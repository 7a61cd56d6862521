"""Ranks of one program, forked from a process that has imported torch:
that is most of what a rank takes.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import socket
import sys
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = os.pathsep.join((str(ROOT), str(ROOT / "tests")))
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["torch.distributed", "fleet", "verl_profiling.controller.callback"])


def start_forkserver() -> None:
    """Start the process that ranks are forked from, if there is none yet;
    it finds the tests' modules.
    """
    own, os.environ["PYTHONPATH"] = os.environ.get("PYTHONPATH"), PATHS
    try:
        forkserver.ensure_running()
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ.update({} if own is None else {"PYTHONPATH": own})


def run_ranks(
    program: Path,
    world_size: int,
    arguments: Sequence[str],
    folder: Path,
    *,
    distributed: bool = True,
) -> list[tuple[int | None, str]]:
    """Run a program on some ranks, with an address at which they meet;
    return exit status and log of each.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    start_forkserver()
    processes, logs = [], [folder / f"rank{rank}.log" for rank in range(world_size)]
    for rank, log in enumerate(logs):
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            **(where if distributed else {}),
        }
        given = (str(program), list(arguments), str(folder), environment, str(log))
        processes.append(FORKS.Process(target=_run, args=given))
        processes[-1].start()
    try:
        for process in processes:
            process.join(100)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [
        (process.exitcode, log.read_text()) for process, log in zip(processes, logs, strict=True)
    ]


def _run(
    program: str, arguments: list[str], folder: str, environment: dict[str, str], log: str
) -> None:
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.environ.update(environment)
    os.chdir(folder)
    sys.argv[:] = [program, *arguments]
    runpy.run_path(program, run_name="__main__")
