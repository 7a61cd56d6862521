"""Thousands of captures of one process leave nothing behind: no thread, descriptor,
file or memory.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.many_captures import growth

KIB = 1024
LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]
MODES = ("e2e", "discrete")


def hold(grown: dict[str, float], most_bytes: float, rays_own: int = 0) -> None:
    """Check that captures added nothing, but for the noise of the allocator."""
    assert grown["files"] == 0, grown
    assert max(grown["descriptors"], grown["threads"]) <= rays_own, grown
    assert grown["rss_bytes"] < most_bytes, grown


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("tool", "captures", "most_bytes"),
    [
        ("spans", 96, 64 * KIB),
        pytest.param("spans", 5000, 2 * KIB, marks=LONG),
        pytest.param("torch", 3000, 2 * KIB, marks=LONG),
    ],
)
def test_captures_of_a_process_add_nothing(
    tmp_path: Path, tool: str, mode: str, captures: int, most_bytes: float
) -> None:
    """In an interpreter of its own, so that nothing else is measured."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.soak.many_captures",
            tool,
            mode,
            str(captures),
            str(tmp_path),
        ],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    hold(json.loads(done.stdout.splitlines()[-1]), most_bytes)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("tool", "captures"), [("spans", 5000), ("torch", 2000)])
def test_captures_of_a_ray_worker_add_nothing(
    tmp_path: Path, ray_cluster: None, tool: str, mode: str, captures: int
) -> None:
    """Ray has a few threads, descriptors and buffers more or less; nothing else is added."""
    import ray

    task = ray.remote(num_cpus=0, max_calls=1)(growth)
    hold(ray.get(task.remote(tool, mode, captures, tmp_path)), 8 * KIB, rays_own=4)
