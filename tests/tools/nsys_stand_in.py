"""Stand-ins for what Nsight Systems and a GPU do for the ``nsys`` tool; all the rest is real."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from verl_profiling import stage
from verl_profiling.tools.nsys import NsysTool
from verl_profiling.workers import CaptureMixin

TOOL = "tests.tools.nsys_stand_in:StandInNsysTool"

_SCRIPT = """\
#!{python}
import json, os, subprocess, sys, time
arguments = sys.argv[2:]
options = {{}}
while arguments and arguments[0].startswith("-"):
    name = arguments.pop(0)
    if name.startswith("--"):
        name, _, value = name.partition("=")
    else:
        value = arguments.pop(0)
    options[name.lstrip("-")] = value
with open({log!r}, "a") as log:
    log.write(json.dumps(options) + "\\n")
program = subprocess.Popen(arguments)
code = program.wait()
output = options["o"].replace("%p", str(program.pid))
calls = output + ".cuda-calls"
opened = open(calls).read().split().count("start") if os.path.exists(calls) else 0
limit = int(options["capture-range-end"].partition(":")[2])
for number in range(1, min(opened, limit) + 1):
    with open(f"{{output}}.{{number}}.writing", "w") as report:
        report.write("report")
    os.replace(report.name, f"{{output}}.{{number}}.nsys-rep")
sys.exit(code if code >= 0 else 1)
"""


def install(folder: Path, log: Path) -> None:
    script = folder / "nsys"
    script.write_text(_SCRIPT.format(python=sys.executable, log=str(log)))
    script.chmod(script.stat().st_mode | stat.S_IEXEC)


@contextmanager
def found_first(folder: Path) -> Iterator[None]:
    """Have what is started here find the stand-in ``nsys``, and this Python by its bare name."""
    path = os.environ["PATH"]
    os.environ["PATH"] = os.pathsep.join([str(folder), str(Path(sys.executable).parent), path])
    try:
        yield
    finally:
        os.environ["PATH"] = path


@contextmanager
def stand_in_cluster(folder: Path, num_cpus: int) -> Iterator[Path]:
    """Run a real Ray cluster whose nodes find the stand-in ``nsys``;
    yield the file that it logs to.
    """
    import ray

    install(folder, folder / "log")
    ray.shutdown()  # the small cluster that test files share does not find this stand-in
    with found_first(folder):
        try:
            ray.init(
                address="local",
                num_cpus=num_cpus,
                include_dashboard=False,
                log_to_driver=False,
                runtime_env={"env_vars": {"PYTHONPATH": str(Path.cwd())}},
            )
            yield folder / "log"
        finally:
            ray.shutdown()


class StandInNsysTool(NsysTool):
    """The nsys tool, but for the CUDA profiler."""

    def check_device(self) -> None:
        """Need none."""

    def open_range(self) -> None:
        self._note("start")

    def close_range(self) -> None:
        self._note("stop")

    def _note(self, call: str) -> None:
        output = os.environ["VERL_PROFILING_NSYS_OUTPUT"]
        with Path(f"{output}.{os.getpid()}.cuda-calls").open("a") as calls:
            calls.write(call + "\n")


class Worker(CaptureMixin):
    def __init__(self, config: dict[str, Any], rank: int) -> None:
        self.init_capture(config, role="actor", rank=rank)

    def train(self, fail: bool = False) -> int:
        with stage("old_log_prob"):
            pass
        with stage("update_actor"):
            if fail:
                raise ValueError("user code")
        return os.getpid()

    def die(self) -> None:
        os._exit(1)

    def leave(self) -> None:
        """End as an actor does whose work is done."""
        import ray

        ray.actor.exit_actor()
