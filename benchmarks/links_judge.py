"""Holds which link the report calls slow against a limit that ``tc`` puts on one of three.

Run: ``python benchmarks/links_judge.py [--steps N]`` as root, as it makes network namespaces. Three
ranks stand for three hosts, and reduce gradients in pairs over gloo. Every second step, one pair,
drawn anew, gets 100 Mbit/s; in the others, nothing is limited. Only findings are judged. The bytes
of each row are held against the size of the tensors.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

from links_judge_ranks import CALLS, ELEMENTS, RANKS

from verl_profiling.analysis import open_step

PROGRAM = Path(__file__).with_name("links_judge_ranks.py")


def ip(*words: str) -> None:
    """Run a command of iproute2."""
    subprocess.run(["ip", *words], check=True)


@contextmanager
def hosts() -> Iterator[list[str]]:
    """Yield network namespaces, each connected with each other one by a link of its own."""
    names = [f"links{os.getpid()}_{rank}" for rank in range(RANKS)]
    made: list[str] = []
    try:
        for name in names:
            ip("netns", "add", name)
            made.append(name)
            ip("-n", name, "link", "set", "lo", "up")
        for ends in combinations(range(RANKS), 2):
            mine, other = ends
            peer = ["peer", "name", f"to{mine}", "netns", names[other]]
            ip("link", "add", f"to{other}", "netns", names[mine], "type", "veth", *peer)
            for here, there in (ends, ends[::-1]):
                device = f"to{there}"
                ip("-n", names[here], "addr", "add", f"{address(here)}/32", "dev", device)
                ip("-n", names[here], "link", "set", device, "up")
                ip("-n", names[here], "route", "add", f"{address(there)}/32", "dev", device)
        yield names
    finally:
        for name in made:
            ip("netns", "del", name)


def address(rank: int) -> str:
    """Return the address of a rank."""
    return f"10.77.0.{rank + 1}"


def run_loop(folder: Path, seed: int, steps: int) -> dict[int, str]:
    """Run the loop; return the limited pair of each step, empty for none."""
    with hosts() as names:
        processes = []
        for rank, name in enumerate(names):
            where = {"MASTER_ADDR": address(0), "MASTER_PORT": "29500", "RANK": str(rank)}
            where |= {"WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": f"to{(rank + 1) % RANKS}"}
            command = ["ip", "netns", "exec", name, "unshare", "--uts", sys.executable]
            command += [str(PROGRAM), str(folder), str(rank), str(seed), str(steps)]
            processes.append(subprocess.Popen(command, env={**os.environ, **where}))
        codes = [process.wait() for process in processes]
        if any(codes):
            raise SystemExit("a rank failed")
    planted: dict[str, str] = json.loads((folder / "planted0.json").read_text())
    return {int(step): pair for step, pair in planted.items()}


def main() -> None:
    """Run the loop, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    verdicts: dict[str, Counter[str]] = {"one pair": Counter(), "nothing": Counter()}
    with tempfile.TemporaryDirectory() as folder:
        planted = run_loop(Path(folder), options.seed, options.steps)
        for step in range(2, options.steps + 2):
            report = open_step(Path(folder, f"step_{step:06d}")).report()
            links = [found.text for found in report.findings if found.rule == "slow_link"]
            pairs = [row for row in report.links if row.pair]
            known = {row.pair: row.bytes for row in pairs}
            exact = len(known) == RANKS and set(known.values()) == {4.0 * ELEMENTS * CALLS}
            right = [text for text in links if planted[step] and f" {planted[step]} " in text]
            wrong = len(links) - len(right)
            verdict = "wrong" if wrong else "named" if right else "nobody"
            of_plant = verdicts["one pair" if planted[step] else "nothing"]
            of_plant.update([verdict, *["bytes exact"] * exact])
            speeds = {row.pair: round((row.bus_bytes_per_s or 0) / 1e6, 1) for row in pairs}
            print(f"step {step}: limited {planted[step] or 'nothing'}: {verdict}; MB/s {speeds}")
    print("\n| limited | steps | named | another pair | nobody | bytes exact |")
    print("|---|---|---|---|---|---|")
    for plant, seen in verdicts.items():
        steps = seen["named"] + seen["wrong"] + seen["nobody"]
        row = (steps, seen["named"], seen["wrong"], seen["nobody"], seen["bytes exact"])
        print(f"| {plant} | {' | '.join(map(str, row))} |")
    print(f"\nload average {os.getloadavg()[0]:.0f}, {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
