"""The entry points of the plugin of vLLM and SGLang, without an engine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from verl_profiling.analysis import open_step
from verl_profiling.files.watch_log import WatchLogReader

RunPython = Callable[..., subprocess.CompletedProcess[str]]

LOADED = """
from importlib.metadata import EntryPoint
for name in ("in_vllm", "in_sglang"):
    EntryPoint("p", "verl_profiling.integrations.engine_plugin:" + name, "g").load()()
"""


def test_switched_off_it_imports_nothing(run_python: RunPython) -> None:
    """Neither the rest of the package nor a library."""
    run_python(
        f"""
        import sys
        {LOADED.strip().replace(chr(10), chr(10) + " " * 8)}
        names = {{name for name in sys.modules if name.startswith("verl_profiling")}}
        allowed = {{"", ".errors", ".integrations", ".integrations.engine_plugin"}}
        assert names == {{"verl_profiling" + name for name in allowed}}, names
        assert not {{"wrapt", "msgspec", "numpy", "torch"}} & set(sys.modules)
        """
    )


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("watch: {enabled: true}", "watch.enabled: unknown key"),
        ("- 1", "holds no settings"),
        ("save_path: settings.yaml/run", "settings.yaml/run cannot be written"),
        ("{", "flow node"),
    ],
)
def test_wrong_settings_are_one_line(
    content: str, line: str, tmp_path: Path, run_python: RunPython
) -> None:
    """Also a folder that cannot be written; the requests of the engine go on."""
    path = tmp_path / "settings.yaml"
    path.write_text(content)
    run = run_python(
        f"""
        from verl_profiling.integrations.engine_loop import start_recorder
        class Engine:
            def generate(self): ...
        engine = Engine()
        start_recorder({str(path)!r}, engine, ["generate"])
        start_recorder({str(path)!r}, engine, ["generate"])
        assert not vars(engine)
        """
    )
    assert len(run.stderr.strip().splitlines()) == 1
    assert line in run.stderr
    assert "this engine is not recorded" in run.stderr


VERSION = "__version__ = '0.20'"
CONFIG = """
from dataclasses import dataclass

@dataclass
class ProfilerConfig:
    profiler: str = "torch"
    torch_profiler_dir: str = "raw"
    delay_iterations: int = 0
    max_iterations: int = 0
    torch_profiler_with_stack: bool = False
    torch_profiler_record_shapes: bool = False
    torch_profiler_with_memory: bool = False
    torch_profiler_use_gzip: bool = False
    torch_profiler_dump_cuda_time_total: bool = False
    ignore_frontend: bool = True

class Parallel:
    pipeline_parallel_size = tensor_parallel_size = data_parallel_size = 1

class Device:
    device_type = "cpu"

class VllmConfig:
    profiler_config, parallel_config, device_config = ProfilerConfig(), Parallel(), Device()
"""
ENGINE = """
from vllm.config import VllmConfig

class V1:
    vllm_config = VllmConfig()

class LLM:
    llm_engine = V1()
    def generate(self):
        return []
    chat = generate
    def start_profile(self, max_iterations=0): ...
    def stop_profile(self): ...
"""
ENGINE_RUNS_ON = """
import sys
sys.modules[{lacking!r}] = None
from verl_profiling.integrations.engine_plugin import in_vllm
in_vllm()
import vllm.engine.arg_utils, vllm.v1.engine.async_llm
from vllm.entrypoints.llm import LLM
print(LLM().generate(), LLM().generate())
"""


def make_vllm(folder: Path, arguments: str) -> None:
    """Make a package with the modules of vLLM that the plugin changes."""
    modules = {
        "__init__.py": VERSION,
        "config/__init__.py": CONFIG,
        "config/profiler.py": "",
        "engine/arg_utils.py": arguments,
        "v1/engine/async_llm.py": "",
        "entrypoints/llm.py": ENGINE,
    }
    for name, content in modules.items():
        path = folder / "vllm" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("lacking", "arguments", "line"),
    [
        ("", "", "has no attribute 'EngineArgs'"),
        ("", "class EngineArgs: ...", "EngineArgs has no method create_engine_config"),
        ("wrapt", "", "import of wrapt halted"),
        ("verl_profiling.engines.replica", "", "import of verl_profiling.engines.replica halted"),
    ],
)
def test_an_engine_runs_on_without_what_it_or_the_package_lacks(
    lacking: str,
    arguments: str,
    line: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_python: RunPython,
) -> None:
    """An exception would end its import or its requests; each reason is one line."""
    make_vllm(tmp_path, arguments)
    monkeypatch.setenv("VERL_PROFILING_RUN", str(tmp_path / "run"))
    run = run_python(ENGINE_RUNS_ON.format(lacking=lacking))
    assert run.stdout == "[] []\n"
    assert run.stderr.count(line) == 1
    assert "Traceback" not in run.stderr


ARGUMENTS = """
from dataclasses import dataclass
from typing import Any

