"""Sends the stages and trajectories of captured steps as OpenTelemetry spans, or writes the
requests of one step for a replayer.

With --otlp, there is a trace per step, and a trace per trajectory. Names of spans are those of the
report. Facts of a span, such as its tokens, are attributes ``verl_profiling.<fact>``, and those of
OpenTelemetry's conventions. Ids are hashes of what they stand for, so a second export sends the
same ids.

With --requests, the file has the format of Mooncake's traces: one line per request, with its time,
lengths and trajectory. vLLM's bench and Dynamo replay it. It has no text.

example: verl-profiling export outputs/run/step_000012 --requests requests.jsonl
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verl_profiling.analysis import CapturedStep, Progress
from verl_profiling.commands.common import StepByStep, add_json, add_paths, option, progress, show
from verl_profiling.commands.replay import load_of_step
from verl_profiling.errors import ToolUnavailableError, TraceFormatError
from verl_profiling.files.opener import whole_file
from verl_profiling.files.trajectory_log import Fact, SpanRecord, TrajectoryLog
from verl_profiling.identity import WorkerIdentity
from verl_profiling.manifest import BLOCK_TOKENS, Manifest, Request, StageSpan, StepSpan
from verl_profiling.steps.load import mooncake_rows
from verl_profiling.steps.requests import requests_by_id, requests_of_spans
from verl_profiling.steps.trajectory_spans import read_logs, stages_by_row

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext

_BATCH = 512
_LONGEST_BODY = 1 << 16  # bytes that are read of an answer, whose message has two fields
_LONGEST_WORDS = 200
_OF_REQUEST = ("prompt_tokens", "response_tokens", "cached_tokens", "replica", "policy_version")
_TOOL = "tool:"
_GENERATE, _FAILED = "generate", "_OTHER"  # OpenTelemetry's error.type of an unnamed error
_CONVENTIONS = "https://opentelemetry.io/schemas/1.44.0"
"""The release of the semantic conventions of which attributes have their names: the newest one of
``opentelemetry-semantic-conventions`` (0.66b2). Names of generative AI have moved before.
"""
_CONVENTIONAL = {
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "response_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
}
"""Attributes of the conventions, by the facts that they repeat."""

_Facts = dict[str, Fact]
_Key = tuple[object, ...]
"""Key of a span. Its first part is the key of the trace, which alone is the key of the root."""

_Root = Callable[[int], _Key]
"""Function that returns the key of the step in which something began at a time (unix ns): of the
last step that had begun by then.
"""


@dataclass(frozen=True)
class _Span:
    """A span to send.

    Attributes:
        process: OpenTelemetry's resource attributes of the process.
        key: Key of the span, from which its ids are computed.
        parent: Key of the span around it; empty for a root.
        name: Name of the span.
        begin_ns: Begin of the span (unix ns).
        end_ns: End of the span (unix ns).
        facts: Attributes of the span; those with the value ``None`` are not sent.
        error: The error of a failed span.
        link: Key of a linked span; empty for none.
    """

    process: _Facts
    key: _Key
    parent: _Key
    name: str
    begin_ns: int
    end_ns: int
    facts: _Facts = field(default_factory=dict)
    error: str = ""
    link: _Key = ()


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_paths(parser)
    target = parser.add_mutually_exclusive_group(required=True)
    option(target, "--otlp URL", "OTLP/HTTP endpoint for traces")
    option(target, "--requests FILE", "write the requests of one step, for a replayer", Path)
    add_json(parser, "one document per step")


def run(arguments: argparse.Namespace) -> bool:
    """Send every step, or write the requests of the one step; return whether nothing is missing."""
    if arguments.requests is not None:
        return _write_requests(arguments)
    return _send_spans(arguments)


def _write_requests(arguments: argparse.Namespace) -> bool:
    """Write the requests of the one step under the paths; return whether nothing is missing.

    Raises:
        TraceFormatError: There is not one step, or it has no request to replay.
    """
    work = StepByStep(arguments.paths)
    if len(work.steps) > 1:
        raise TraceFormatError(arguments.paths[0], "has several steps; name the folder of one")
    step = work.steps[0]
    load = load_of_step(step)
    for problem in load.problems:
        work.problem(problem)
    with whole_file(arguments.requests) as part:
        part.write(msgspec.json.Encoder().encode_lines(mooncake_rows(load)))
    blocks = f"prompts in blocks of {BLOCK_TOKENS} tokens"
    if not load.has_hashes:
        blocks += ", none of them shared: the setting rollout.prompt_hashes records which are"
    counts = f"{len(load.requests):,} requests of {load.sessions:,} sessions"
    lines = [f"{arguments.requests}: {counts}; {blocks}"]
    if load.left_out:
        lines.append(f"left out: {load.said_left_out}")
    document = {
        "directory": step.directory,
        "requests": len(load.requests),
        "sessions": load.sessions,
        "left_out": load.left_out,
        "block_tokens": BLOCK_TOKENS,
        "prompt_hashes": load.has_hashes,
    }
    show(arguments, document, lines)
    return work.is_well


def _send_spans(arguments: argparse.Namespace) -> bool:
    """Send every step under the paths; end at the first batch
    that the endpoint does not take whole. Return whether all was sent.
    """
    endpoint = _Endpoint(arguments.otlp)
    work = StepByStep(arguments.paths)
    with progress("sending", sum(1 + len(step.inputs.logs) for step in work.steps)) as advance:
        for step in work.steps:
            spans = _spans(step, work, advance)
            sent = 0
            while batch := list(islice(spans, _BATCH)):
                taken, problem = endpoint.send(batch)
                sent += taken
                if problem:
                    progress_so_far = f"{sent:,} spans of {step.directory} were sent"
                    work.problem(f"{arguments.otlp}: {progress_so_far}: {problem}")
                    return work.is_well
            document = {"directory": step.directory, "spans": sent}
            show(arguments, document, [f"{step.directory}: {sent:,} spans sent"])
    return work.is_well


class _Endpoint:
    """An OTLP/HTTP endpoint.

    OpenTelemetry's exporter reads no body of an answer, and takes a redirect for success (seen in
    1.45), so this class reads the answers.

    Raises:
        ToolUnavailableError: The exporter is not installed.
    """

    def __init__(self, url: str) -> None:
        try:
            import requests
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        except ImportError as error:
            remedy = "pip install 'verl-profiling[otel]'"
            raise ToolUnavailableError(f"export needs {error.name}: {remedy}") from error
        self._answers: list[tuple[Any, bytes]] = []
        session = requests.Session()
        session.stream = True  # only the begin of a body is read
        session.max_redirects = 0  # an older exporter follows them, to wherever they lead
        session.hooks["response"].append(self._keep_answer)
        self._exporter = OTLPSpanExporter(url, session=session)
        self._log = BufferingHandler(capacity=1000)
        logger = logging.getLogger("opentelemetry")
        logger.addHandler(self._log)
        logger.propagate = False

    def _keep_answer(self, response: Any, **_: Any) -> None:
        self._answers.append((response, response.raw.read(_LONGEST_BODY, decode_content=True)))

    def send(self, spans: Sequence[_Span]) -> tuple[int, str]:
        """Send a batch of spans.

        Returns:
            The number of spans that the endpoint took, and why it did not take all.
        """
        self._log.flush()
        self._answers.clear()
        self._exporter.export(list(map(_readable, spans)))
        if not self._answers:
            reasons = [record.getMessage() for record in self._log.buffer]
            reasons = reasons or ["no reason is known"]
            return 0, "; ".join(dict.fromkeys((reasons[0], reasons[-1])))
        response, body = self._answers[-1]
        if not 200 <= response.status_code < 300:
            return 0, _sentence(response, body)
        rejected, message = _rejected(body)
        if not rejected:
            return len(spans), ""
        return max(len(spans) - rejected, 0), f"{rejected:,} were rejected: {message}"


def _sentence(response: Any, body: bytes) -> str:
    """Return status, target of a redirect, and first words of an answer."""
    words = " ".join(body.decode(errors="replace").split())[:_LONGEST_WORDS]
    status = f"{response.status_code} {response.reason}"
    parts = filter(None, (status, response.headers.get("Location"), words))
    return "the endpoint answered " + ": ".join(parts)


def _rejected(body: bytes) -> tuple[int, str]:
    """Return the number of spans that the endpoint rejected, and its message."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

    answer = ExportTraceServiceResponse()
    with suppress(Exception):  # a text that is no answer of the protocol
        answer.MergeFromString(body)
    return answer.partial_success.rejected_spans, answer.partial_success.error_message


