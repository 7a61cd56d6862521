"""The input of the analysis: what there is of one step, and where its results go."""

from __future__ import annotations

import re
from hashlib import sha256
from pathlib import Path

import msgspec

from verl_profiling.manifest import Manifest
from verl_profiling.timeline.content import Limits
from verl_profiling.timeline.lanes import Source

__all__ = ["TIMELINE_MARK", "TIMELINE_NAME", "StepInputs", "short_label"]

TIMELINE_NAME = "timeline.json.gz"
TIMELINE_MARK = "verlProfilingTimeline"
"""Key at the head of a timeline, by which it is not taken for a trace."""

_LABEL = 80


class StepInputs(msgspec.Struct, kw_only=True):
    """Everything found of one step.

    Attributes:
        directory: Folder that results are written to.
        step: Number of the step, if known.
        manifest: The manifest, where the folder has one.
        capture: The manifest of the whole capture, of which ``manifest`` is one step.
        sources: Trace files, sorted by lane.
        logs: Logs of trajectories, likewise; :func:`~verl_profiling.timeline.trajectory_inputs.read_logs`
            reads them.
        absent: What is missing or cannot be put on a timeline, as sentences.
        limits: How much of each trace is read.
        communication: Regular expressions of kernels that communicate, besides those that are known.
        unfinished: Why the step is not whole, where its capture has begun and was never written.
        name: What plain traces are called beside their step's number.
        label: Part of the names of the results, where others go to the same folder.
    """

    directory: Path
    step: int | None = None
    manifest: Manifest | None = None
    capture: Manifest | None = None
    sources: list[Source] = []
    logs: list[Source] = []
    absent: list[str] = []
    unfinished: str = ""
    limits: Limits = Limits()
    communication: tuple[str, ...] = ()
    name: str = ""
    label: str = ""

    @property
    def title(self) -> str:
        """``step 12``, or the name of the file, the recording or the folder."""
        step = f"step {self.step}" if self.step is not None else ""
        return ", ".join(filter(None, (step, self.name))) or self.directory.resolve().name

    def output(self, name: str, selection: str = "") -> Path:
        """Return where a result of this step goes.

        Args:
            name: Its usual name, e.g. ``timeline.json.gz``.
            selection: What of the step it holds, if that is not all.
        """
        stem, _, suffix = name.partition(".")
        return self.directory / ".".join(filter(None, (stem, self.label, short_label(selection), suffix)))


def short_label(text: str) -> str:
    """Return a text as a part of a file's name, of at most 80 characters; different texts stay different."""
    label = re.sub(r"[^\w.,+-]", "_", text)
    if label == text and len(label) <= _LABEL:
        return label
    return f"{label[: _LABEL - 9]}_{sha256(text.encode('utf-8', 'surrogateescape')).hexdigest()[:8]}"