@dataclass
class EngineArgs:
    profiler_config: Any = None
    def create_engine_config(self):
        return self.profiler_config
"""
CHOOSING = """
from verl_profiling.integrations.engine_plugin import in_vllm
in_vllm()
from vllm.config import ProfilerConfig
from vllm.engine.arg_utils import EngineArgs
for chosen in ({"profiler": "cuda"}, ProfilerConfig("cuda")):
    assert EngineArgs(chosen).create_engine_config() is chosen
for chosen in (None, {}, ProfilerConfig(None)):
    assert EngineArgs(chosen).create_engine_config().profiler == "torch"
"""


def test_a_profiler_that_the_user_has_chosen_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    make_vllm(tmp_path, ARGUMENTS)
    monkeypatch.setenv("VERL_PROFILING_RUN", "run")
    assert not run_python(CHOOSING).stderr


SGLANG = {
    "managers/tokenizer_manager.py": """
class Arguments:
    tokenizer_worker_num = 1
    nnodes = dp_size = 1
    node_rank = 0

class TokenizerManager:
    server_args = Arguments()
    async def generate_request(self, prompt):
        yield "a response"
""",
    "entrypoints/engine.py": """
import asyncio
from sglang.srt.managers.tokenizer_manager import TokenizerManager

class Engine:
    def __init__(self):
        self.tokenizer_manager = TokenizerManager()
    async def respond(self, prompt):
        return [response async for response in self.tokenizer_manager.generate_request(prompt)]
    def generate(self, prompt):
        return asyncio.run(self.respond(prompt))
""",
}
GENERATING = """
from verl_profiling.integrations.engine_plugin import in_sglang
in_sglang()
from sglang.srt.entrypoints.engine import Engine
engine = Engine()
engine.tokenizer_manager.server_args.tokenizer_worker_num = {workers}
print(engine.generate(1), engine.generate(2))
"""


@pytest.mark.parametrize(
    ("enable", "workers", "reason"),
    [
        (False, 1, "switched off for role rollout"),
        (True, 2, "several tokenizer workers divide the requests"),
    ],
)
def test_an_engine_of_sglang_is_tried_once(
    enable: bool,
    workers: int,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_python: RunPython,
) -> None:
    """Its requests come to the plugin by the engine and by the tokenizer manager."""
    for name, content in SGLANG.items():
        path = tmp_path / "sglang" / "srt" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    settings = {"save_path": "run", "roles": {"rollout": {"enable": enable}}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setenv("VERL_PROFILING_RUN", "settings.json")
    run = run_python(GENERATING.format(workers=workers))
    assert run.stdout == "['a response'] ['a response']\n"
    [line] = run.stderr.splitlines()
    assert reason in line


DELETING = """
import gc, weakref
from verl_profiling.integrations.engine_plugin import in_vllm
in_vllm()
from vllm.entrypoints.llm import LLM
llm = LLM()
llm.generate()
engine = weakref.ref(llm)
del llm
gc.collect()
assert engine() is None, gc.get_referrers(engine())
"""


@pytest.mark.parametrize("tool", ["torch", "spans"])
def test_an_engine_that_the_program_deletes_is_freed(
    tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    """Else its processes would keep the devices that the program's next engine needs."""
    make_vllm(tmp_path, "class EngineArgs: ...")
    settings = {"save_path": "run", "tool": tool, "schedule": {"steps": [1]}}
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "watch": {"enable": True}}))
    monkeypatch.setenv("VERL_PROFILING_RUN", "settings.json")
    run_python(DELETING)
    manifest = json.loads((tmp_path / "run" / "step_000001" / "manifest.json").read_text())
    [worker] = manifest["workers"]
    assert worker["tools"] == [tool]


TAKING_OVER = """
from verl_profiling.integrations.engine_plugin import in_vllm
in_vllm()
from vllm.entrypoints.llm import LLM
from verl_profiling import ProfilingCallback
from verl_profiling.workers import VLLMCaptureMixin

config = {"enable": True, "save_path": "loop", "tool": "spans", "schedule": {"steps": [2]}}

class Server(VLLMCaptureMixin):
    def __init__(self):
        self.engine = LLM()
        self.engine.generate()
        self.init_capture(config)
        self.init_capture(config)

server = Server()
with ProfilingCallback(config) as profiling:
    profiling.add_rollout(server)
    profiling.on_step_begin(2)
    server.engine.generate()
    profiling.on_step_end()
"""


