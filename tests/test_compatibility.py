"""The table of the newest releases that were tested, and what writes it."""

from __future__ import annotations

import json
from pathlib import Path

from tests.compatibility import ROWS, Row, entered, found, markdown
from verl_profiling.engines import NEWEST_TESTED
from verl_profiling.engines.adapter import version_numbers

RESULTS = """<testsuites><testsuite>
<testcase name="test_vllm_can_be_configured[0.33.0]"/>
<testcase name="test_vllm_names_the_rank_in_the_file[0.33.0]"><failure/></testcase>
<testcase name="test_sglang_file_names_are_understood[0.5.3]"><skipped/></testcase>
<testcase name="test_another"/>
</testsuite></testsuites>"""


def test_a_row_has_what_passed_and_the_names_of_what_failed(tmp_path: Path) -> None:
    """A release that was skipped has no row; a later day replaces an earlier one."""
    (tmp_path / "results.xml").write_text(RESULTS)
    [row] = found("releases", tmp_path / "results.xml")
    assert (row.package, row.version, row.result) == ("vllm", "0.33.0", "1")
    assert row.limits.startswith("`test_vllm_names_the_rank_in_the_file[0.33.0]`; not run")
    earlier = Row("vllm", "0.33.0", row.test, "2026-01-01", "7", "")
    older = Row("vllm", "0.9.0", row.test, "2026-01-01", "7", "")
    rows = entered([list(older), list(earlier)], [row])
    assert rows == [list(row), list(older)]
    assert markdown(rows).splitlines()[2].startswith("| vllm | 0.33.0 | ")


def test_the_versions_without_a_warning_are_the_newest_of_the_table() -> None:
    rows = [Row(*row) for row in json.loads(ROWS.read_text())]
    for package, newest in NEWEST_TESTED.items():
        versions = [version_numbers(row.version) for row in rows if row.package == package]
        assert max(versions) == version_numbers(newest), package
