"""Servers of the tests: started, asked over HTTP, stopped."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPResponse
from pathlib import Path

from vllm_specplug.cli.server_process import Server, stop_all, wait_until_ready

#: Seconds that a server may take to start.
START_SECONDS = 900.0


def tree_server(model: str | Path, speculative: dict, log: Path, *options: str, **more: object) -> Server:
    """Start a server with a speculative configuration, uncompiled."""
    method = ["--enforce-eager", "--speculative-config", json.dumps(speculative)]
    return Server("tested", Path(model), [*options, *method], log, plugins=True, **more)


@contextmanager
def running(*servers: Server) -> Iterator[tuple[Server, ...]]:
    """Wait until the servers answer, and stop them at the end of the block, also if one fails to start."""
    try:
        wait_until_ready(list(servers), START_SECONDS)
        yield servers
    finally:
        stop_all(list(servers))


def post(server: Server, path: str, **body: object) -> HTTPResponse:
    """Send a request about the server's model, unless ``body`` names another, and return the response."""
    data = json.dumps({"model": "demo", **body}).encode()
    request = urllib.request.Request(f"{server.url}{path}", data, {"Content-Type": "application/json"})
    return urllib.request.urlopen(request, timeout=300)


def post_json(server: Server, path: str, **body: object) -> dict:
    """Send a request, and return the JSON of its response."""
    with post(server, path, **body) as response:
        return json.load(response)


def metrics_page(server: Server) -> str:
    """Return the server's metrics, as Prometheus reads them."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=60) as response:
        return response.read().decode()
