"""What was verified where: the README's table, and what a user with an accelerator sends back."""

from __future__ import annotations

import ast
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import device_report
from tests.verified_tools import CELLS, outcomes, table
from verl_profiling.capture.session import Session

ROOT = Path(__file__).resolve().parent.parent


def test_the_table_in_the_readme_is_the_current_one() -> None:
    """A cell that is added, or verified in another way, has to be changed there too."""
    assert table() in (ROOT / "README.md").read_text()


def test_every_test_that_a_cell_names_exists() -> None:
    for test in filter(None, (test for _, *tests in CELLS.values() for test in tests)):
        place, _, name = test.partition("::")
        parts = [part for part in place.split(".") if not part.startswith("Test")]
        module = ROOT.joinpath(*parts).with_suffix(".py")
        sources = [module, *module.parent.glob("contract.py")]  # engines inherit theirs from there
        trees = [ast.parse(source.read_text()) for source in sources]
        names = {getattr(node, "name", "") for tree in trees for node in ast.walk(tree)}
        assert {name.partition("[")[0], *place.split(".")[len(parts) :]} <= names, test


def test_a_test_that_failed_shows(tmp_path: Path) -> None:
    """A failure is not covered up by another suite that passed, and a skipped test did not run."""
    _, test, _ = next(cell for (tool, _), cell in CELLS.items() if tool == "nsys")
    place, _, name = test.partition("::")
    paths = []
    for inside in ("<failure/>", "", "<skipped/>"):
        paths.append(tmp_path / f"{len(paths)}.xml")
        case = f'<testcase classname="{place}" name="{name}">{inside}</testcase>'
        paths[-1].write_text(f"<testsuite>{case}</testsuite>")
    assert "FAILED" in table(outcomes(paths))
    assert outcomes(paths[2:]) == {}


JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_gpu" name="test_kernels"/>
<testcase classname="tests.gpu.test_gpu" name="test_nccl"><skipped message="one device"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_oom"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_setup"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_without_a_device_the_report_says_so(
    tmp_path: Path,
    session: Session,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Exit code 1, one JSON document with the results of the tests and numbers of this machine."""
    junit = tmp_path / "gpu.xml"
    junit.write_text(JUNIT)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(device_report, "_PRODUCTS", 200)
    assert device_report.main(["--junit", str(junit)]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["device"] is None
    prefix = "tests.gpu.test_gpu::"
    assert report["tests"] == {
        "passed": [f"{prefix}test_kernels"],
        "failed": [f"{prefix}test_oom", f"{prefix}test_setup"],
        "skipped": {f"{prefix}test_nccl": "one device"},
    }
    assert find_spec("torch") is None or report["costs"]["stop_ms"] > 0
