"""The entry points of the plugin of vLLM and SGLang, without an engine."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

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
