"""The applier's image serves a network namespace with CAP_NET_ADMIN and no other right; the planner's has none at all."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.timeout(900)]

PROOF = Path(__file__).with_name("proof.py")
ONLY_NET_ADMIN = f"{1 << 12:016x}"


def outside(namespace: str, *command: str) -> str:
    return subprocess.run(["ip", "netns", "exec", namespace, *command], check=True, capture_output=True, text=True).stdout


def test_the_applier_starts(applier_image, namespace, run):
    done = run(applier_image, [*applier_image.entrypoint, "--help"], network=namespace)
    assert done.returncode == 0, done.stderr
    assert "applier" in done.stdout


def test_the_applier_has_what_it_needs_and_no_installer(applier_image, run):
    assert applier_image.entrypoint == ("meshmark", "applier")
    assert run(applier_image, ["sh", "-c", "nft --version && command -v wireguard-go && ldconfig -p | grep libnftables"]).returncode == 0
    assert "No module named pip" in run(applier_image, ["/opt/meshmark/bin/python", "-m", "pip", "--version"]).stderr


def test_net_admin_alone_is_enough_for_every_layer_of_the_kernel(applier_image, namespace, run):
    done = run(applier_image, ["/opt/meshmark/bin/python", "/run/proof.py"], network=namespace, mounts={"/run/proof.py": PROOF})
    assert done.returncode == 0, done.stderr
    proof = json.loads(done.stdout)
    assert proof["capabilities"] == ONLY_NET_ADMIN
    assert proof["chown_refused"]
    assert proof["chroot_refused"]
    assert proof["differences"] == []
    assert proof["generation"] == 1
    assert len(proof["public_key"]) == 44

    assert "ip daddr @pods counter packets 0 bytes 0" in outside(namespace, "nft", "list", "table", "inet", "meshmark.image")
    assert "unreachable 10.61.0.0/16" in outside(namespace, "ip", "route", "show", "table", "10")
    assert "fwmark 0x1000/0x3000 lookup 10" in outside(namespace, "ip", "rule")
    assert "vxlan id 7" in outside(namespace, "ip", "-d", "link", "show", "mmvx0")
    assert outside(namespace, "cat", "/proc/sys/net/ipv4/ip_forward").strip() == "1"


def test_the_image_touches_no_other_network_namespace(applier_image, namespace, run):
    before = subprocess.run(["ip", "rule"], check=True, capture_output=True, text=True).stdout
    run(applier_image, ["/opt/meshmark/bin/python", "/run/proof.py"], network=namespace, mounts={"/run/proof.py": PROOF})
    tables = subprocess.run(["nft", "list", "tables"], check=True, capture_output=True, text=True).stdout
    assert "meshmark.image" not in tables
    assert subprocess.run(["ip", "rule"], check=True, capture_output=True, text=True).stdout == before


def test_a_program_without_the_right_is_refused_by_the_kernel(applier_image, namespace, run):
    done = run(applier_image, ["nft", "add", "table", "inet", "x"], network=namespace, capabilities=())
    assert "Operation not permitted" in done.stderr
    assert outside(namespace, "nft", "list", "tables") == ""


def test_what_a_program_leaves_in_its_folders_is_gone_with_it(applier_image, run):
    script = "touch /var/lib/meshmark/x /run/x && ls /var/lib/meshmark /run && sleep 1000 &"
    assert run(applier_image, ["sh", "-c", script], timeout_s=30).returncode == 0
    assert run(applier_image, ["sh", "-c", "ls /var/lib/meshmark /tmp; pgrep sleep"]).stdout == "/tmp:\n\n/var/lib/meshmark:\n"


def test_the_planner_is_a_user_without_rights(planner_image, run):
    assert planner_image.entrypoint == ("meshmark", "planner")
    done = run(planner_image, ["sh", "-c", "id -u; grep CapEff /proc/self/status"], capabilities=())
    assert done.stdout.split() == ["10001", "CapEff:", "0" * 16]
