"""A start is timed to the first yes of ``/readyz``. The services here are small programs that say when."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

from benchmarks.figures.start_up import imported_s, start
from services.cli.lab.processes import Command
from services.runtime.errors import Transient
from services.runtime.server import end

SERVICE = """
import http.server, sys

class Health(http.server.BaseHTTPRequestHandler):
    asked = 0

    def do_GET(self):
        Health.asked += 1
        self.send_response(200 if self.path == "/readyz" and Health.asked > 3 else 503)
        self.end_headers()

http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


@pytest.fixture
def command(tmp_path):
    """``command(program)``: a service that serves health on a free port."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

    def made(program: str) -> Command:
        environment = {"MESHMARK_HTTP": f"127.0.0.1:{port}"}
        return Command("applier.rome.node", [sys.executable, "-c", program, str(port)], environment, Path.cwd(), tmp_path / "log")

    return made


def test_a_service_is_ready_when_it_says_so_and_not_when_it_can_be_asked(command):
    process, found = start(command(SERVICE))
    end(process)
    assert 0 < found.served_s < found.ready_s
    assert process.returncode is not None


def test_a_service_that_ends_says_why(command):
    with pytest.raises(Transient, match=r"applier\.rome\.node was not ready .*: no broker"):
        start(command("import sys; sys.exit('no broker')"))


def test_a_floor_takes_longer_than_an_interpreter_without_imports():
    """A module that is not there is passed over, as it was by the service that looked for it."""
    floor = min(imported_s(("nats", "no_such_module")) for _ in range(3))
    assert floor > min(imported_s(()) for _ in range(3)) > 0
