"""The ``spans`` tool: stages without any profiler."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from example_loops import settings, train

from verl_profiling import stage
from verl_profiling.testing import record_step


@pytest.mark.parametrize("mode", ["e2e", "discrete"])
def test_it_writes_no_artifact_and_switches_nothing_on(tmp_path: Path, mode: str) -> None:
    """The spans in the result are the whole recording, in both modes."""
    with (
        record_step(settings(tool="spans", mode=mode), tmp_path) as recorded,
        stage("update_actor"),
    ):
        assert not torch.autograd.profiler._is_profiler_enabled
        train()
    assert (recorded.result.status, recorded.result.artifacts) == ("ok", [])
    assert [span.name for span in recorded.result.stages] == ["update_actor"]
    assert [path.name for path in tmp_path.iterdir()] == ["actor_rank0.result.json"]
