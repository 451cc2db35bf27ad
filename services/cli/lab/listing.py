"""What a host's kernel holds, as nft and ip list it, and changes by hand: what an administrator would type."""

from __future__ import annotations

import json
import subprocess
from typing import Any

from schemas.host_objects import OWN_ALIAS, OWN_PROTOCOL, OWN_TABLE_PREFIX
from schemas.values import FAMILIES, IPV4, Family
from services.runtime.errors import Permanent


def run(namespace: str, *argv: str) -> str:
    """Run a command in a namespace and return what it prints; Permanent with its complaint when it fails."""
    done = subprocess.run(["ip", "netns", "exec", namespace, *argv], capture_output=True, text=True, check=False)
    if done.returncode:
        msg = f"{' '.join(argv)} in {namespace}: {done.stderr.strip()}"
        raise Permanent(msg)
    return done.stdout


def own_tables(namespace: str) -> list[str]:
    """Our nftables tables, by name, sorted."""
    found = _json(namespace, "nft", "-j", "list", "tables")["nftables"]
    names = (item["table"]["name"] for item in found if "table" in item and item["table"]["family"] == "inet")
    return sorted(name for name in names if name.startswith(OWN_TABLE_PREFIX))


def table(namespace: str, family: str, name: str) -> str:
    """One table as nft prints it, without counters."""
    return run(namespace, "nft", "--stateless", "list", "table", family, name)


def chains_with_rules(namespace: str, name: str) -> list[str]:
    """The chains of one of our tables that hold rules, in the table's order."""
    found = _json(namespace, "nft", "-j", "list", "table", "inet", name)["nftables"]
    return list(dict.fromkeys(item["rule"]["chain"] for item in found if "rule" in item))


def own_rules(namespace: str, family: Family = IPV4) -> list[str]:
    """Our policy rules of a family, one line each as ``ip rule delete`` takes them."""
    # Filtered here: iproute2 6.1 takes `list proto 77` for a rule and lists all of them.
    lines = [
        line for line in run(namespace, "ip", f"-{family}", "rule", "list").splitlines() if line.rstrip().endswith(f" proto {OWN_PROTOCOL}")
    ]
    return [f"pref {priority} {rest.strip()}" for priority, _, rest in (line.partition(":") for line in lines)]


def own_routes(namespace: str) -> list[str]:
    """Our routes of all tables, one line each as ``ip route add`` takes them, the next hops of one route in one line."""
    text = run(namespace, "ip", "-details", "route", "list", "table", "all", "proto", str(OWN_PROTOCOL))
    return sorted(" ".join(line.split()) for line in text.replace("\n\t", " ").splitlines())


def own_links(namespace: str) -> list[str]:
    """Our interfaces, by name, sorted."""
    found = json.loads(run(namespace, "ip", "-json", "link", "list"))
    return sorted(item["ifname"] for item in found if item.get("ifalias") == OWN_ALIAS)


def leftovers(namespace: str) -> list[str]:
    """Everything that is ours in this kernel, one word or line each."""
    tables = [f"table {name}" for name in own_tables(namespace)]
    links = [f"link {name}" for name in own_links(namespace)]
    rules = [f"rule {line}" for family in FAMILIES for line in own_rules(namespace, family)]
    return [*tables, *links, *rules, *(f"route {line}" for line in own_routes(namespace))]


def _json(namespace: str, *argv: str) -> Any:  # noqa: ANN401 - what these tools print has no narrower type
    return json.loads(run(namespace, *argv))