def test_a_mixin_takes_an_engine_over_from_the_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    """Each request is recorded once, also where a mixin is set up after the first one, or twice."""
    make_vllm(tmp_path, "class EngineArgs: ...")
    settings = {"save_path": "run", "tool": "spans", "schedule": {"every": 1}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    monkeypatch.setenv("VERL_PROFILING_RUN", "settings.json")
    run_python(TAKING_OVER)
    for run, step in {"run": "step_000001", "loop": "step_000002"}.items():
        [folder] = (tmp_path / run).glob("step_*")
        assert folder.name == step
        [worker] = json.loads((folder / "manifest.json").read_text())["workers"]
        assert len(worker["requests"]) == 1


STARLETTE = """
import time
from verl_profiling.workers import RequestLog

log = RequestLog()

class Starlette:
    async def __call__(self, scope, receive, send):
        read_ns = time.time_ns()
        for is_first in (scope["type"] == "http", False):
            with log.open() as request:
                assert (request.begin_ns <= read_ns) is is_first
                time.sleep(0.001)
"""
SERVING = """
import asyncio
from verl_profiling.integrations.engine_plugin import in_sglang
in_sglang()
from starlette.applications import Starlette, log
for kind in ("lifespan", "http", "http"):
    asyncio.run(Starlette()({"type": kind}, None, None))
assert log.begun == 6
"""


def test_a_request_begins_with_its_http_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_python: RunPython
) -> None:
    """A server reads, checks and tokenizes it before the engine has it; a second request of a
    server's own, e.g. after a tool, begins later. So do those of tasks that start with the server.
    """
    (tmp_path / "starlette").mkdir()
    (tmp_path / "starlette" / "__init__.py").write_text("")
    (tmp_path / "starlette" / "applications.py").write_text(STARLETTE)
    monkeypatch.setenv("VERL_PROFILING_RUN", "run")
    run_python(SERVING)


RECORDED = """
import asyncio, json, sys, time
from pathlib import Path
from verl_profiling.cli import main
from verl_profiling.engines.replica import SessionRecorder, make_replica
from verl_profiling.integrations import engine_loop
from verl_profiling.workers import RequestLog

def with_requests(config, engine, **options):
    return make_replica(config, requests=engine.requests, **options)

engine_loop.make_replica = with_requests

class Engine:
    def __init__(self):
        self.requests = RequestLog()
    def generate(self):
        return "a response"
"""
REFUSING = """
async def start_capture(self, request):
    raise RuntimeError("the engine's profiler is on already")

SessionRecorder.start_capture = start_capture
engine = Engine()
engine_loop.start_recorder("settings.json", engine, ["generate"])
assert engine.generate() == "a response"
"""


def test_strict_settings_of_a_training_loop_fail_no_request(
    tmp_path: Path, run_python: RunPython
) -> None:
    """No loop is there that could be ended."""
    settings = {"save_path": "run", "strict": True, "tool": "spans", "schedule": {"steps": [1]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_python(RECORDED + REFUSING)
    manifest = json.loads((tmp_path / "run" / "step_000001" / "manifest.json").read_text())
    assert "profiler is on already" in json.dumps(manifest["workers"])


RAISING = """
class Failing(Engine):
    def generate(self):
        raise ValueError("a bad prompt")

engine = Failing()
engine_loop.start_recorder("settings.json", engine, ["generate"])
for _ in range(2):
    try:
        engine.generate()
    except ValueError as error:
        assert str(error) == "a bad prompt"
"""


def test_a_batch_that_raises_is_no_complete_step(tmp_path: Path, run_python: RunPython) -> None:
    """The next one is a step of its own."""
    settings = {"save_path": "run", "tool": "spans", "schedule": {"steps": [1, 2]}}
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "watch": {"enable": True}}))
    run = run_python(RECORDED + RAISING)
    for step in ("step_000001", "step_000002"):
        manifest = json.loads((tmp_path / "run" / step / "manifest.json").read_text())
        assert not manifest["complete"]
        assert any("a bad prompt" in note for note in manifest["notes"])
    assert "on_step" not in run.stderr


SHORT = """
async def serve():
    engine = Engine()
    engine_loop.start_recorder("run", engine)
    assert main(["trigger", "run"]) == 0
    while not (folders := list(Path("run").glob("step_*/manifest.json"))):
        await asyncio.sleep(0.1)
    with engine.requests.open(id="short") as request:
        request.response_tokens = 1
    begin_s = time.monotonic()
    while not json.loads(folders[0].read_text())["complete"]:
        await asyncio.sleep(0.1)
        assert time.monotonic() < begin_s + 15, "the step does not end"
    [worker] = json.loads(folders[0].read_text())["workers"]
    assert [request["id"] for request in worker["requests"]] == ["short"]

asyncio.run(asyncio.wait_for(serve(), 60))
"""