def _readable(span: _Span) -> ReadableSpan:
    """Return a span in the form that OpenTelemetry's exporter takes."""
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

    attributes = _without_none({f"verl_profiling.{name}": span.facts[name] for name in span.facts})
    attributes |= _conventional(span)
    status = trace.Status()
    if span.error:
        attributes["error.type"] = span.error.partition(":")[0]
        status = trace.Status(trace.StatusCode.ERROR, span.error)
    return ReadableSpan(
        span.name,
        _context(span.key),
        _context(span.parent) if span.parent else None,
        Resource(_without_none(span.process)),
        attributes,
        links=[trace.Link(_context(span.link))] if span.link else [],
        status=status,
        start_time=span.begin_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("verl_profiling", schema_url=_CONVENTIONS),
    )


def _conventional(span: _Span) -> dict[str, Any]:
    """Return the attributes of a span that OpenTelemetry's conventions name."""
    attributes = {name: span.facts.get(fact) for fact, name in _CONVENTIONAL.items()}
    if span.name == _GENERATE:
        attributes["gen_ai.operation.name"] = "text_completion"
    elif span.name.startswith(_TOOL):
        attributes["gen_ai.operation.name"] = "execute_tool"
        attributes["gen_ai.tool.name"] = span.name.removeprefix(_TOOL)
    return _without_none(attributes)


