"""``meshmark plan`` against the real kernel: what it prints offline is what the lab holds, and what it calls a difference is one."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace

from schemas import codec
from schemas.topology import DriftPolicy
from schemas.values import Address
from tests.lab.conftest import Live, Mesh

pytestmark = pytest.mark.privileged

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "two-clusters.yaml"
TABLE = "meshmark.rome.rome-milan"
SCRATCH = "mmscratch"

OWN_LINK_LOCAL = ("fe80::1", "fe80::2")
DETAILS = ("id", "local", "local6", "remote", "remote6", "port", "learning")

Sections = dict[str, list[str]]


@pytest.fixture
def scratch() -> Iterator[str]:
    """An empty network namespace in which printed lines are typed in."""
    empty(SCRATCH)
    try:
        yield SCRATCH
    finally:
        subprocess.run(["ip", "netns", "delete", SCRATCH], check=True)


def empty(namespace: str) -> None:
    subprocess.run(["ip", "netns", "delete", namespace], check=False, capture_output=True)
    subprocess.run(["ip", "netns", "add", namespace], check=True)


def sections(text: str) -> dict[str, Sections]:
    """A printed plan's lines by host and by section."""
    found: dict[str, Sections] = {}
    for part in re.split(r"^# host ", text, flags=re.MULTILINE)[1:]:
        host, _, body = part.partition("\n")
        blocks = re.split(r"^# (sysctl|ip route: guards|ip rule|nft|ip link and address|wireguard|ip route)\n", body, flags=re.MULTILINE)
        found[host.replace("/", ".")] = {
            name: block.strip("\n").splitlines() for name, block in zip(blocks[1::2], blocks[2::2], strict=True)
        }
    return found


def typed_in(namespace: str, printed: Sections, uplink: Iterable[Address]) -> None:
    """Do as the printed plan says, with a plain tool for each line, in a namespace that is made anew.

    Not every kernel has WireGuard or dummy links: other links stand for the tunnels and the uplink.
    """
    empty(namespace)
    order = ("ip rule", "ip link and address", "ip route", "ip route: guards")
    lines = [line for name in order for line in printed[name]]
    lines = [line.replace("type wireguard", f"type vxlan id {number} dstport {number}") for number, line in enumerate(lines, 1)]
    addresses = [f"address add {address.host_prefix} dev eth0" for address in uplink]
    start = ["link set lo up", "link add eth0 type vxlan id 5000 dstport 5000", *addresses, "link set eth0 up"]
    inside = ["ip", "netns", "exec", namespace]
    without = int(not any(line.startswith("ip -6") for line in lines))
    names = [f"net.ipv6.conf.{what}.disable_ipv6={without}" for what in ("all", "default")]
    subprocess.run([*inside, "sysctl", "-qw", *names], check=True)
    for family in ("", "-6 "):
        # `ip` takes the family of a batch for the family of its lines.
        words = [line.removeprefix("ip ").removeprefix(family) for line in lines if line.startswith("ip -6") == bool(family)]
        script = "\n".join([*(start if not family else []), *words])
        subprocess.run(["ip", *family.split(), "-n", namespace, "-batch", "-"], input=script, check=True, text=True)
    subprocess.run([*inside, "nft", "-f", "-"], input="\n".join(printed["nft"]), check=True, text=True)


