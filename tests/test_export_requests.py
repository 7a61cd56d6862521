"""``export --requests``: the file of a step's load that replayers read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.agent_load import TOOL_S, record_load
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_OK, main
from verl_profiling.files.run_files import read_manifest


def rows_of(file: Path) -> list[dict[str, object]]:
    """Return the rows of a file of JSON lines."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_lengths_times_and_turns_are_those_of_the_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A later turn has the tool's time as its delay; a failed request is counted, not written."""
    folder = record_load(tmp_path)
    assert main(["export", str(folder), "--requests", str(tmp_path / "load.jsonl")]) == EXIT_OK
    out = capsys.readouterr().out
    assert "4 requests of 3 sessions" in out
    assert "left out: 1 failed or aborted" in out
    assert "rollout.prompt_hashes" in out
    first, second, third, alone = rows_of(tmp_path / "load.jsonl")
    lengths = [(row["input_length"], row["output_length"]) for row in (first, second, third, alone)]
    assert lengths == [(100, 20), (140, 7), (100, 30), (3, 5)]
    assert first["session_id"] == second["session_id"] != third["session_id"]
    assert [row["group"] for row in (first, second, third, alone)] == ["p7", "p7", "p7", ""]
    assert first["timestamp"] == 0
    assert TOOL_S * 1e3 <= second["delay"] < second["timestamp"] < third["timestamp"]
    assert "delay" not in first
    (server,) = (worker for worker in read_manifest(folder).workers if worker.requests)
    begins = sorted(request.begin_ns for request in server.requests)
    assert third["timestamp"] == pytest.approx((begins[2] - begins[0]) / 1e6)


def test_prompts_share_blocks_only_where_hashes_were_recorded(tmp_path: Path) -> None:
    """With hashes, samples of a group share the prompt, and a turn the whole blocks before it."""
    for name, settings in (("plain", {}), ("hashes", {"prompt_hashes": True})):
        folder = record_load(tmp_path / name, **settings)
        main(["export", str(folder), "--requests", str(tmp_path / f"{name}.jsonl")])
    plain = [row["hash_ids"] for row in rows_of(tmp_path / "plain.jsonl")]
    assert plain == [[0, 1], [2, 3, 4], [5, 6], [7]]
    hashes = [row["hash_ids"] for row in rows_of(tmp_path / "hashes.jsonl")]
    assert hashes == [[0, 1], [0, 2, 3], [0, 1], [4]]


def test_what_cannot_be_written_is_one_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step without requests says how to get them, and nothing is written."""
    folder = record_load(tmp_path, requests=False)
    target = tmp_path / "load.jsonl"
    assert main(["export", str(folder), "--requests", str(target)]) == EXIT_BAD_INPUT
    assert "rollout.requests" in capsys.readouterr().err
    assert not target.exists()
    with pytest.raises(SystemExit, match=str(EXIT_BAD_INPUT)):
        main(["export", str(folder)])
