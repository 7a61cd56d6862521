"""``replay``: the load of a step, sent to a server again."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.agent_load import TOOL_S, record_load
from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_OK, main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.integrations.replay import ordinary_tokens

ANSWER_S = 0.03


class CompletionsHandler(BaseHTTPRequestHandler):
    """Answers like a server of OpenAI's completions, and keeps what it was asked for."""

    asked: list[dict[str, Any]]

    def do_GET(self) -> None:
        self._answer({"data": [{"id": "tiny"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.asked.append({**body, "at_s": time.monotonic()})
        time.sleep(ANSWER_S)
        self._answer({"usage": {"completion_tokens": body["max_tokens"]}})

    def _answer(self, document: dict[str, Any]) -> None:
        data = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    """A server of this process, whose handler has what it was asked for."""
    handler = type("Handler", (CompletionsHandler,), {"asked": []})
    made = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=made.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def test_a_server_gets_the_load_of_the_step_and_the_replay_is_a_capture(
    tmp_path: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lengths and shared prompts are equal, and a turn waits for its tool."""
    folder = record_load(tmp_path / "run", prompt_hashes=True)
    url = f"http://127.0.0.1:{server.server_port}"
    again = tmp_path / "again"
    words = ["replay", str(folder), "--engine", url, "--output", str(again), "--json"]
    assert main(words) == EXIT_OK
    document = json.loads(capsys.readouterr().out)

    _warm_up, *asked = server.RequestHandlerClass.asked
    by_lengths = {(len(body["prompt"]), body["max_tokens"]): body for body in asked}
    assert sorted(by_lengths) == [(3, 5), (100, 20), (100, 30), (140, 7)]
    assert {body["min_tokens"] for body in asked} == {5, 7, 20, 30}
    sent = {token for body in asked for token in body["prompt"]}
    assert min(sent) > 258  # special tokens, and tokens of one byte
    first, second, sample = (by_lengths[key] for key in ((100, 20), (140, 7), (100, 30)))
    assert first["prompt"] == sample["prompt"]
    assert first["prompt"][:64] == second["prompt"][:64]
    assert second["at_s"] - first["at_s"] >= TOOL_S + ANSWER_S

    manifest = read_manifest(Path(document["directory"]))
    replayed = [request for worker in manifest.workers for request in worker.requests]
    lengths = sorted((one.prompt_tokens, one.response_tokens) for one in replayed)
    assert lengths == sorted(by_lengths)
    assert document["replayed_s"] >= TOOL_S + 2 * ANSWER_S
    more_s = document["replayed_s"] - document["captured_s"]
    assert document["predicted_us"] - document["recorded_us"] == pytest.approx(more_s * 1e6, abs=1)


def test_recorded_arrivals_are_kept_if_asked_for(
    tmp_path: Path, server: ThreadingHTTPServer
) -> None:
    """The session that began last is sent last, after as long a time."""
    folder = record_load(tmp_path / "run")
    url = f"http://127.0.0.1:{server.server_port}"
    output = ["--output", str(tmp_path / "again")]
    main(["replay", str(folder), "--engine", url, "--arrivals", *output])
    _, *asked = server.RequestHandlerClass.asked
    (alone,) = (body for body in asked if body["max_tokens"] == 5)
    assert alone["at_s"] - asked[0]["at_s"] >= TOOL_S + 0.02


def test_a_step_without_the_stage_rollout_is_replayed_and_not_predicted(
    tmp_path: Path, server: ThreadingHTTPServer, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = record_load(tmp_path / "run")
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["stages"] = [one for one in manifest["stages"] if one["name"] != "rollout"]
    (folder / "manifest.json").write_text(json.dumps(manifest))
    url = f"http://127.0.0.1:{server.server_port}"
    words = ["replay", str(folder), "--engine", url, "--output", str(tmp_path / "again")]
    assert main(words) == EXIT_OK
    assert "the step with this rollout is unknown" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        pytest.param(["--engine", "vlm"], "did you mean 'vllm'", id="engine"),
        pytest.param(["--engine", "http://x", "--set", "a=1"], "keeps its own options", id="set"),
        pytest.param(
            ["--engine", "http://127.0.0.1:9"], "9/v1/models gives no answer", id="server"
        ),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is sent, and the error says what to choose from."""
    assert main(["replay", str(record_load(tmp_path)), *words]) == EXIT_BAD_INPUT
    assert reason in capsys.readouterr().err


class Tokenizer:
    """A tokenizer of transformers with special tokens inside and behind its vocabulary."""

    vocab_size = 12
    all_special_ids = (0, 13)


@pytest.mark.parametrize(
    ("tokenizer", "tokens"),
    [
        (None, [0, 1, 2, 3, 6, 8, 9, 10, 11, 12, 13, 14]),
        (Tokenizer(), [1, 2, 3, 6, 8, 9, 10, 11]),
    ],
)
def test_prompts_have_ordinary_tokens(tokenizer: Tokenizer | None, tokens: list[int]) -> None:
    """No token of an end, an image or a padding is drawn, nor one that was added to the model."""
    config = {
        "bos_token_id": None,
        "eos_token_id": [4, 5],
        "text_config": {"image_token_id": 7, "id2label": {0: "LABEL_0"}},
        "vocab_size": 15,
    }
    assert ordinary_tokens(15, config, tokenizer) == tokens
