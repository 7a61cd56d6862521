"""``verl-profiling export``: the stages and trajectories of captured steps as OpenTelemetry spans.

Names are those of the semantic conventions for generative AI, version 1.41.0
(https://github.com/open-telemetry/semantic-conventions/tree/v1.41.0/docs/gen-ai): a trajectory is
an ``invoke_agent``, ``generate`` is a ``chat``, and a tool is an ``execute_tool``. Provider and
model are not recorded, and so are absent. Ids are hashes of what they stand for, so a second export
repeats them.
"""

from __future__ import annotations

import argparse
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from logging.handlers import BufferingHandler
from typing import Any

from verl_profiling.analysis import CapturedStep, Progress
from verl_profiling.commands import option
from verl_profiling.commands.common import StepByStep, add_paths, progress
from verl_profiling.errors import ToolUnavailableError
from verl_profiling.files.trajectory_log import Fact, TrajectoryLog
from verl_profiling.manifest import Request, StageSpan, StepSpan
from verl_profiling.steps.nesting import stages_by_row
from verl_profiling.steps.records import read_logs
from verl_profiling.steps.requests import joined, requests_by_id

_SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
_BATCH = 512
_LONGEST_BODY = 1 << 16  # of an answer, which holds two fields
_LONGEST_WORDS = 200
_NAMES = {
    "operation": "gen_ai.operation.name",
    "tool": "gen_ai.tool.name",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "response_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "error": "error.type",
}
"""Names of attributes in the conventions; all other facts are named ``verl_profiling.<fact>``."""

_OF_REQUEST = ("prompt_tokens", "response_tokens", "cached_tokens", "replica", "policy_version")
_GENERATE, _FAILED = "generate", "_OTHER"

_Facts = dict[str, Fact]
_Key = tuple[object, ...]
"""Key of a span. Its first part is the key of the trace, which alone is the key of the root."""

