"""A loop of plain processes: two workers of multiprocessing, and a reward service over HTTP."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import subprocess
import sys
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from typing import Any

from verl_profiling import ProfilingCallback, span, stage
from verl_profiling.workers import CaptureMixin, RewardCaptureMixin, WorkerProcesses, join_callback

WORKERS = 2


def work(settings: dict[str, Any], address: str, rank: int, tasks: Connection) -> None:
    """Train in a process of its own, until the loop ends."""
    worker = CaptureMixin()
    worker.init_capture(settings, role="actor", rank=rank, world_size=WORKERS)
    join_callback(worker, address, rank)
    while (seconds := tasks.recv()) is not None:
        with stage("update_actor"):
            time.sleep(seconds)  # stands for the training
        tasks.send(seconds)


def score(response: str) -> float:
    """Return the reward of a response."""
    with span("score"):
        time.sleep(0.02)  # stands for the scoring
        return float(len(response))


class Scorer(BaseHTTPRequestHandler):
    """Scores the responses that a request holds."""

    def do_POST(self) -> None:
        responses = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with stage("reward"):
            scores = json.dumps([score(response) for response in responses]).encode()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(scores)

    def log_request(self, *_: object) -> None:
        """Log no requests."""


def serve(settings: dict[str, Any], address: str) -> None:
    """Serve rewards in a process of its own, and print the port."""
    service = RewardCaptureMixin()
    service.init_capture(settings)
    join_callback(service, address, rank=0)
    server = HTTPServer(("127.0.0.1", 0), Scorer)
    print(server.server_port, flush=True)
    server.serve_forever()


def train(settings: dict[str, Any], steps: int, slow_from: int) -> None:
    """Run the loop; the last worker becomes slow in step ``slow_from``."""
    actors, rewards = WorkerProcesses(WORKERS), WorkerProcesses(1)
    command = [sys.executable, __file__, json.dumps(settings), "--serve", rewards.address]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert service.stdout is not None
    url = f"http://127.0.0.1:{int(service.stdout.readline())}"

    processes = multiprocessing.get_context("spawn")
    pipes, workers = [], []
    for rank in range(WORKERS):
        pipe, tasks = processes.Pipe()
        arguments = (settings, actors.address, rank, tasks)
        workers.append(processes.Process(target=work, args=arguments, daemon=True))
        workers[-1].start()
        tasks.close()
        pipes.append(pipe)
    try:
        with ProfilingCallback(settings) as profiling:
            profiling.add_workers("actor", actors)
            profiling.add_workers("reward", rewards)
            for step in range(1, steps + 1):
                profiling.on_step_begin(step)
                with profiling.stage("rollout"):
                    time.sleep(0.02)  # stands for the generation
                    responses = ["a response"] * 2
                with (
                    profiling.stage("reward"),
                    urllib.request.urlopen(url, json.dumps(responses).encode()) as reply,
                ):
                    scores = json.loads(reply.read())
                with profiling.stage("update_actor"):
                    for rank, pipe in enumerate(pipes):
                        is_slow = rank == WORKERS - 1 and step >= slow_from
                        pipe.send(0.2 if is_slow else 0.05)
                    for pipe in pipes:
                        pipe.recv()
                profiling.on_step_end({"reward": sum(scores) / len(scores)})
        for pipe, worker in zip(pipes, workers, strict=True):
            pipe.send(None)
            worker.join()
    finally:
        service.terminate()
        service.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("settings", type=json.loads, help="the settings, as JSON")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--slow-from", type=int, default=1_000_000, metavar="STEP")
    parser.add_argument("--serve", metavar="ADDRESS", help="serve rewards instead")
    given = parser.parse_args()
    if given.serve:
        serve(given.settings, given.serve)
    else:
        train(given.settings, given.steps, given.slow_from)
