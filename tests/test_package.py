"""The package as a whole: what importing it costs, and which room knows of which."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

import verl_profiling

PACKAGE = Path(verl_profiling.__file__).parent
HEAVY = (
    "torch",
    "ray",
    "vllm",
    "sglang",
    "verl",
    "megatron",
    "torch_npu",
    "transformers",
    "omegaconf",
    "hydra",
)

# Rooms from the ground up: a module imports from its own room and from those below it.
FLOORS = (
    ("errors", "clock", "units", "level_shifts"),
    ("typed_values",),
    ("slices",),
    ("capture_request",),
    ("identity",),
    ("manifest",),
    ("files",),
    ("trajectories",),
    ("steps",),
    ("numbers", "timeline"),
    ("predict",),
    ("report",),
    ("tools",),
    ("settings",),
    ("watch",),
    ("capture",),
    ("engines",),
    ("controller",),
    ("workers",),
    ("integrations",),
)
# What both sides of the manifest know: the words, the errors, the manifest itself.
SHARED = (
    *("errors", "clock", "units", "typed_values", "identity", "level_shifts", "slices"),
    *("manifest", "files", "capture_request"),
)
ANALYSIS = ("steps", "numbers", "timeline", "report", "predict", "analysis", "commands", "cli")
# Before a run, or a run themselves: on neither side, and known to their commands alone.
DOCTOR = ("commands.doctor", "commands.plan", "commands.demo", "commands.replay")


def module_of(path: Path) -> str:
    """Return a module's name inside the package, e.g. ``tools.base``;
    the package itself is empty.
    """
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_of(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(path: Path) -> set[str]:
    """Return all that a file imports, anywhere in it, as absolute names."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
    return found


def own_imports(module: str) -> set[str]:
    """Return the modules of the package that a module imports, by their names inside it."""
    names = {name for name in imports(MODULES[module]) if name.startswith("verl_profiling.")}
    inside = {name.removeprefix("verl_profiling.") for name in names}
    return {name for name in inside if name in MODULES}


def is_in(module: str, rooms: tuple[str, ...]) -> bool:
    """Return whether a module is one of these, or in one of these packages."""
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def test_no_module_imports_in_a_circle() -> None:
    """Not even inside functions, so the modules can be read from the ground up."""
    below: dict[str, set[str]] = {module: own_imports(module) - {module} for module in MODULES}
    while free := {module for module, known in below.items() if not known & set(below)}:
        below = {module: known for module, known in below.items() if module not in free}
    assert sorted(below) == []


def test_no_arrow_runs_upwards() -> None:
    heights = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}
    breaches = {
        (module, name)
        for module in MODULES
        for name in own_imports(module)
        if (room := module.partition(".")[0]) in heights
        and (other := name.partition(".")[0]) != room
        and heights.get(other, len(FLOORS)) >= heights[room]
    }
    assert breaches == set()


def test_analysis_knows_nothing_of_capture() -> None:
    """Reading a run needs the manifest, and no tool, session or settings."""
    found = {
        module: sorted(
            name for name in own_imports(module) if not is_in(name, (*SHARED, *ANALYSIS))
        )
        for module in MODULES
        if is_in(module, ANALYSIS) and not is_in(module, DOCTOR)
    }
    assert len(found) > 10
    assert {module: names for module, names in found.items() if names} == {}


def test_capture_knows_nothing_of_analysis() -> None:
    """A training process loads no reader and no report; verl's loggers get theirs in one file."""
    breaches = {
        (module, name)
        for module in MODULES
        if not is_in(module, (*ANALYSIS, *DOCTOR, "integrations"))
        for name in own_imports(module)
        if is_in(name, (*ANALYSIS, *DOCTOR))
    }
    assert breaches == set()


def test_verl_is_imported_by_its_integration_only() -> None:
    """As each engine is by its own adapter, and no framework anywhere at the top of a module."""
    for module, path in MODULES.items():
        for name in imports(path):
            assert name.partition(".")[0] != "verl" or is_in(module, ("integrations",)), (
                module,
                name,
            )


def test_everything_exported_exists() -> None:
    """Names in ``__all__`` are there, and listed before they are used; the list is sorted."""
    assert sorted(verl_profiling.__all__) == verl_profiling.__all__
    assert set(verl_profiling.__all__) <= set(dir(verl_profiling))
    for name in verl_profiling.__all__:
        assert getattr(verl_profiling, name).__doc__, name


def test_importing_imports_no_framework(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """Nor does building the callback, nor the plugin that every Hydra application imports
    when it starts.
    """
    run_python(
        f"""
        import sys
        import verl_profiling.analysis, verl_profiling.cli
        import verl_profiling.testing, verl_profiling.workers
        import verl_profiling.tools.torch_profiler
        from verl_profiling import *
        ProfilingCallback({{"enable": True}})
        heavy = sorted(set({HEAVY}) & set(sys.modules))
        assert not heavy, heavy
        import verl_profiling.integrations.hydra_plugin.verl_profiling_search_path
        heavy = sorted((set({HEAVY}) - {{"hydra", "omegaconf"}}) & set(sys.modules))
        assert not heavy, heavy
        """
    )


def test_the_analysis_imports_nothing_that_records(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """A process that merges one trace of many starts in a tenth of a second."""
    run_python(
        """
        import sys
        import verl_profiling.cli, verl_profiling.report.build, verl_profiling.timeline.merge
        rooms = ("capture", "controller", "tools", "workers", "engines", "settings")
        names = tuple(f"verl_profiling.{room}." for room in rooms)
        assert not [name for name in sys.modules if f"{name}.".startswith(names)]
        """
    )


def test_switched_off_costs_no_import_and_no_thread(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    """``enable: false`` in worker and loop: no framework, no thread, no exit handler, no file."""
    run_python(
        f"""
        import atexit, sys, threading
        from pathlib import Path
        from verl_profiling import ProfilingCallback, stage
        from verl_profiling.capture.session import process_session
        from verl_profiling.workers import CaptureMixin

        handlers = atexit._ncallbacks()
        config = {{"enable": False, "tool": "torch"}}
        worker = CaptureMixin()
        worker.init_capture(config, role="actor")
        callback = ProfilingCallback(config)
        callback.add_workers("actor", worker)
        callback.on_train_begin()
        for step in range(3):
            callback.on_step_begin(step)
            callback.on_rollout_begin()
            callback.on_rollout_end()
            with callback.stage("update_actor"), stage("update_actor"):
                pass
            callback.on_step_end()
        callback.on_train_end()
        assert process_session().sink is None
        assert threading.active_count() == 1
        assert atexit._ncallbacks() == handlers
        assert not list(Path.cwd().iterdir()), list(Path.cwd().iterdir())
        assert not set({HEAVY}) & set(sys.modules)
        """
    )
