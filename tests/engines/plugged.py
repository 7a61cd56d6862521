"""Engines that only an environment variable records: a model with letters, and the processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from verl_profiling.files.run_files import read_manifest
from verl_profiling.steps.inputs import is_step

ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["a" * number for number in range(1, 25)]


def need_plugin(group: str) -> None:
    """Skip where the installed package has no entry point for the engine."""
    if not entry_points(group=group, name="verl_profiling"):
        pytest.skip(f"the installed package has no entry point in {group}; install it again")


def with_letters(model: Path, folder: Path) -> Path:
    """Return a copy of a model with a tokenizer of two letters."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Transformers makes a tokenizer of Qwen2 of it, which has a token for each letter.
    words = {"[PAD]": 0, "[BEGIN]": 1, "[END]": 2, "a": 3, "b": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    shutil.copytree(model, folder)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="[END]", pad_token="[PAD]"
    ).save_pretrained(folder)
    return folder


def environment(settings: Path, *paths: Path) -> dict[str, str]:
    """Return the environment of a process whose engines are recorded."""
    known = filter(None, [os.environ.get("PYTHONPATH")])
    path = os.pathsep.join([str(ROOT), *map(str, paths), *known])
    return {**os.environ, "PYTHONPATH": path, "VERL_PROFILING_RUN": str(settings)}


def write_settings(folder: Path, **settings: Any) -> Path:
    """Write a file with settings; return its path."""
    path = folder / "profiling.json"
    path.write_text(json.dumps({"save_path": str(folder / "run"), **settings}))
    return path


def free_port() -> int:
    """Return a port of this host that nothing listens at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@contextmanager
def serving(
    command: list[object], environment: dict[str, str], port: int, log: Path
) -> Iterator[str]:
    """Run a server until the end of the block; yield its URL once it is healthy."""
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as file:
        server = subprocess.Popen(
            [sys.executable, *map(str, command)], env=environment, stdout=file, stderr=file
        )
    try:
        for _ in range(900):
            assert server.poll() is None, log.read_text()[-3000:]
            try:
                urllib.request.urlopen(f"{url}/health", timeout=5).close()
                break
            except OSError:
                time.sleep(1)
        yield url
        server.terminate()
        server.wait(60)
    finally:
        server.kill()


def post(url: str, body: dict[str, Any]) -> Any:
    """Send a request to a server; return its answer."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def step_folders(run: Path) -> list[Path]:
    """Return the step folders of a run, in order."""
    return sorted(path for path in run.iterdir() if is_step(path))


def wait_for_capture(run: Path) -> None:
    """Wait until the last capture of a run is written."""
    deadline_s = time.monotonic() + 60
    while time.monotonic() < deadline_s:
        [worker] = read_manifest(step_folders(run)[-1]).workers
        pending = any(artifact.status == "pending" for artifact in worker.artifacts)
        if worker.requests and not pending:
            return
        time.sleep(0.5)
