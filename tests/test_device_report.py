"""``python -m tests.device_report``: what a user with an accelerator sends back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from device_report import Costs, Device, DeviceReport, Outcomes, main, read_tests

ROOT = Path(__file__).resolve().parent.parent
JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_gpu" name="test_kernels"/>
<testcase classname="tests.gpu.test_gpu" name="test_nccl"><skipped message="one device"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_oom"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_setup"><error message="no"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def junit(tmp_path: Path) -> Path:
    """A report of one test that passed, one that was skipped and two that did not pass."""
    path = tmp_path / "gpu.xml"
    path.write_text(JUNIT)
    return path


def report_here(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command where no CUDA device is visible."""
    return subprocess.run(
        [sys.executable, "-m", "tests.device_report", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=False,
    )


def test_without_a_device_the_report_says_so(junit: Path) -> None:
    """Exit code 1, one JSON document that has the documented form, and numbers of this machine."""
    done = report_here("--junit", junit, "--json")
    assert done.returncode == 1, done.stderr
    report = msgspec.json.decode(done.stdout, type=DeviceReport)
    assert set(json.loads(done.stdout)) == set(DeviceReport.__struct_fields__)
    assert report.device is None
    assert report.tests == read_tests(junit)
    assert 0 < report.costs.idle_stage_ns < report.costs.recorded_stage_ns
    assert (report.costs.stop_ms is None) == (report.costs.plain_stop_ms is None)
    assert any("no accelerator" in line for line in report.lines())


def test_the_tests_of_the_machine_are_named(junit: Path) -> None:
    """What passed, what failed, an error in a fixture included, and why the rest was skipped."""
    tests = read_tests(junit)
    prefix = "tests.gpu.test_gpu::"
    assert tests.passed == [f"{prefix}test_kernels"]
    assert tests.failed == [f"{prefix}test_oom", f"{prefix}test_setup"]
    assert tests.skipped == {f"{prefix}test_nccl": "one device"}


@pytest.mark.parametrize("content", ["", "<testsuite", "\0", "<testsuite/>", '{"json": 1}'])
def test_a_file_that_is_no_report_of_tests(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and a last line that names the file, before anything is measured."""
    path = tmp_path / "gpu.xml"
    path.write_text(content)
    for file in (path, tmp_path / "none.xml"):
        with pytest.raises(SystemExit) as raised:
            main(["--junit", str(file)])
        assert raised.value.code == 2
        assert file.name in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("device", "failed", "code"), [(None, [], 1), ("cuda", [], 0), ("npu", [], 0), ("cuda", ["test_oom"], 1)]
)
def test_the_exit_code_follows_from_device_and_tests(
    device: Any,
    failed: list[str],
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """0 where there is a device and nothing failed on it; device and failed tests are printed."""
    found = device and Device(kind=device, names=["A device"], memory_bytes=80 << 30, runtime="13.0")
    report = DeviceReport(
        verl_profiling="0.1.0",
        machine=[],
        device=found,
        tests=Outcomes(passed=["test_kernels"], failed=failed, skipped={}),
        costs=Costs(idle_stage_ns=150.0, recorded_stage_ns=2500.0, stop_ms=10.0, plain_stop_ms=60.0),
    )
    monkeypatch.setattr("device_report.device_report", lambda junit: report)
    assert main([]) == code
    printed = capsys.readouterr().out
    assert all(f"FAILED  {name}" in printed for name in failed)
    assert ("A device (80 GiB)" in printed) == (device is not None)


@pytest.mark.parametrize(("target", "marker"), [("test-gpu", "gpu"), ("test-npu-device", "npu_device")])
def test_one_command_runs_the_tests_and_makes_the_report(target: str, marker: str) -> None:
    """It builds an environment of its own, runs the device's tests, and reports on them."""
    done = subprocess.run(
        ["make", "--dry-run", "--always-make", target], cwd=ROOT, capture_output=True, text=True, check=True
    )
    name = target.removeprefix("test-")
    for part in (
        f"-m venv --clear .venv-{name}",
        f".venv-{name}/bin/python -m pytest -m {marker}",
        f"-m tests.device_report --junit outputs/devices/{name}.xml --json",
    ):
        assert part in done.stdout
    assert "torch==" not in done.stdout
    assert "torch-cpu" not in done.stdout
