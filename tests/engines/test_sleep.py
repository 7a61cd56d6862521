"""The parts of an engine's sleep and wake, which its own processes mark."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from verl_profiling import ProfilingCallback
from verl_profiling.analysis import open_run
from verl_profiling.workers import RequestLog, RolloutCaptureMixin

ROOT = Path(__file__).parents[2]
ENGINE = """
import time
from verl_profiling.files.engine_marks import EngineMark, write_marks
now = time.time_ns()
marks = [("weights", 50, 0), ("sleep", 100, 0), ("sleep/offload", 70, 1 << 30), ("sleep/gc", 10, 0)]
write_marks(EngineMark(name, now, now + ms * 10**6, size) for name, ms, size in marks)
"""


@pytest.mark.parametrize(
    "engine",
    [pytest.param(name, marks=getattr(pytest.mark, name)) for name in ("vllm", "sglang")],
)
@pytest.mark.timeout(600)
def test_the_dearest_part_of_an_engine_is_named(engine: str) -> None:
    """In all steps, and each part within 2% of a stopwatch."""
    judge = ROOT / "benchmarks" / "sleep_judge.py"
    result = subprocess.run([sys.executable, judge, engine], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_marks_of_other_processes_are_slices_of_the_engine(tmp_path: Path) -> None:
    """Of its sleep in a captured step, with a finding, and spans of the watch; of its start in no
    step.
    """
    config = {"enable": True, "save_path": str(tmp_path), "watch": {"enable": True, "every": 1}}
    server = RolloutCaptureMixin()
    assert server.engine_args(config, engine="sglang") == {}
    server.init_capture(config, requests=RequestLog())
    summaries = []
    with ProfilingCallback({**config, "schedule": {"steps": [2]}}) as callback:
        assert callback.watch is not None
        callback.watch.listeners.append(summaries.append)
        callback.add_rollout([server])
        for step in (1, 2):
            callback.on_step_begin(step)
            subprocess.run([sys.executable, "-c", ENGINE], check=True)
            time.sleep(0.1)  # a mark does not end after the step
            callback.on_step_end()
    [step] = open_run(tmp_path).steps()
    slices = [(span.name, span.depth, span.bytes) for span in step.report().gantt]
    assert slices == [("sleep", 0, 0), ("sleep/offload", 1, 1 << 30), ("sleep/gc", 1, 0)]
    [said] = [one.text for one in step.report().findings if one.rule == "sleep_and_wake"]
    assert "of rollout0 took 100 ms" in said
    assert "most of it sleep/offload: 70.0 ms" in said
    spans = {span.name: round(span.seconds, 3) for span in summaries[0].spans}
    assert spans == {"sleep": 0.1, "sleep/offload": 0.07, "sleep/gc": 0.01}


THREADS = """
import sys, threading
from types import ModuleType
from verl_profiling.files.engine_marks import MarkReader, collect_marks
from verl_profiling.integrations.engine_marks import mark_calls

collect_marks()
asleep, done = threading.Event(), threading.Event()

class Worker:
    def sleep(self):
        asleep.set()
        done.wait(30)

    def load_model(self):
        pass

def hook(module, put_in):
    if module == "vllm.v1.worker.gpu_worker":
        made = ModuleType(module)
        made.Worker = Worker
        put_in(made)

calls = {"load_model": "weights", "sleep": "sleep"}
mark_calls({("vllm.v1.worker.gpu_worker", "Worker"): calls}, hook)
sleeps = threading.Thread(target=Worker().sleep)
sleeps.start()
asleep.wait(30)
Worker().load_model()
done.set()
sleeps.join()
print(*[mark.name for mark in MarkReader().read() if mark.name != "import"])
"""


def test_calls_of_two_threads_are_no_parts_of_each_other() -> None:
    """E.g. two engines in one process, of which one sleeps while the other loads."""
    done = subprocess.run([sys.executable, "-c", THREADS], capture_output=True, text=True)
    assert done.stdout.split() == ["weights", "sleep"], done.stderr