def listed(namespace: str, *command: str) -> list:
    done = subprocess.run(["ip", "netns", "exec", namespace, *command], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def nft(namespace: str) -> list:
    """The table as the kernel lists it: no handles, no counts; rules in order, elements sorted."""
    found = listed(namespace, "nft", "-j", "list", "table", "inet", TABLE)["nftables"]
    return sorted((plain(item) for item in found if "metainfo" not in item), key=lambda item: (kind(item), *place(item)))


def kind(item: dict) -> int:
    return ("table", "set", "map", "chain", "rule").index(next(iter(item)))


def place(item: dict) -> tuple[str, str]:
    """By name; rules by chain only, so that a stable sort keeps their order."""
    body = next(iter(item.values()))
    return body.get("chain", ""), "" if "rule" in item else body["name"]


def plain(value):
    if isinstance(value, dict):
        cleaned = {key: plain(part) for key, part in value.items() if key != "handle"}
        if "counter" in cleaned:
            cleaned["counter"] = None
        for name in ("elem", "set"):
            if isinstance(cleaned.get(name), list):
                cleaned[name] = sorted(cleaned[name], key=json.dumps)
        return cleaned
    return [plain(part) for part in value] if isinstance(value, list) else value


def rules(namespace: str) -> list:
    return [rule for family in ("-4", "-6") for rule in listed(namespace, "ip", family, "-j", "rule", "list", "protocol", "77")]


def routes(namespace: str) -> list:
    return sorted(listed(namespace, "ip", "-j", "-d", "route", "list", "table", "all", "protocol", "77"), key=json.dumps)


def links(namespace: str) -> dict[str, list]:
    """Overlay links with all that they are made of, tunnels with their MTU; and the addresses of both."""
    found = {}
    for item in listed(namespace, "ip", "-j", "-d", "address"):
        name = item["ifname"]
        if name.startswith(("mo.", "mt.")):
            given = [(entry["local"], entry["prefixlen"]) for entry in item["addr_info"]]
            addresses = sorted(entry for entry in given if entry[0] in OWN_LINK_LOCAL or not entry[0].startswith("fe80:"))
            about = {key: item["linkinfo"]["info_data"].get(key) for key in DETAILS}
            found[name] = [item["mtu"], "UP" in item["flags"], addresses, *([item["address"], about] if name.startswith("mo.") else [])]
    return found


async def test_what_is_printed_offline_is_what_the_lab_holds(mesh, live, scratch: str):
    """Each host's printed nft text, `ip` lines, sysctls and WireGuard ports, typed into an empty namespace, list as the lab's host does."""
    await printed_is_held(mesh, live, EXAMPLE, scratch)


async def printed_is_held(mesh: Mesh, live: Live, example: Path, scratch: str) -> None:
    done = await live.meshmark("plan", "-f", str(example))
    assert done.returncode == 0, done.stderr
    printed = sections(done.stdout)
    assert sorted(printed) == mesh.hosts
    for host, parts in printed.items():
        ours, theirs = scratch, f"mm.{host}"
        typed_in(ours, parts, mesh.object(f"{'Gateway' if 'gateway' in host else 'Node'}/{host.replace('.', '/')}").addresses)
        assert nft(ours) == nft(theirs), host
        assert rules(ours) == rules(theirs), host
        assert routes(ours) == routes(theirs), host
        assert links(ours) == links(theirs), host
        for line in parts["sysctl"]:
            name, _, value = line.partition("=")
            assert mesh.run(host, "cat", f"/proc/sys/{name}").split() == value.split(), line
        ports = re.findall(r"^ListenPort = (\d+)$", "\n".join(parts.get("wireguard", [])), re.MULTILINE)
        assert len(ports) == (mesh.object("Peering/rome/rome-milan").tunnels if "gateway" in host else 0)
        listening = mesh.run(host, "ss", "-Hlun", "sport", ">=", ":51840")
        assert all(f":{port} " in listening for port in ports), listening


async def test_a_lab_that_came_up_differs_in_nothing(mesh, live):
    """`plan --diff` finds no difference between any host's kernel and its plan; nor do the files that the lab was made of make one."""
    for arguments in ([], ["-f", str(EXAMPLE)]):
        done = await live.meshmark("plan", *arguments, "--diff", "--output", "json")
        assert done.returncode == 0, done.stdout + done.stderr
        found = json.loads(done.stdout)
        assert found["different"] is False
        # Hosts that other tests had and removed are compared too: they are to hold nothing.
        assert {host.replace(".", "/") for host in mesh.hosts} <= found["hosts"].keys()
        assert not any(found["hosts"].values())


async def test_a_dry_run_says_what_a_change_would_do(mesh, live, tmp_path: Path):
    """`plan --diff -f` with one more tunnel names what would come, with exit code 2, and changes nothing."""
    before = {host: mesh.own_state(host) for host in mesh.hosts}
    wider = [replace(item, tunnels=4) if item.kind == "Peering" else item for item in mesh.topology]
    file = tmp_path / "wider.yaml"
    file.write_text(yaml.safe_dump_all([codec.to_builtins(item) for item in wider]))
    done = await live.meshmark("plan", "-f", str(file), "--diff", "--output", "json")
    assert done.returncode == 2, done.stdout + done.stderr
    found = json.loads(done.stdout)["hosts"]
    assert [host for host, lines in found.items() if lines] == ["milan/gateway", "rome/gateway"]
    assert "+ link mt.3" in found["rome/gateway"]
    assert not any(line.startswith("-") for line in found["rome/gateway"])
    assert {host: mesh.own_state(host) for host in mesh.hosts} == before


async def test_what_a_hand_removes_is_shown_and_repaired_when_wanted(mesh, live, eventually):
    """With the policy to alert, what somebody removes is told, stays away, and is what `plan --diff` shows (exit code 2), layer by layer;
    with the policy to repair it comes back, and the differences are resolved."""
    rome = mesh.object("Cluster/rome/rome")
    before = mesh.own_state("rome.gateway")
    await live.publish(replace(rome, drift=DriftPolicy(nft="alert", rule="alert", route="alert")))
    first = len(live.board.drift)

    def told(state: str) -> set[str]:
        return {event.layer for event in live.board.drift[first:] if event.state == state and event.host == "gateway"}

    mesh.run("rome.gateway", "ip", "rule", "delete", "priority", "900")
    mesh.run("rome.gateway", "ip", "route", "delete", "10.200.1.0/24", "table", "7002")
    mesh.run("rome.gateway", "nft", "delete", "element", "inet", TABLE, "sources", "{ 10.70.0.0/16 }")
    await eventually(lambda: told("raised") == {"rule", "route", "nft"}, "drift is raised on each layer", lambda: live.board.drift[first:])

    done = await live.meshmark("plan", "rome/gateway", "--diff", "--output", "json")
    assert done.returncode == 2, done.stdout + done.stderr
    shown = json.loads(done.stdout)["hosts"]["rome/gateway"]
    assert len(shown) == 3, shown
    assert all(line.startswith("~ ") and "(kernel: not there)" in line for line in shown), shown
    assert {line.split()[1] for line in shown} == {"rule", "route", "element"}
    assert (await live.meshmark("plan", "milan/gateway", "--diff")).returncode == 0
    assert (await live.meshmark("drift")).returncode == 2
    assert not told("resolved")
    assert mesh.own_state("rome.gateway") != before

    await live.publish(rome)
    await eventually(lambda: told("resolved") == {"rule", "route", "nft"}, "drift is resolved", lambda: live.board.drift[first:])
    assert mesh.own_state("rome.gateway") == before
    done = await live.meshmark("plan", "--diff")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (await live.meshmark("drift")).returncode == 0
    assert len(await live.carries()) == 24
