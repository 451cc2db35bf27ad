"""Runs inside the applier's image: what the kernel adapter can do with CAP_NET_ADMIN alone, in its network namespace. Prints JSON.

The objects stay: the test looks at them from outside.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from schemas.host_objects import LinkAddress, NftChain, NftElement, NftSet, NftTable, PolicyRule, Route, Sysctl, VxlanLink
from schemas.nft import Counter, Match, SetMark
from schemas.values import Address, Mac, Prefix
from services.kernel.linux import LinuxKernel
from services.kernel.transaction import Change, Marker, changes, repairs

TABLE = "meshmark.image"
RULE = (Match("ip daddr", ("@pods",)), Counter(), SetMark(0x1000, 0x3000))
WANTED = {
    item.key: item
    for item in (
        Sysctl("net/ipv4/ip_forward", "1"),
        VxlanLink("mmvx0", 7, Address("192.0.2.1"), Address("192.0.2.2"), Mac("02:00:00:00:00:01"), 1450),
        LinkAddress("mmvx0", Address("10.80.0.1"), 32),
        Route(10, Prefix("10.61.0.0/16"), "unreachable"),
        PolicyRule(1000, 10, 0x1000, 0x3000),
        NftTable(TABLE),
        NftSet(TABLE, "pods", "ipv4_addr", interval=True),
        NftElement(TABLE, "pods", "10.61.0.0/16"),
        NftChain(TABLE, "pre", (RULE,), "filter", "prerouting", -150),
    )
}


def capabilities() -> str:
    status = Path("/proc/self/status").read_text()
    return next(line.split()[1] for line in status.splitlines() if line.startswith("CapEff"))


def refused(action) -> bool:
    try:
        action()
    except PermissionError:
        return True
    return False


def main() -> None:
    kernel = LinuxKernel(Path("/var/lib/meshmark"))
    batch = [change for change in changes({}, WANTED) if change.subject.layer == "nft"]
    for item in WANTED.values():
        if item.layer != "nft":
            kernel.write(Change(None, item))
    kernel.commit(batch, Marker(1, 1, {}))
    left = repairs(WANTED, kernel.reference(WANTED), kernel.read(WANTED))
    answer = {
        "capabilities": capabilities(),
        "uid": os.getuid(),
        "differences": [f"{change.verb} {change.key}" for change in left],
        "generation": kernel.marker().generation,
        "public_key": kernel.public_key(),
        "chown_refused": refused(lambda: os.chown("/run", 1, 1)),
        "chroot_refused": refused(lambda: os.chroot("/")),
    }
    kernel.close()
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
