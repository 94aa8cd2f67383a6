"""A real receiver of OTLP/HTTP on loopback: what arrives is parsed as a collector parses it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)

PATH = "/v1/metrics"


class OtlpReceiver:
    """Keeps every request; while its gate is closed, it takes requests and does not answer them."""

    def __init__(self, server: ThreadingHTTPServer) -> None:
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        self.requests: list[ExportMetricsServiceRequest] = []
        self.gate = threading.Event()
        self.gate.set()

    @property
    def values(self) -> dict[str, float]:
        """The newest value of every gauge, by name."""
        return {
            name: point.as_double if point.HasField("as_double") else point.as_int
            for name, _, point in self._gauges()
        }

    @property
    def units(self) -> dict[str, str]:
        return {name: unit for name, unit, _ in self._gauges()}

    @property
    def resource(self) -> dict[str, str]:
        """The attributes of the newest request's resource."""
        (one,) = self.requests[-1].resource_metrics
        return {attribute.key: attribute.value.string_value for attribute in one.resource.attributes}

    def _gauges(self) -> Iterator[tuple[str, str, object]]:
        for request in self.requests:
            for resource in request.resource_metrics:
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        (point,) = metric.gauge.data_points
                        yield metric.name, metric.unit, point


@contextmanager
def otlp_receiver() -> Iterator[OtlpReceiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == PATH
            receiver.requests.append(ExportMetricsServiceRequest.FromString(body))
            receiver.gate.wait(20)
            answer = ExportMetricsServiceResponse().SerializeToString()
            try:
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)
            except ConnectionError:
                pass  # the sender has given up

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    receiver = OtlpReceiver(server)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield receiver
    finally:
        receiver.gate.set()
        server.shutdown()
        server.server_close()
        thread.join()
