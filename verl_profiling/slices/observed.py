"""The observed windows of a lane: the time in which its recordings can show what ran.

Time outside every window is unknown. A lane is neither busy nor idle there, so it has no cause, no
share and no finding. This module has the only rule on windows, for every mode and every source:

* A recording lasts from its begin to its end in the manifest, but no longer than torch's own span,
  the event of category ``Trace``. For example, an engine stops recording by itself after a number
  of iterations.
* A file that is cut off shows nothing after the last work that was read. It shows nothing at all if
  its events are not in order of time, because torch writes one thread after the other.
* Nothing is known of the time between the events on both sides of an unreadable part.
* In plain traces, each window begins with the first work of the lane and ends with the last, as in
  HolisticTraceAnalysis.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from verl_profiling.slices.intervals import Spans, length, spans_of, subtract, within

_FOREVER = 1 << 62
_NOTICEABLE = 0.05  # of a period: a tool's stop at the end of a rollout takes some milliseconds


class Recording(msgspec.Struct, kw_only=True):
    """The time that one trace file covers. All times are unix ns on the controller's clock.

    Attributes:
        limits: Begin and end of the recording in the manifest; 0 if unknown.
        of_torch: First begin and last end of torch's own spans; empty without such spans.
        of_work: First begin and last end of work on the host, then of work on devices; empty
            without work.
        latest: Latest begin of work on the host and on devices; 0 without work.
        step_back: Longest time by which an event begins before one that is earlier in the file
            (ns); 0 if events are in order of time.
        holes: Begin and end of each period whose events could not be read.
        is_cut_off: Whether the file ended before its last event.
    """

    limits: tuple[int, int] = (0, 0)
    of_torch: list[int] = []
    of_work: tuple[list[int], list[int]] = msgspec.field(default_factory=lambda: ([], []))
    latest: list[int] = msgspec.field(default_factory=lambda: [0, 0])
    step_back: int = 0
    holes: list[tuple[int, int]] = []
    is_cut_off: bool = False

    def add_work(self, spans: Spans, *, on_device: bool) -> None:
        """Extend the recording by events of work, which come in the order of the file."""
        if len(spans):
            reach = np.maximum.accumulate(np.maximum(spans[:, 0], self.latest[on_device]))
            self.step_back = max(self.step_back, int((reach - spans[:, 0]).max()))
            self.latest[on_device] = int(reach[-1])
            self.of_work[on_device][:] = extended(self.of_work[on_device], spans)

    def window(self, *, on_device: bool, is_plain: bool) -> tuple[int, int]:
        """Return begin and end of the time in which the file can show what ran.

        Args:
            on_device: Whether the lane is a device's; else it is the host's.
            is_plain: Whether there is no manifest.
        """
        begin_ns, end_ns = self.limits[0], self.limits[1] or _FOREVER
        work = self.of_work[on_device]
        if self.of_torch:
            # Devices may record before torch's span begins, as Meta's MTIA does.
            begin_ns = max(begin_ns, min(self.of_torch + work[:1]))
            end_ns = min(end_ns, self.of_torch[1])
        elif work and is_plain:
            begin_ns, end_ns = work
        if self.is_cut_off:
            in_order = work and self.step_back <= _NOTICEABLE * (work[1] - work[0])
            end_ns = min(end_ns, work[1]) if in_order else begin_ns
        return begin_ns, end_ns


def extended(extent: list[int], spans: Spans) -> list[int]:
    """Return an extent (first begin, last end) after adding spans; empty if both are empty."""
    edges = np.append(np.array(extent, np.int64), spans)
    if not len(edges):
        return []
    return [int(edges.min()), int(edges.max())]


def observed_by(
    recordings: Sequence[Recording], busy: Spans, *, on_device: bool, is_plain: bool
) -> Spans:
    """Return the observed time of a lane.

    Args:
        recordings: The files of the lane.
        busy: Time in which any work of the lane ran.
        on_device: Whether the lane is a device's.
        is_plain: Whether there is no manifest; then each window begins and ends with work.
    """
    windows = spans_of(r.window(on_device=on_device, is_plain=is_plain) for r in recordings)
    if is_plain:
        windows = between_ends(busy, windows)
    holes = [hole for recording in recordings for hole in recording.holes]
    return subtract(windows, spans_of(holes))


def between_ends(work: Spans, windows: Spans) -> Spans:
    """Return the time from the begin of the first work to the end of the last, in each window."""
    parts = (within(work, begin_ns, end_ns) for begin_ns, end_ns in windows.tolist())
    return spans_of((int(part[0, 0]), int(part[-1, 1])) for part in parts if len(part))


def misses(observed: Spans, part: Spans, whole: Spans) -> bool:
    """Return whether more than 5% of ``whole`` is time of ``part`` that was not observed."""
    return length(subtract(part, observed)) > _NOTICEABLE * length(whole)
