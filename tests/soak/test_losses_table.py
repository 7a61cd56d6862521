"""Deaths of loops, a long loop, and stores that fail: the table of docs/reliability.md."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.soak.flaky_store import train_on_flaky_store
from tests.soak.test_fault_run import remove_unfinished

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("SOAK_SEED") or random.SystemRandom().randrange(2**31))
STORES = 40


def lines(module: str, *arguments: object) -> list[dict[str, Any]]:
    """Run a program of this folder; return the objects that it printed."""
    done = subprocess.run(
        [sys.executable, "-m", f"tests.soak.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_deaths_long_loops_and_flaky_stores(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No capture that is not whole is called whole, nothing grows, and no store loses a run."""
    deaths = lines("deaths", tmp_path / "deaths", SEED)
    [long] = lines("long_loop", tmp_path / "long", 10_000, 200)
    stores = [
        train_on_flaky_store(tmp_path / f"store{number}", SEED + number) for number in range(STORES)
    ]
    remove_unfinished(tmp_path)
    wrong = sum(death["called_ok_and_is_not"] for death in deaths)
    named = sum(not death["check_ok"] for death in deaths)
    arrived = sum(store["arrived"] for store in stores)
    lost = sum(not store["arrived"] and not store["named"] for store in stores)
    with capsys.disabled():
        print(
            f"\nSOAK_SEED={SEED}\n"
            "| what | cases | outcome | wrong |\n|---|---|---|---|\n"
            f"| a loop dies in ten ways, in seven phases | {len(deaths)} | `check` names "
            f"{named} of them; "
            f"the others lost nothing | {wrong} called whole |\n"
            f"| 10,000 watched steps, 200 captures, `keep_last` 100 | 1 | {long['captured']} "
            "captures, "
            f"{long['seconds']:.0f} s | {max(0, long['threads'])} threads, "
            f"{max(0, long['descriptors'])} descriptors and "
            f"{max(0, long['rss_bytes']) >> 20} MiB more "
            "in the second half |\n"
            f"| stores that refuse, cut, hang up or are down | {STORES} | {arrived} runs "
            "arrived whole; "
            f"the others are named | {lost} lost without a word |"
        )
    assert len(deaths) == 70
    assert wrong == 0, deaths
    assert long["ok"], long
    assert long["captured"] == 100, long
    assert max(long["threads"], long["descriptors"]) <= 0, long
    assert long["rss_bytes"] < 8 << 20, long
    assert lost == 0, stores
