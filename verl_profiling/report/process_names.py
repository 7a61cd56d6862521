"""The names that a trace gives its processes and threads, and which of its processes is a device."""

from __future__ import annotations

import re

from verl_profiling.timeline.event import Event

__all__ = ["ProcessNames", "is_device", "of_a_stream"]

_LONGEST = 200  # characters of a name
_LONGEST_DEVICE = 40
_OF_A_STREAM = re.compile(rb'"(?:device|stream)"\s*:\s*"?\d')


class ProcessNames:
    """Names of processes and threads; the first one counts, because some writers repeat it per event.

    Attributes:
        full: Whether there are more names than are kept.
    """

    def __init__(self, most_names: int) -> None:
        self.full = False
        self._most = most_names
        self._names: dict[tuple[str, object, object], str] = {}

    def add(self, event: Event) -> None:
        """Add what a metadata event says."""
        what = event.name
        if what not in ("process_name", "process_labels", "thread_name"):
            return
        key = (what, event.pid, event.tid if what == "thread_name" else None)
        if key in self._names:
            return
        if len(self._names) >= self._most:
            self.full = True
            return
        self._names[key] = event.said("labels" if what == "process_labels" else "name")[:_LONGEST]

    def name(self, pid: object) -> str:
        """Return the name of a process."""
        return self._names.get(("process_name", pid, None), "")

    def thread(self, pid: object, tid: object) -> str:
        """Return the name of a thread."""
        return self._names.get(("thread_name", pid, tid), "")

    def label(self, pid: object) -> str:
        """Return the label of a process: ``CPU``, or the device that it stands for."""
        return self._names.get(("process_labels", pid, None), "")

    def has_device(self) -> bool:
        """Return whether some process is labelled as a device."""
        labels = (label for (what, _, _), label in self._names.items() if what == "process_labels")
        return any(map(is_device, labels))

    def device(self, pid: object) -> str:
        """Return the name of the device that a process stands for: its label, or its number."""
        label = self.label(pid)
        if is_device(label):
            return label[:_LONGEST_DEVICE]
        return f"GPU {pid}" if isinstance(pid, int) else str(pid or "device")[:_LONGEST_DEVICE]


def is_device(label: str) -> bool:
    """Return whether a process's label is that of a device."""
    return bool(label) and not label.upper().startswith("CPU")


def of_a_stream(event: Event) -> bool:
    """Return whether an event carries the number of a device or of a stream of one."""
    return bool(_OF_A_STREAM.search(event.args))
