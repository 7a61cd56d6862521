"""Real verl 0.9 with FSDP2 and SGLang on CPU, profiled in both modes."""

from __future__ import annotations

import pytest

from integrations.run_contract import RunContract

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(1200)]


class TestSGLang(RunContract):
    """The contract with SGLang."""

    engine = "sglang"
    iteration = "step["
