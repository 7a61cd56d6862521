"""``export``: what an OTLP endpoint gets, decoded with OpenTelemetry's own messages."""

from __future__ import annotations

import gzip
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from drawn_logs import MS, Drawn
from step_folders import build_step, rewrite, rewrite_worker

from verl_profiling.cli import EXIT_BAD_INPUT, EXIT_FINDING, EXIT_OK, main
from verl_profiling.files.run_files import read_manifest
from verl_profiling.identity import ProcessId
from verl_profiling.manifest import StageSpan, StepSpan

service = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
Schemas = pytest.importorskip("opentelemetry.semconv.schemas").Schemas
gen_ai = pytest.importorskip("opentelemetry.semconv._incubating.attributes.gen_ai_attributes")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")


class Receiver:
    """An OTLP/HTTP endpoint of this process."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.headers: list[dict[str, str]] = []
        self.answer = 200
        self.body = b""
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                receiver.requests.append(service.ExportTraceServiceRequest.FromString(body))
                receiver.headers.append({"path": self.path, **self.headers})
                self.send_response(receiver.answer)
                self.send_header("Content-Length", str(len(receiver.body)))
                if 300 <= receiver.answer < 400:
                    self.send_header("Location", "http://127.0.0.1:9/elsewhere")
                self.end_headers()
                self.wfile.write(receiver.body)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                pass  # the command may close before it has read a long answer

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> list[tuple[dict[str, Any], Any]]:
        """Return each span with the attributes of its process."""
        return [
            (attributes(one.resource), span)
            for request in self.requests
            for one in request.resource_spans
            for scope in one.scope_spans
            for span in scope.spans
        ]


def attributes(holder: Any) -> dict[str, Any]:
    """Return the attributes of a span or of a process."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in holder.attributes}


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    thread = threading.Thread(target=made.server.serve_forever, args=(0.01,))
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_trajectories_are_traces_with_their_spans_and_facts(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a trace of its own, on the loop's clock, linked to the step;
    tokens are the engine's.
    """
    drawn = Drawn(tmp_path, clock_ms=5_000)
    turns = ("generate", 10, 30), ("tool:search", 30, 60), ("generate", 60, 80)
    drawn.trajectory(0, 90, *turns, group="p7", turns=2, response_tokens=11)
    failed = drawn.trajectory(5, 50, group="p8", status="failed", error="ValueError: no such tool")
    reward = drawn.span("reward", 20, 40, failed, failed=True)
    drawn.span("scored", 25, 35, failed, reward)
    drawn.span("pause", 1, 2, reason="full")
    drawn.log.spans[0] = type(drawn.log.spans[0])(
        *(getattr(drawn.log.spans[0], name) for name in drawn.log.spans[0].__struct_fields__[:9]),
        "r1",
        {},
    )
    drawn.requests(("r1", 10, 30))
    drawn.add_to(drawn.folder)

    assert main(["export", str(drawn.folder), "--otlp", receiver.url]) == EXIT_OK
    found = receiver.spans()
    assert capsys.readouterr().out == f"{drawn.folder}: {len(found)} spans sent\n"
    spans = {span.name: span for _, span in found}
    (step,) = (span for _, span in found if span.name == "step 12")
    agents = [span for _, span in found if span.name == "trajectory"]
    assert [(not one.parent_span_id, one.links[0].span_id) for one in agents] == [
        (True, step.span_id)
    ] * 2
    assert len({step.trace_id, *(one.trace_id for one in agents)}) == 3
    own = [span for _, span in found if span.trace_id == agents[0].trace_id][1:]
    begin = drawn.begin_ns
    assert [(one.name, (one.start_time_unix_nano - begin) / MS) for one in own] == [
        ("generate", 10),
        ("tool:search", 30),
        ("generate", 60),
    ]
    assert {one.parent_span_id for one in own} == {agents[0].span_id}
    assert (agents[0].end_time_unix_nano - begin) / MS == 90
    assert attributes(agents[0]) == {
        "gen_ai.usage.output_tokens": 11,
        "verl_profiling.response_tokens": 11,
        "verl_profiling.turns": 2,
        "verl_profiling.group": "p7",
        "verl_profiling.sample": 0,
        "verl_profiling.status": "done",
    }
    assert attributes(own[0]) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 9,
        "verl_profiling.prompt_tokens": 3,
        "verl_profiling.response_tokens": 9,
        "verl_profiling.replica": 0,
        "verl_profiling.turn": 1,
    }
    assert [attributes(one)["verl_profiling.turn"] for one in own] == [1, 1, 2]
    assert attributes(own[1])["gen_ai.operation.name"] == "execute_tool"
    assert attributes(own[1])["gen_ai.tool.name"] == "search"
    sent = {name for _, one in found for name in attributes(one) if name.startswith("gen_ai.")}
    assert sent <= {getattr(gen_ai, name) for name in dir(gen_ai) if name.startswith("GEN_AI_")}
    [process] = receiver.requests[0].resource_spans[:1]
    assert process.scope_spans[0].schema_url in [schema.value for schema in Schemas]
    assert (agents[1].status.code, agents[1].status.message) == (2, "ValueError: no such tool")
    assert attributes(agents[1])["error.type"] == "ValueError"
    assert spans["reward"].status.code == 2
    assert spans["scored"].parent_span_id == spans["reward"].span_id
    assert (spans["pause"].trace_id, spans["pause"].parent_span_id) == (step.trace_id, step.span_id)
    lanes = {lane["service.instance.id"]: lane for lane, span in found if span.name == "trajectory"}
    assert lanes["agent_loop_rank0"]["host.name"] == "agents0"


def test_stages_are_below_their_step(tmp_path: Path, receiver: Receiver) -> None:
    """Of loop and workers, of each step of a continuous capture; nested ones below the outer."""
    folder = build_step(tmp_path)
    manifest = read_manifest(folder)
    begin, end = manifest.begin_ns, manifest.end_ns
    middle = (begin + end) // 2
    inner = StageSpan("micro_batch", middle + 2, end - 2, depth=1, failed=True)
    rewrite(
        folder,
        step_spans=[
            StepSpan(step=12, begin_ns=begin, end_ns=middle, policy_version=11),
            StepSpan(step=13, begin_ns=middle, end_ns=end),
        ],
        stages=[
            StageSpan("rollout", begin, middle - 1),
            StageSpan("update", middle + 1, end - 1),
            inner,
        ],
    )
    assert main(["export", str(folder), "--otlp", receiver.url]) == EXIT_OK
    loop = {
        span.name: span for lane, span in receiver.spans() if lane["service.name"] == "controller"
    }
    parents = {name: span.parent_span_id for name, span in loop.items()}
    assert parents == {
        "step 12": b"",
        "step 13": b"",
        "rollout": loop["step 12"].span_id,
        "update": loop["step 13"].span_id,
        "micro_batch": loop["update"].span_id,
    }
    assert loop["micro_batch"].trace_id == loop["step 13"].trace_id
    assert loop["micro_batch"].status.code == 2
    assert attributes(loop["step 12"]) == {
        "verl_profiling.step": 12,
        "verl_profiling.policy_version": 11,
    }
    ranks = [lane for lane, span in receiver.spans() if span.name == "update_actor"]
    assert [lane["service.instance.id"] for lane in ranks] == ["actor_rank0", "actor_rank1"]
    assert {lane["verl_profiling.run_id"] for lane in ranks} == {"run"}
    first = [span.SerializeToString() for _, span in receiver.spans()]
    receiver.requests.clear()
    assert main(["export", str(folder), "--otlp", receiver.url]) == EXIT_OK
    assert [span.SerializeToString() for _, span in receiver.spans()] == first


def test_stages_of_an_spmd_program_are_sent_once(tmp_path: Path, receiver: Receiver) -> None:
    folder = build_step(tmp_path)
    process = ProcessId(host="here", clock_domain="here", pid=7)
    rank0, _ = (
        worker for worker in read_manifest(folder).workers if worker.identity.role == "actor"
    )
    rewrite(folder, process=process, stages=rank0.stages)
    rewrite_worker(folder, "actor_rank0", process=process)
    assert main(["export", str(folder), "--otlp", receiver.url]) == EXIT_OK
    lanes = [
        lane["service.instance.id"]
        for lane, span in receiver.spans()
        if span.name == "update_actor"
    ]
    assert [lane.removesuffix("_rank0") for lane in lanes] == ["controller", "actor_rank1"]


def test_a_stage_is_below_the_stage_around_it_also_beside_other_tasks(
    tmp_path: Path, receiver: Receiver
) -> None:
    """Tasks of an event loop share a thread, so an outer stage may begin between the two."""
    folder = build_step(tmp_path)
    begin = read_manifest(folder).begin_ns
    times = [("rollout", 0, 60, 0), ("train", 10, 40, 0), ("wait", 20, 50, 1), ("late", 65, 70, 1)]
    stages = [
        StageSpan(name, begin + a * 1000, begin + b * 1000, depth=d) for name, a, b, d in times
    ]
    rewrite(folder, stages=stages)
    assert main(["export", str(folder), "--otlp", receiver.url]) == EXIT_OK
    loop = {
        span.name: span for lane, span in receiver.spans() if lane["service.name"] == "controller"
    }
    named = {span.span_id: name for name, span in loop.items()}
    parents = {
        name: named[span.parent_span_id] for name, span in loop.items() if span.parent_span_id
    }
    assert parents == {
        "rollout": "step 12",
        "train": "step 12",
        "wait": "rollout",
        "late": "step 12",
    }


def test_a_plain_trace_has_nothing_to_send(
    tmp_path: Path, receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = next(build_step(tmp_path).glob("actor_rank0*.json.gz")).rename(
        tmp_path / "rank0.json.gz"
    )
    assert main(["export", str(trace), "--otlp", receiver.url]) == EXIT_FINDING
    assert "no manifest, so there are no stages" in capsys.readouterr().err
    assert receiver.requests == []


def test_many_spans_travel_in_batches(
    tmp_path: Path, receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exporter's variables hold."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20key")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    drawn = Drawn(tmp_path)
    for number in range(700):
        drawn.trajectory(0, 1 + number / 10, ("generate", 0, 1), group=f"p{number}")
    drawn.add_to(drawn.folder)
    assert main(["export", str(tmp_path), "--otlp", receiver.url]) == EXIT_OK
    assert len(receiver.requests) == 3
    assert len({span.span_id for _, span in receiver.spans()}) == len(receiver.spans()) > 1400
    assert {(one["path"], one["authorization"]) for one in receiver.headers} == {
        ("/v1/traces", "Bearer key")
    }


def test_an_endpoint_that_does_not_take_spans_is_one_line(
    tmp_path: Path,
    receiver: Receiver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With its status, or with why nobody answers; and exit code 1."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    folder = build_step(tmp_path)
    receiver.answer = 401
    assert main(["export", str(folder), "--otlp", receiver.url]) == EXIT_FINDING
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert receiver.url in printed.err
    assert "401" in printed.err
    assert main(["export", str(folder), "--otlp", "http://127.0.0.1:9/v1/traces"]) == EXIT_FINDING
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "refused" in printed.err


def test_only_what_the_endpoint_took_is_sent(
    tmp_path: Path,
    receiver: Receiver,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Any answer but a whole success says its first words and how many were taken,
    with exit code 1.
    """
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")
    chance = random.Random(41)
    drawn = Drawn(tmp_path)
    for number in range(20):
        drawn.trajectory(0, 1 + number, group=f"p{number}")
    drawn.add_to(drawn.folder)
    export = ["export", str(drawn.folder), "--otlp", receiver.url]
    assert main(export) == EXIT_OK
    spans = len(receiver.spans())
    assert capsys.readouterr().out == f"{drawn.folder}: {spans} spans sent\n"
    for number in range(24):
        words = f"quota {number} of {chance.choice(('spans', 'bytes', 'ümlauts'))} exceeded"
        receiver.answer = chance.choice((200, 202, 301, 302, 307, 308, 400, 401, 413, 422, 500))
        receiver.body, taken = f"\n{words}\x1b]0;\x07{'x' * 10**6}".encode(), 0
        if receiver.answer < 300:
            answer = service.ExportTraceServiceResponse()
            answer.partial_success.rejected_spans = rejected = chance.randint(1, spans)
            answer.partial_success.error_message = words
            receiver.body, taken = answer.SerializeToString(), spans - rejected
        receiver.requests.clear()
        assert main(export) == EXIT_FINDING
        printed = capsys.readouterr()
        assert (printed.out, printed.err.count("\n"), len(receiver.requests)) == ("", 1, 1)
        assert f": {taken} spans of {drawn.folder} were sent: " in printed.err
        assert words in printed.err
        assert "\x1b" not in printed.err
        assert len(printed.err) < 1000
        assert receiver.answer < 300 or str(receiver.answer) in printed.err
        assert ("elsewhere" in printed.err) == (300 <= receiver.answer < 400)


def test_without_the_exporter_the_remedy_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    assert main(["export", str(tmp_path), "--otlp", "http://127.0.0.1:9"]) == EXIT_BAD_INPUT
    assert "pip install 'verl-profiling[otel]'" in capsys.readouterr().err
