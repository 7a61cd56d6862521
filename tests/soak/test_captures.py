"""Thousands of captures of one process leave nothing behind: no thread, descriptor, file or memory."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.soak.many_captures import Growth, ManyCaptures

KIB = 1024
COLUMNS = "| captures | how | memory of each | descriptors | threads | temporary files |"
LONG = [pytest.mark.soak, pytest.mark.timeout(3600)]
Record = Callable[[str, object], None]


def hold(grown: Growth, how: str, most_bytes: float, record_property: Record, rays_own: int = 0) -> None:
    """Record what captures added, and check that it is nothing, but for the noise of the allocator."""
    record_property(
        COLUMNS,
        f"| {grown.captures:,} | {how} | {grown.rss_bytes:+,.0f} bytes | {grown.descriptors:+d} | "
        f"{grown.threads:+d} | {grown.temporary_files:+d} |",
    )
    assert grown.temporary_files == 0, grown
    assert max(grown.descriptors, grown.threads) <= rays_own, grown
    assert grown.rss_bytes < most_bytes, grown


@pytest.mark.parametrize(
    ("tool", "mode", "captures", "most_bytes"),
    [
        ("spans", "e2e", 96, 64 * KIB),
        ("spans", "discrete", 96, 64 * KIB),
        *(
            pytest.param(tool, mode, captures, 2 * KIB, marks=LONG)
            for tool, captures in (("spans", 5000), ("torch", 3000))
            for mode in ("e2e", "discrete")
        ),
    ],
)
def test_captures_of_a_process_add_nothing(
    tmp_path: Path, tool: str, mode: str, captures: int, most_bytes: float, record_property: Record
) -> None:
    """In an interpreter of its own, so that nothing else is measured."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.many_captures", tool, mode, str(captures), str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    grown = Growth(**json.loads(done.stdout.splitlines()[-1]))
    hold(grown, f"`{tool}`, {mode}, one process", most_bytes, record_property)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mode", ["e2e", "discrete"])
@pytest.mark.parametrize(("tool", "captures"), [("spans", 5000), ("torch", 2000)])
def test_captures_of_a_ray_actor_add_nothing(
    tmp_path: Path, ray_cluster: None, tool: str, mode: str, captures: int, record_property: Record
) -> None:
    """Ray has a few threads, descriptors and buffers more or less; nothing else is added."""
    import ray

    actor = ray.remote(num_cpus=0)(ManyCaptures).remote()
    try:
        grown = ray.get(actor.growth.remote(tool, mode, captures, tmp_path))
    finally:
        ray.kill(actor)
    hold(grown, f"`{tool}`, {mode}, a Ray actor", 8 * KIB, record_property, rays_own=4)