_Part = tuple[_Key, _Key, str, int, int, _Facts, str, _Key]
"""Key, parent, name, begin and end (unix ns), facts, error, and key of a linked span."""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add help and options of the command."""
    parser.description = (
        "Sends the stages and trajectories of captured steps as OpenTelemetry spans: a trace "
        "per step, and a "
        "trace per trajectory. A second export sends the same ids."
    )
    parser.epilog = (
        "example: verl-profiling export outputs/run --otlp http://localhost:4318/v1/traces"
    )
    add_paths(parser)
    option(parser, "--otlp URL", "OTLP/HTTP endpoint for traces", required=True)


def run(arguments: argparse.Namespace) -> int:
    """Send every step under the paths; end at the first batch
    that the endpoint does not take whole.
    """
    send = _endpoint(arguments.otlp)
    work = StepByStep(arguments.paths)
    with progress("sending", sum(1 + len(step.inputs.logs) for step in work.steps)) as advance:
        for step in work.steps:
            spans, sent = _spans(step, work, advance), 0
            while batch := list(islice(spans, _BATCH)):
                taken, problem = send(batch)
                sent += taken
                if problem:
                    work.problem(
                        f"{arguments.otlp}: {sent:,} spans of {step.directory} were sent: {problem}"
                    )
                    return work.exit_code
            print(f"{step.directory}: {sent:,} spans sent")
    return work.exit_code


@dataclass(frozen=True)
class _Answer:
    """The endpoint's answer to a batch.

    The exporter reads no body, and takes a redirect for success (seen in 1.45).

    Attributes:
        response: The response of ``requests``.
        body: Begin of the body.
    """

    response: Any
    body: bytes

    @classmethod
    def of(cls, response: Any) -> _Answer:
        """Read the begin of the body."""
        return cls(response, response.raw.read(_LONGEST_BODY, decode_content=True))

    def rejected(self) -> tuple[int, str]:
        """Return the number of spans that the endpoint rejected, and its message."""
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceResponse,
        )

        answer = ExportTraceServiceResponse()
        with suppress(Exception):  # a text that is no answer of the protocol
            answer.MergeFromString(self.body)
        return answer.partial_success.rejected_spans, answer.partial_success.error_message

    def sentence(self) -> str:
        """Return status, target of a redirect, and first words of the answer."""
        response = self.response
        words = " ".join(self.body.decode(errors="replace").split())[:_LONGEST_WORDS]
        parts = (
            f"{response.status_code} {response.reason}",
            response.headers.get("Location"),
            words,
        )
        return "the endpoint answered " + ": ".join(filter(None, parts))


def _endpoint(url: str) -> Callable[[Sequence[tuple[_Facts, _Part]]], tuple[int, str]]:
    """Return the function that sends spans of processes.

    It returns the number of spans that the endpoint took, and why the endpoint did not take all.

    Raises:
        ToolUnavailableError: The exporter is not installed.
    """
    try:
        import requests
        from opentelemetry import trace
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    except ImportError as error:
        remedy = "pip install 'verl-profiling[otel]'"
        raise ToolUnavailableError(f"export needs {error.name}: {remedy}") from error
    scope = InstrumentationScope("verl_profiling", schema_url=_SCHEMA)
    session, answers = requests.Session(), list[_Answer]()
    session.stream = True  # only the begin of a body is read
    session.max_redirects = 0  # an older exporter follows them, to wherever they lead
    session.hooks["response"].append(lambda response, **_: answers.append(_Answer.of(response)))
    exporter, said = OTLPSpanExporter(url, session=session), BufferingHandler(capacity=1000)
    logger = logging.getLogger("opentelemetry")
    logger.addHandler(said)
    logger.propagate = False

    def context(key: _Key) -> trace.SpanContext:
        return trace.SpanContext(_hashed(key[:1], 16), _hashed(key, 8), False, trace.TraceFlags(1))

    def made(process: _Facts, part: _Part) -> ReadableSpan:
        key, parent, name, begin_ns, end_ns, facts, error, link = part
        facts = facts | {"error": error.partition(":")[0] or None}
        return ReadableSpan(
            name,
            context(key),
            context(parent) if parent else None,
            Resource({name: fact for name, fact in process.items() if fact is not None}),
            {
                _NAMES.get(n, f"verl_profiling.{n}"): fact
                for n, fact in facts.items()
                if fact is not None
            },
            links=[trace.Link(context(link))] if link else [],
            kind=trace.SpanKind.CLIENT if name == "chat" else trace.SpanKind.INTERNAL,
            status=trace.Status(trace.StatusCode.ERROR, error) if error else trace.Status(),
            start_time=begin_ns,
            end_time=end_ns,
            instrumentation_scope=scope,
        )

    def send(spans: Sequence[tuple[_Facts, _Part]]) -> tuple[int, str]:
        said.flush()
        answers.clear()
        exporter.export([made(*span) for span in spans])
        if not answers:
            reasons = [record.getMessage() for record in said.buffer] or ["no reason is known"]
            return 0, "; ".join(dict.fromkeys((reasons[0], reasons[-1])))
        if not 200 <= answers[-1].response.status_code < 300:
            return 0, answers[-1].sentence()
        rejected, message = answers[-1].rejected()
        return max(
            len(spans) - rejected, 0
        ), f"{rejected:,} were rejected: {message}" if rejected else ""

    return send


def _hashed(key: _Key, size: int) -> int:
    return int.from_bytes(blake2b(repr(key).encode(), digest_size=size).digest(), "big")


def _spans(
    step: CapturedStep, work: StepByStep, advance: Progress
) -> Iterator[tuple[_Facts, _Part]]:
    """Yield the spans of a captured step with the facts of their processes: stages,
    then trajectories.
    """
    manifest = step.manifest
    if manifest is None:
        work.problem(
            f"{step.directory}: no manifest, so there are no stages and trajectories to send"
        )
        return
    whole = StepSpan(step=manifest.step, begin_ns=manifest.begin_ns, end_ns=manifest.end_ns)
    steps = manifest.step_spans or [whole]

    def root(begin_ns: int) -> _Key:
        """Return the key of the step that began last before a time."""
        found = next((one for one in reversed(steps) if one.begin_ns <= begin_ns), steps[0])
        return ((manifest.run_id, manifest.capture_id, found.step),)

    processes: dict[str, _Facts] = {}
    everyone = [(manifest.controller, manifest.stages)]
    for worker in manifest.workers:  # the stages of the rank that runs the loop are already there
        everyone.append((worker.identity, [] if manifest.runs_the_loop(worker) else worker.stages))
    for who, stages in everyone:
        process: _Facts = {
            "service.namespace": "verl_profiling",
            "service.name": who.role,
            "service.instance.id": who.name,
            "host.name": who.host,
            "process.pid": who.pid,
            "verl_profiling.run_id": manifest.run_id,
        }
        processes[who.name] = process
        for one in steps if who is manifest.controller else ():
            facts: _Facts = {"step": one.step, "policy_version": one.policy_version}
            times = one.begin_ns, one.end_ns
            yield process, (root(one.begin_ns), (), f"step {one.step}", *times, facts, "", ())
        for part in _stages(stages, who.name, root):
            yield process, part
    advance(step)
    requests = requests_by_id(manifest)
    for source, log, problems in read_logs(step.inputs):
        for problem in problems:
            work.problem(problem)
        for part in () if log is None else _trajectories(log, source.offset_ns, requests, root):
            yield processes[source.worker], part
        advance(source)


def _stages(stages: Sequence[StageSpan], lane: str, root: Callable[[int], _Key]) -> Iterator[_Part]:
    """Yield the stages of a process, each below the stage around it."""
    rows: defaultdict[int, list[tuple[int, _Key]]] = defaultdict(list)
    for number, (one, row) in enumerate(stages_by_row(stages)):
        around = rows[row]
        while around and around[-1][0] < one.end_ns:
            around.pop()
        parent = around[-1][1] if around else root(one.begin_ns)
        key = (parent[0], lane, "stage", number)
        around.append((one.end_ns, key))
        yield key, parent, one.name, one.begin_ns, one.end_ns, {}, _FAILED if one.failed else "", ()


def _trajectories(
    log: TrajectoryLog,
    offset_ns: int,
    requests: Mapping[str, list[Request]],
    root: Callable[[int], _Key],
) -> Iterator[_Part]:
    """Yield trajectories as roots of traces, and spans below their trajectory,
    or below the step.
    """
    roots: dict[int, _Key] = {}
    for one in log.trajectories:
        begin_ns, end_ns = one.begin_ns - offset_ns, one.end_ns - offset_ns
        step = root(begin_ns)
        roots[one.id] = key = ((step, log.lane, one.id),)
        facts: _Facts = {
            **one.facts,
            "group": one.group,
            "sample": one.sample,
            "status": one.status,
        }
        facts["operation"] = "invoke_agent"
        error = one.error or _FAILED if one.status == "failed" else ""
        yield key, (), "invoke_agent", begin_ns, end_ns, facts, error, step
    times = {one.id: (one.begin_ns - offset_ns, one.end_ns - offset_ns) for one in log.spans}
    served = joined(((one.id, one.request, *times[one.id]) for one in log.spans), requests)
    turns, keys = Counter[int](), dict[int, _Key]()
    for span in log.spans:
        parent = keys.get(span.parent) or roots.get(span.trajectory) or root(times[span.id][0])
        keys[span.id] = (parent[0], log.lane, span.id)
        turns[span.trajectory] += span.name == _GENERATE
        turn, request = (
            turns[span.trajectory] if span.trajectory in roots else None,
            served.get(span.id),
        )
        facts = {name: getattr(request, name, None) for name in _OF_REQUEST}
        facts |= {
            **span.facts,
            "turn": turn,
            "open": span.open or None,
            "status": span.status or None,
        }
        name, tool = span.name, span.name.partition("tool:")[2]
        if span.name == _GENERATE:
            name = facts["operation"] = "chat"
        elif tool:
            name, facts["operation"], facts["tool"] = f"execute_tool {tool}", "execute_tool", tool
        yield (
            keys[span.id],
            parent,
            name,
            *times[span.id],
            facts,
            _FAILED if span.failed else "",
            (),
        )
