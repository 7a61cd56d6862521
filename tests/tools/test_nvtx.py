"""The NVTX ranges of the ``nsys`` tool, as a library sees them that NVTX loads
as it loads a profiler.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import RunPython

SOURCE = Path(__file__).with_name("nvtx_injection.c")

SCRIPT = """
import os, sys
from pathlib import Path
import nvtx
from tests.tools.nsys_stand_in import TOOL
from verl_profiling import stage
from verl_profiling.tools.nsys import nsys_variables
from verl_profiling.testing import record_step

folder, mode = Path(sys.argv[1]), sys.argv[2]
(folder / "nsys").mkdir()
os.environ.update(nsys_variables(folder / "nsys" / "actor", 9))
with stage("before"):
    pass
with record_step({"enable": True, "tool": TOOL, "mode": mode}, folder / "step"):
    with nvtx.annotate("of the user", domain="user"):
        try:
            with stage("update_actor"), stage("forward-compute"):
                raise KeyError("user code")
        except KeyError:
            pass
    with stage("update_critic"):
        pass
    left_open = stage("update_weights")
    left_open.__enter__()
left_open.__exit__(None, None, None)
"""


@pytest.fixture(scope="module")
def injection(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library, built; skips without a C compiler, or without the package that emits ranges."""
    pytest.importorskip("nvtx", reason="nvtx is not installed")
    if shutil.which("cc") is None:
        pytest.skip("there is no C compiler (cc) to build the NVTX library with")
    library = tmp_path_factory.mktemp("nvtx") / "libinjection.so"
    subprocess.run(["cc", "-Wall", "-shared", "-fPIC", "-o", library, SOURCE], check=True)
    return library


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_stages_are_ranges_of_our_domain_and_all_are_closed(
    injection: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    run_python: RunPython,
    mode: str,
) -> None:
    """Also those of stages that raise, and of one that is open at the stop;
    a user's own stay theirs.
    """
    log = tmp_path / "log"
    monkeypatch.setenv("NVTX_INJECTION64_PATH", str(injection))
    monkeypatch.setenv("NVTX_LOG", str(log))
    run_python(SCRIPT, tmp_path, mode)
    seen = [line.split(" ", 3) for line in log.read_text().splitlines()]
    ours = [
        (what, int(number), message)
        for what, domain, number, message in seen
        if domain == "verl_profiling"
    ]
    started = {number: message for what, number, message in ours if what == "start"}
    assert list(started.values()) == [
        "update_actor",
        "forward-compute",
        "update_critic",
        "update_weights",
    ]
    ended = [number for what, number, _ in ours if what == "end"]
    assert sorted(ended) == sorted(started), "every range is closed, once"
    assert ended[:2] == [2, 1], "the inner one first"
    assert [(what, message) for what, domain, _, message in seen if domain == "user"] == [
        ("push", "of the user"),
        ("pop", ""),
    ]
