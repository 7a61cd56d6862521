"""The memory guard of a torch recording: it ends before its events take more memory
than there is.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from example_loops import settings, spans, train

from verl_profiling import stage
from verl_profiling.capture.session import Session
from verl_profiling.files.machine import available_bytes, own_bytes
from verl_profiling.testing import leaks, record_step
from verl_profiling.tools.torch_profiler import _TorchRecording

pytestmark = pytest.mark.skipif(
    own_bytes() is None, reason="only Linux tells the memory of a process"
)

ONE = torch.ones(1)


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Recordings that need more memory than there is."""
    monkeypatch.setattr(_TorchRecording, "bytes_to_stop", lambda _: 1 << 60)


def work() -> None:
    for _ in range(2_000):
        torch.add(ONE, ONE)


@pytest.mark.parametrize("memory", [False, True])
def test_a_recording_ends_with_the_stage_after_which_it_would_not_fit(
    tmp_path: Path, session: Session, large: None, memory: bool
) -> None:
    """What was recorded is kept, the reason has the numbers, training goes on."""
    config = settings(tools={"torch": {"memory": memory}})
    with record_step(config, tmp_path) as recorded:
        with stage("long"):
            work()
            assert torch.autograd.profiler._is_profiler_enabled
        assert not torch.autograd.profiler._is_profiler_enabled
        with stage("after"):
            train(3)
    result = recorded.result
    [artifact] = result.artifacts
    assert (result.status, artifact.status) == ("truncated", "truncated")
    assert "more memory, and limits.memory_share=0.5 of " in result.reason == artifact.reason
    assert [(span.name, span.failed) for span in result.stages] == [
        ("long", False),
        ("after", False),
    ]
    assert artifact.end_ns <= result.stages[1].begin_ns
    assert len(spans(recorded.path, "aten::add")) == 2_000
    assert spans(recorded.path, "aten::addmm") == []
    assert leaks() == []


def test_a_stage_after_one_that_was_cut_is_recorded(
    tmp_path: Path, session: Session, large: None
) -> None:
    """In discrete mode each stage is a recording of its own: one is cut short,
    the other is whole.
    """
    with record_step(settings(mode="discrete"), tmp_path) as recorded:
        with stage("long"):
            work()
            session.step()
        with stage("short"):
            train()
    result = recorded.result
    assert result.status == "truncated"
    assert {artifact.stage: artifact.status for artifact in result.artifacts} == {
        "long": "truncated",
        "short": "ok",
    }


def test_the_estimate_is_near(run_python: Any, tmp_path: Path) -> None:
    """The memory that the stop takes, estimated by the growth of the process."""
    run_python(
        """
        import sys
        from pathlib import Path
        import torch
        from example_loops import settings
        from verl_profiling.tools import Destination
        from verl_profiling.files.machine import own_bytes

        one = torch.ones(1)
        [tool] = settings(tools={"torch": {"shapes": True}}).for_role("actor").tools
        for times in (10, 20_000):
            recording = tool.start(Destination(folder=Path(sys.argv[1]), lane="a", metadata={}))
            for _ in range(times):
                torch.add(one, one)
            held, expected = own_bytes(), recording.bytes_to_stop()
            outputs = recording.stop()
            taken = own_bytes() - held
            [output.finish() for output in outputs]
        assert 0.4 < expected / taken < 2.5, (expected, taken)
        """,
        tmp_path,
    )


def test_available_memory_is_the_least_that_any_limit_leaves(tmp_path: Path) -> None:
    """Of the machine, and of each cgroup above the process;
    files in memory do not count as used.
    """

    def write(path: str, text: str) -> None:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    assert available_bytes(tmp_path) is None
    write("proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     800 kB\n")
    assert available_bytes(tmp_path) == 800 * 1024
    write("proc/self/cgroup", "0::/pod/box\n")
    write("sys/fs/cgroup/pod/box/memory.max", "max\n")
    write("sys/fs/cgroup/pod/box/memory.current", "100\n")
    assert available_bytes(tmp_path) == 800 * 1024
    write("sys/fs/cgroup/pod/memory.max", "1000\n")
    write("sys/fs/cgroup/pod/memory.current", "700\n")
    write("sys/fs/cgroup/pod/memory.stat", "anon 1\ninactive_file 200\n")
    assert available_bytes(tmp_path) == 500
    write("proc/self/cgroup", "4:cpu,memory:/job\n3:devices:/x\n")
    write("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "400\n")
    write("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "350\n")
    write("sys/fs/cgroup/memory/job/memory.stat", "total_inactive_file 10\n")
    assert available_bytes(tmp_path) == 60
