"""``python -m tests.device_report``: what a user with an accelerator sends back."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import device_report
from verl_profiling.capture.session import Session

JUNIT = """<testsuites><testsuite>
<testcase classname="tests.gpu.test_gpu" name="test_kernels"/>
<testcase classname="tests.gpu.test_gpu" name="test_nccl"><skipped message="one device"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_oom"><failure message="no"/></testcase>
<testcase classname="tests.gpu.test_gpu" name="test_setup"><error message="no"/></testcase>
</testsuite></testsuites>"""


def test_without_a_device_the_report_says_so(
    tmp_path: Path, session: Session, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
