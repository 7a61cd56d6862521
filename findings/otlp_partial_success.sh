#!/usr/bin/env bash
# The Python OTLP exporter reports success for spans that the endpoint says it rejected, and for spans nobody took.
#
# Version:   opentelemetry-exporter-otlp-proto-http 1.45.2
# Behaviour: The protocol lets a server answer 200 with `partial_success`: a count of rejected spans and a message. The
#            exporter returns SUCCESS and never reads the body. It returns SUCCESS, too, when the server redirects the
#            POST to a page that answers a GET with 200: a login page, say. So a trace that lacks spans was "sent".
# Seen:      opentelemetry-exporter-otlp-proto-http 1.45.2: partial success -> SUCCESS; redirect -> SUCCESS
# Fails if one of them is reported as a failure.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/env"
"$folder/env/bin/pip" install --quiet opentelemetry-sdk==1.45.2 opentelemetry-exporter-otlp-proto-http==1.45.2
cd "$folder"
env/bin/python - <<'PYTHON'
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult


class Endpoint(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/moved":
            self.send_response(302)
            self.send_header("Location", "/login")
            self.end_headers()
            return
        answer = ExportTraceServiceResponse()
        answer.partial_success.rejected_spans = 1
        answer.partial_success.error_message = "the span is older than an hour"
        self.answer(answer.SerializeToString())

    def do_GET(self):
        self.answer(b"please log in")

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


class Kept(SpanExporter):
    def __init__(self):
        self.spans = []

    def export(self, spans):
        self.spans += spans
        return SpanExportResult.SUCCESS


server = HTTPServer(("127.0.0.1", 0), Endpoint)
threading.Thread(target=server.serve_forever, daemon=True).start()
kept, provider = Kept(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(kept))
provider.get_tracer("rollout").start_span("generate").end()
results = []
for path in ("v1/traces", "moved"):
    exporter = OTLPSpanExporter(endpoint=f"http://127.0.0.1:{server.server_port}/{path}")
    results.append(exporter.export(kept.spans).name)
assert results == ["SUCCESS", "SUCCESS"], results
package = "opentelemetry-exporter-otlp-proto-http"
print(f"{package} {version(package)}: partial success -> {results[0]}; redirect -> {results[1]}")
PYTHON
