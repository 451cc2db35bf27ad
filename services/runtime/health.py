"""Health over HTTP, from a thread: ``/healthz`` (does the loop turn?), ``/readyz`` (named conditions), ``/metrics``."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, make_wsgi_app

from services.runtime.errors import Permanent
from services.runtime.settings import parse_address

STUCK_S = 30.0
"""An event loop that has not turned for so long counts as dead."""


class Readiness:
    """Named conditions: ``ready("plan")`` says that one is met, ``ready("plan", "why not")`` that it is not. All must be met.

    Safe to read and write from any thread.
    """

    def __init__(self, *names: str) -> None:
        self._reasons: dict[str, str] = dict.fromkeys(names, "not yet")
        self._lock = threading.Lock()
        self._beat_s = time.monotonic()

    def __call__(self, name: str, reason: str = "") -> None:
        with self._lock:
            self._reasons[name] = reason

    def beat(self) -> None:
        """Say that the event loop turns."""
        self._beat_s = time.monotonic()

    @property
    def ready(self) -> bool:
        return not any(self.reasons().values())

    def alive(self, now_s: float) -> bool:
        return now_s - self._beat_s < STUCK_S

    def reasons(self) -> dict[str, str]:
        """Conditions and why each is not met; an empty text means that it is."""
        with self._lock:
            return dict(self._reasons)


class HealthServer:
    """The HTTP server. `address` is ``host:port``; with port 0, `port` says which was taken. Permanent when it cannot be bound."""

    def __init__(self, address: str, registry: CollectorRegistry, readiness: Readiness) -> None:
        self._application = application(registry, readiness)
        host, port = parse_address(address)
        try:
            self._server = make_server(host, port, self._application, _Server, _Quiet)
        except OSError as error:
            msg = f"cannot listen on {address} for health and metrics: {error.strerror}; set `http` to another address, or port 0"
            raise Permanent(msg) from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="health", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])


def application(registry: CollectorRegistry, readiness: Readiness) -> Callable[..., Iterable[bytes]]:
    """The WSGI application behind the server."""
    metrics = make_wsgi_app(registry)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            found: Iterable[bytes] = metrics(environ, start)
            return found
        if path == "/healthz":
            alive = readiness.alive(time.monotonic())
            return _json(start, {"alive": alive}, ok=alive)
        if path == "/readyz":
            reasons = readiness.reasons()
            conditions = {name: reason or "met" for name, reason in reasons.items()}
            return _json(start, {"ready": not any(reasons.values()), "conditions": conditions}, ok=not any(reasons.values()))
        start("404 Not Found", [("Content-Type", "text/plain")])
        return [b"there are /healthz, /readyz and /metrics\n"]

    return answer


def _json(start: Callable[..., Any], body: dict[str, object], *, ok: bool) -> Iterable[bytes]:
    start("200 OK" if ok else "503 Service Unavailable", [("Content-Type", "application/json")])
    return [json.dumps(body).encode() + b"\n"]


class _Server(ThreadingMixIn, WSGIServer):
    # A slow reader of /metrics must not keep a probe waiting.
    daemon_threads = True


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        """Say nothing: a line for each probe is noise."""