def test_a_short_request_ends_the_step_of_a_capture(run_python: RunPython) -> None:
    """It comes and goes between two looks at the engine."""
    run_python(RECORDED + SHORT)


PAUSES = """
async def serve():
    engine = Engine()
    engine_loop.start_recorder("run", engine)
    assert main(["trigger", "run"]) == 0
    while not (folders := list(Path("run").glob("step_*/manifest.json"))):
        await asyncio.sleep(0.1)
    for number in range(2):
        await asyncio.sleep(0.6)
        with engine.requests.open() as request:
            request.response_tokens = 4
            await asyncio.sleep(0.4)
    while not json.loads(folders[0].read_text())["complete"]:
        await asyncio.sleep(0.1)

asyncio.run(asyncio.wait_for(serve(), 60))
"""


def test_time_without_a_request_is_no_rollout(tmp_path: Path, run_python: RunPython) -> None:
    """The step lasts from first to last request; half of the rollout keeps the pause."""
    run_python(RECORDED + PAUSES)
    [folder] = (tmp_path / "run").glob("step_*")
    step = open_step(folder)
    report = step.report(keep_graph=True)
    assert 1_300_000 < report.span_us < 1_900_000
    pause_us = {row.kind: row.duration_us for row in report.critical_path if "wait" in row.stage}
    assert list(pause_us) == ["wait"]
    assert pause_us["wait"] > 500_000
    requests_us = sum(row.duration_us for row in report.critical_path if row.kind == "generate")
    half = step.what_if(scale={"rollout": 0.5})
    assert report.span_us - half.predicted_us == pytest.approx(requests_us / 2, abs=20_000)
    [summary] = WatchLogReader(tmp_path / "run").read()
    assert summary.end_ns - summary.begin_ns == pytest.approx(report.span_us * 1000, abs=1e7)


CUT = """
async def serve():
    engine = Engine()
    engine_loop.start_recorder("settings.json", engine)
    engine.requests.open()
    while not list(Path("run").glob("step_*/manifest.json")):
        await asyncio.sleep(0.1)

asyncio.run(asyncio.wait_for(serve(), 60))
"""


def test_the_end_of_the_process_ends_the_step(tmp_path: Path, run_python: RunPython) -> None:
    """What hooks a user has not called is not said, as there is no loop that calls any."""
    settings = {"save_path": "run", "tool": "spans", "schedule": {"steps": [1]}}
    (tmp_path / "settings.json").write_text(json.dumps({**settings, "watch": {"enable": True}}))
    run = run_python(RECORDED + CUT)
    assert "on_step" not in run.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["end_ns"]


IN_A_COROUTINE = """
async def run_cell():
    engine = Engine()
    engine_loop.start_recorder("settings.json", engine, ["generate"])
    task = asyncio.current_task()
    assert engine.generate() == "a response"
    assert asyncio.current_task() is task
    await asyncio.sleep(0)

asyncio.run(run_cell())
"""


def test_a_batch_in_a_notebook_is_captured(tmp_path: Path, run_python: RunPython) -> None:
    """Its event loop waits for the batch, so no coroutine can run on it meanwhile."""
    settings = {"save_path": "run", "tool": "spans", "schedule": {"steps": [1]}}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_python(RECORDED + IN_A_COROUTINE)
    manifest = json.loads((tmp_path / "run" / "step_000001" / "manifest.json").read_text())
    assert [worker["status"] for worker in manifest["workers"]] == ["ok"]


HANGING = """
import logging

told = asyncio.Event()

def tell(line):
    if "hangs: in rollout nothing has progressed" in line.getMessage():
        told.set()
    return True

logging.getLogger("verl_profiling.controller.hang_watch").addFilter(tell)

async def serve():
    idle, hanging = Engine(), Engine()
    for engine in (idle, hanging):
        engine_loop.start_recorder("settings.json", engine)
    with idle.requests.open():
        await asyncio.sleep(0.3)
    with hanging.requests.open():
        while not told.is_set():
            await asyncio.sleep(0.1)

asyncio.run(asyncio.wait_for(serve(), 20))
"""


def test_an_idle_engine_hides_no_hang_of_another_one_in_its_process(
    tmp_path: Path, run_python: RunPython
) -> None:
    watch = {"enable": True, "hang_s": 1, "first_hang_s": 1}
    settings = {"save_path": "run", "tool": "spans", "schedule": {"steps": []}, "watch": watch}
    (tmp_path / "settings.json").write_text(json.dumps(settings))
    run_python(RECORDED + HANGING)
