"""What several tests share: settings, a request, a little training, and a look into a trace."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from verl_profiling import ProfilingConfig
from verl_profiling.capture.protocol import CaptureStart


def settings(**given: Any) -> ProfilingConfig:
    return ProfilingConfig.from_any({"enable": True, **given})


def request(folder: Path, step: int = 1, **more: Any) -> CaptureStart:
    """Return a request for a capture of a step into a folder."""
    return CaptureStart(
        capture_id=f"run-{step}", run_id="run", step=step, folder=str(folder), **more
    )


def train(times: int = 1) -> float:
    import torch

    model = torch.nn.Linear(8, 8)
    loss = torch.zeros(())
    for _ in range(times):
        loss = model(torch.randn(4, 8)).square().mean()
        loss.backward()
    return loss.item()


def read_trace(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    trace: dict[str, Any] = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
    return trace


def spans(path: Path, name: str | None = None) -> list[dict[str, Any]]:
    """Return the complete events of a trace, or those with that name."""
    return [
        event
        for event in read_trace(path)["traceEvents"]
        if event["ph"] == "X" and name in (None, event["name"])
    ]
