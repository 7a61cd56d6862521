"""The numbers of the suite: a table for each subject, printed at the end."""

from __future__ import annotations

from collections import defaultdict

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests recorded under ``table: columns``, a Markdown table per subject."""
    tables: dict[str, list[str]] = defaultdict(list)
    for reports in terminalreporter.stats.values():
        for report in reports:
            for name, row in getattr(report, "user_properties", []):
                if name.startswith("| ") and getattr(report, "when", "") == "call":
                    tables[name].append(row)
    for columns, rows in tables.items():
        terminalreporter.section("soak")
        terminalreporter.write_line(columns)
        terminalreporter.write_line("|---" * (columns.count("|") - 1) + "|")
        for row in rows:
            terminalreporter.write_line(row)
