"""The embedded server as a process: started, reloaded, stopped, and never left behind."""

import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from services.runtime.errors import Permanent
from services.runtime.server import Server, find_binary


def test_the_configuration_is_for_its_owner_only(server):
    """The file that holds passwords has mode 0600."""
    assert stat.S_IMODE((server.directory / "nats-server.conf").stat().st_mode) == 0o600


def test_a_restart_keeps_the_port(server):
    """A server with any free port comes back on the same one, so that clients find it."""
    url = server.url
    server.stop()
    server.start()
    assert server.url == url
    assert not url.endswith(":-1")


def test_stop_leaves_no_process(config, tmp_path):
    """After stop, and after a second stop, the process is gone."""
    server = Server(config, tmp_path / "other")
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(Permanent, match="not running"):
        server.reload(config)


def test_a_bad_configuration_says_why(config, tmp_path):
    """A server that ends at once gives its last words."""
    import msgspec

    server = Server(msgspec.structs.replace(config, anonymous="nobody"), tmp_path / "other")
    with pytest.raises(Permanent, match="nobody"):
        server.start()
    assert server.pid is None


def test_a_prefix_goes_before_the_command(config, tmp_path):
    """The server may be started through another command, as one that enters a network namespace."""
    with Server(config, tmp_path / "other", prefix=["env", "MARK=1"]) as server:
        assert b"MARK=1" in Path(f"/proc/{server.pid}/environ").read_bytes()


def test_the_server_dies_with_its_owner(config, tmp_path):
    """Even an owner that is killed outright leaves no server behind."""
    program = f"""
import msgspec, pathlib, time
from services.runtime.accounts import ServerConfig
from services.runtime.server import Server
config = msgspec.json.decode({msgspec_text(config)!r}, type=ServerConfig)
server = Server(config, pathlib.Path({str(tmp_path / "other")!r}))
server.start()
print(server.pid, flush=True)
time.sleep(60)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, cwd=Path(__file__).parents[3]) as owner:
        pid = int(owner.stdout.readline())
        assert Path(f"/proc/{pid}").exists()
        os.kill(owner.pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while alive(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not alive(pid)


def alive(pid):
    """Whether the process runs; one that waits to be reaped by its new parent does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def msgspec_text(value):
    import msgspec

    return msgspec.json.encode(value).decode()


def test_find_binary():
    """The binary of this environment is found."""
    assert Path(find_binary()).name == "nats-server"
