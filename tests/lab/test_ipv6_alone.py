"""A lab without IPv4: neither pods nor hosts have it, and hosts reach the broker by IPv6."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from schemas import codec
from services.cli.lab import listing
from services.cli.lab.layout import PREFIX
from tests.lab.conftest import connected, up
from tests.topologies import dual_stack, without_ipv4

pytestmark = pytest.mark.privileged


async def test_two_clusters_of_ipv6_alone(tmp_path: Path) -> None:
    """All pods reach each other, every host holds its plan, and nothing of ours is of IPv4."""
    example = tmp_path / "ipv6-alone.yaml"
    example.write_text(yaml.safe_dump_all([codec.to_builtins(without_ipv4(item)) for item in dual_stack()]))
    with up(example, tmp_path / "state") as mesh:
        async with connected(mesh) as live:
            checks = await live.carries()
            assert len(checks) == 12 * 2
            assert all(check.name.startswith(("udp6 ", "tcp6 ")) for check in checks)
            for host in mesh.hosts:
                assert listing.own_rules(f"{PREFIX}{host}") == []
                assert mesh.run(host, "ip", "-4", "route", "show", "table", "all", "proto", "77") == ""
                assert "ipv4_addr" not in mesh.run(host, "nft", "list", "ruleset")
            assert (await live.meshmark("plan", "--diff")).returncode == 0
