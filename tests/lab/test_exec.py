"""``lab exec`` on the running lab: hosts, pods and the underlay, and what it says of a typo."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("place", ["rome/gateway", "rome.worker-1", "rome/shop", "rome/pod/shop", "milan.pod.bank", "underlay"])
def test_commands_run_in_every_namespace_of_the_lab(mesh, place: str):
    """The command sees the namespace's own links, and its exit code is the answer."""
    shown = mesh.meshmark("lab", "exec", place, "--", "ip", "-brief", "link")
    assert shown.returncode == 0
    assert "lo " in shown.stdout
    assert ("mt.0" in shown.stdout) == (place == "rome/gateway")
    assert mesh.meshmark("lab", "exec", place, "--", "sh", "-c", "exit 7").returncode == 7


def test_a_place_that_is_not_there_is_answered_by_those_that_are(mesh):
    """As they are typed."""
    said = mesh.meshmark("lab", "exec", "rome/shob", "--", "true")
    assert said.returncode == 1
    assert "the lab has no rome/shob; there are " in said.stderr
    assert {"rome/gateway", "rome/pod/shop", "underlay"} <= set(said.stderr.replace(",", " ").split())


@pytest.mark.parametrize("place", ["rome/gateway", "rome/pod/shop"])
def test_a_command_that_is_not_there_is_named(mesh, place: str):
    """Nothing of how it is run shows in what is said."""
    said = mesh.meshmark("lab", "exec", place, "--", "nosuchcommand")
    assert said.returncode != 0
    assert "nosuchcommand" in said.stderr
    assert "hosts" not in said.stderr
