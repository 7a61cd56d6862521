"""The script that a change must pass: what it runs, in which order, and what it says of a failure."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / ".ci" / "run"
SHELL_SCRIPTS = [SCRIPT, *sorted((ROOT / "recipes").rglob("*.sh"))]
BEFORE_TESTS = ["lint", "repository", "docs", "browser"]
SUITES = ["test", "test-hta", "test-sglang", "test-megatron", "test-npu", "test-package", "test-releases"]
TARGETS = BEFORE_TESTS + SUITES
