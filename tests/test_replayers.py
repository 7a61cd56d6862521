"""The file of ``export --requests`` in a real replayer, Dynamo's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.agent_load import TOOL_S, record_load
from verl_profiling.cli import main
from verl_profiling.manifest import BLOCK_TOKENS

pytestmark = pytest.mark.replayers


def test_dynamo_replays_every_request_and_turn(tmp_path: Path) -> None:
    """Lengths are equal, a turn waits for the one before and its tool, prefixes are found again."""
    replay = pytest.importorskip("dynamo.replay")
    folder = record_load(tmp_path, prompt_hashes=True)
    target = tmp_path / "load.jsonl"
    main(["export", str(folder), "--requests", str(target)])
    report = replay.run_trace_replay(
        str(target),
        num_workers=1,
        replay_mode="offline",
        trace_block_size=BLOCK_TOKENS,
        capture_per_request=True,
    )
    turns = {(row["session_id"], row["turn_index"]): row for row in report.per_request}
    assert sorted((row["input_length"], row["output_length"]) for row in turns.values()) == [
        *((3, 5), (100, 20), (100, 30), (140, 7)),
    ]
    (session,) = {session for session, turn in turns if turn == 1}
    first, second = turns[session, 0], turns[session, 1]
    waited_ms = second["arrival_time_ms"] - first["terminal_time_ms"]
    assert TOOL_S * 1e3 <= waited_ms < 2 * TOOL_S * 1e3
    assert second["reused_input_tokens"] == BLOCK_TOKENS
