"""The images, replayed; and network namespaces for their programs to serve."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import ModuleType

import pytest

CHECKOUT = Path(__file__).parents[3]


@pytest.fixture(scope="session")
def replay() -> ModuleType:
    """deploy/replay.py, which is a script and no package."""
    spec = importlib.util.spec_from_file_location("meshmark_deploy_replay", CHECKOUT / "deploy" / "replay.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def applier_image(replay: ModuleType):
    return replay.build("applier")


@pytest.fixture(scope="session")
def planner_image(replay: ModuleType):
    return replay.build("planner")


@pytest.fixture
def namespace(request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty network namespace with its loopback up and one end of a veth pair, ``up0`` at 192.0.2.1/24."""
    name = f"mmimage{abs(hash(request.node.nodeid)) % 10**6}"
    batch = [
        "link set lo up",
        "link add up0 type veth peer name up1",
        "address add 192.0.2.1/24 dev up0",
        "link set up0 up",
        "link set up1 up",
    ]
    subprocess.run(["ip", "netns", "add", name], check=True)
    try:
        subprocess.run(["ip", "-n", name, "-batch", "-"], input="\n".join(batch), text=True, check=True)
        yield name
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run(replay: ModuleType) -> Iterator[Run]:
    """Run a program of an image to its end, as ``replay.command`` says. Its mounts must be gone afterwards."""

    def run_(image, arguments: Sequence[str], *, timeout_s: float = 60, **options: Mapping) -> subprocess.CompletedProcess[str]:
        command = replay.command(image, arguments, **options)
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL)

    yield run_
    mounted = [line for line in Path("/proc/mounts").read_text().splitlines() if "/.cache/deploy/" in line]
    assert mounted == [], "mounts of an image were left behind"
