"""A tool that writes a small trace, and fails where a plan says, by step, lane and stage."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar

from verl_profiling.manifest import Artifact
from verl_profiling.tools import Destination, Output, Recording, Tool
from verl_profiling.tools.torch_profiler import output_of_trace

FAULTY = f"{__name__}:FaultyTool"


@dataclass(frozen=True, kw_only=True)
class FaultyOptions:
    plan: str = ""


class FaultyTool(Tool):
    """Writes a trace of fifty spans, unless its plan says otherwise."""

    name: ClassVar[str] = "faulty"
    suffix: ClassVar[str] = ".faulty.json.gz"
    options_class: ClassVar[type] = FaultyOptions
    options: FaultyOptions

    def start(self, destination: Destination) -> Recording:
        recording = _FaultyRecording(destination, self._fault)
        if self._fault(destination) == "start raises":
            raise RuntimeError("planned: the tool cannot start")
        return recording

    def _fault(self, destination: Destination) -> str:
        if not self.options.plan:
            return ""
        place = "/".join(
            (
                str(destination.metadata["step"]),
                destination.lane,
                *filter(None, [destination.stage]),
            )
        )
        fault: str = json.loads(Path(self.options.plan).read_text()).get(place, "")
        return fault


class _FaultyRecording(Recording):
    def __init__(self, destination: Destination, fault: Callable[[Destination], str]) -> None:
        self._destination = destination
        self._fault = fault

    def stop(self) -> list[Output]:
        fault = self._fault(self._destination)
        while self._fault(self._destination) == "hangs at stop":
            threading.Event().wait(0.02)
        if fault == "stop raises":
            raise RuntimeError("planned: the tool cannot stop")
        if fault == "disk full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._destination.folder))
        final = self._destination.path(FaultyTool.suffix)
        part = final.with_name(f".{final.stem}.part")
        events = [
            {"ph": "X", "name": "op", "ts": n, "dur": 1, "pid": 1, "tid": 1} for n in range(50)
        ]
        text = json.dumps({"traceEvents": events})
        if fault == "killed while writing":
            part.write_text(text[: len(text) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        part.write_text(text)
        output = output_of_trace(part, final, self._destination.artifact(FaultyTool))
        if fault == "finishes late":
            return [Output(output.artifact, partial(self._late, output))]
        return [Output(output.artifact, _raise)] if fault == "export raises" else [output]

    def _late(self, output: Output) -> Artifact:
        while self._fault(self._destination) == "finishes late":
            threading.Event().wait(0.02)
        return output.finish()

    def discard(self) -> None:
        pass


def _raise() -> Artifact:
    raise RuntimeError("planned: the export fails")