def _context(key: _Key) -> SpanContext:
    from opentelemetry import trace

    return trace.SpanContext(_hashed(key[:1], 16), _hashed(key, 8), False, trace.TraceFlags(1))


def _hashed(key: _Key, size: int) -> int:
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=size).digest(), "big")


def _without_none(facts: _Facts) -> dict[str, Any]:
    return {name: fact for name, fact in facts.items() if fact is not None}


def _spans(step: CapturedStep, work: StepByStep, advance: Progress) -> Iterator[_Span]:
    """Yield the spans of a captured step: stages, then trajectories."""
    manifest = step.manifest
    if manifest is None:
        missing = "no manifest, so there are no stages and trajectories to send"
        work.problem(f"{step.directory}: {missing}")
        return
    whole = StepSpan(step=manifest.step, begin_ns=manifest.begin_ns, end_ns=manifest.end_ns)
    steps = manifest.step_spans or [whole]

    def root(begin_ns: int) -> _Key:
        begun = [span for span in steps if span.begin_ns <= begin_ns]
        return ((manifest.run_id, manifest.capture_id, (begun or steps[:1])[-1].step),)

    loop = _process(manifest, manifest.controller)
    for span in steps:
        facts: _Facts = {"step": span.step, "policy_version": span.policy_version}
        times = span.begin_ns, span.end_ns
        yield _Span(loop, root(span.begin_ns), (), f"step {span.step}", *times, facts)
    yield from _stages(manifest.stages, loop, root)
    processes = {manifest.controller.name: loop}
    for worker in manifest.workers:
        process = processes[worker.name] = _process(manifest, worker.identity)
        if not manifest.runs_the_loop(worker):  # else its stages are those of the loop
            yield from _stages(worker.stages, process, root)
    advance(step)
    requests = requests_by_id(manifest.workers)
    for source, log, problems in read_logs(step.inputs):
        for problem in problems:
            work.problem(problem)
        if log is not None:
            process = processes[source.worker]
            yield from _trajectories(log, source.offset_ns, process, requests, root)
        advance(source)


def _process(manifest: Manifest, identity: WorkerIdentity) -> _Facts:
    return {
        "service.namespace": "verl_profiling",
        "service.name": identity.role,
        "service.instance.id": identity.name,
        "host.name": identity.host,
        "process.pid": identity.pid,
        "verl_profiling.run_id": manifest.run_id,
    }


def _stages(stages: Sequence[StageSpan], process: _Facts, root: _Root) -> Iterator[_Span]:
    """Yield the stages of a process, each below the stage around it."""
    open_stages: dict[int, list[_Span]] = {}
    for number, (stage, row) in enumerate(stages_by_row(stages)):
        around = open_stages.setdefault(row, [])
        while around and around[-1].end_ns < stage.end_ns:
            around.pop()
        parent = around[-1].key if around else root(stage.begin_ns)
        lane = process["service.instance.id"]
        span = _Span(
            process,
            (parent[0], lane, "stage", number),
            parent,
            stage.name,
            stage.begin_ns,
            stage.end_ns,
            error=_FAILED if stage.failed else "",
        )
        around.append(span)
        yield span


def _trajectories(
    log: TrajectoryLog,
    offset_ns: int,
    process: _Facts,
    requests: Mapping[str, list[Request]],
    root: _Root,
) -> Iterator[_Span]:
    """Yield trajectories as roots of traces, and spans below their trajectory,
    or below the step.
    """
    roots: dict[int, _Key] = {}
    for trajectory in log.trajectories:
        begin_ns = trajectory.begin_ns - offset_ns
        step = root(begin_ns)
        roots[trajectory.id] = ((step, log.lane, trajectory.id),)
        facts: _Facts = {name: getattr(trajectory, name) for name in ("group", "sample", "status")}
        failed = trajectory.status == "failed"
        yield _Span(
            process,
            roots[trajectory.id],
            (),
            "trajectory",
            begin_ns,
            trajectory.end_ns - offset_ns,
            facts={**trajectory.facts, **facts},
            error=trajectory.error or _FAILED if failed else "",
            link=step,
        )
    served = requests_of_spans(log.spans, offset_ns, requests)
    turns, keys = Counter[int](), dict[int, _Key]()
    for span in log.spans:
        turns[span.trajectory] += span.name == _GENERATE
        begin_ns = span.begin_ns - offset_ns
        parent = keys.get(span.parent) or roots.get(span.trajectory) or root(begin_ns)
        keys[span.id] = (parent[0], log.lane, span.id)
        turn = turns[span.trajectory] if span.trajectory in roots else None
        yield _Span(
            process,
            keys[span.id],
            parent,
            span.name,
            begin_ns,
            span.end_ns - offset_ns,
            facts={**_facts(span, served.get(span.id)), "turn": turn},
            error=_FAILED if span.failed else "",
        )


def _facts(span: SpanRecord, request: Request | None) -> _Facts:
    """Return the facts of a span, and of the request that it waited for."""
    facts = {name: getattr(request, name, None) for name in _OF_REQUEST}
    return {**facts, **span.facts, "open": span.open or None, "status": span.status or None}
