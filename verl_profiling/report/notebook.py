"""A report that notebooks show as an HTML page."""

from __future__ import annotations

from html import escape

import msgspec

from verl_profiling.report.html import render_html
from verl_profiling.report.model import Report
from verl_profiling.units import duration

__all__ = ["NotebookReport"]


class NotebookReport(Report, frozen=True, kw_only=True):
    """A report that a notebook shows as its HTML page.

    The page is in a frame without an origin, so neither its style and script nor those of the
    notebook can affect the other. It loads nothing.
    """

    @classmethod
    def of(cls, report: Report) -> NotebookReport:
        """Return the same report as a :class:`NotebookReport`."""
        return cls(**{name: getattr(report, name) for name in msgspec.structs.asdict(report)})

    def __repr__(self) -> str:
        return (
            f"<report of {self.title}: {duration(self.span_us / 1e6)}, {len(self.workers)} lanes, "
            f"{len(self.findings)} findings>"
        )

    def _repr_html_(self) -> str:
        page = escape(render_html(self), quote=True)
        return (
            f'<iframe srcdoc="{page}" sandbox="allow-scripts" title="{escape(repr(self))}" '
            'style="width: 100%; height: 720px; border: 0"></iframe>'
        )
