"""A network namespace that holds published firewalls, for tests that look at it and send packets through it."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import yaml

from schemas.firewall import FirewallConfiguration
from schemas.host_objects import PlanObject
from schemas.topology import convert_topology
from services.kernel.namespace import enter_new_network
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import Change, changes, repairs, with_dependents
from tests.firewalls import compiled

EXAMPLE = Path(__file__).parent.parent.parent.parent / "examples" / "firewall.yaml"
TABLE = "meshmark.fw.test"
T = TypeVar("T")


class Host:
    """A thread in a network namespace of its own, with an engine; the namespace is gone with it."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter_new_network, thread_name_prefix="firewall")
        self.engine: Nfnetlink = self.call(Nfnetlink)
        self.library: LibNftables = self.call(LibNftables)
        self._reference = Reference(LOADING["nfnetlink"])
        self._dumps: Dumps = self.call(Dumps)
        self._reading = Reading(self._dumps, remembers=True, known=self._reference.known)
        self._listed = Reference(LOADING["libnftables"])
        self.held: dict[str, PlanObject] = {}

    def call(self, work: Callable[..., T], *arguments: Any) -> T:
        return self._thread.submit(work, *arguments).result(60)

    def run(self, *argv: str) -> str:
        done = self.call(lambda: subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20))
        assert done.returncode == 0, f"{argv}: {done.stderr}"
        return done.stdout

    def hold(self, *items: FirewallConfiguration) -> list[Change]:
        """Bring the host to these configurations by a difference; returns it."""
        wanted = {key: found for item in items for key, found in compiled(item).items()}
        batch = changes(self.held, wanted)
        self.call(self.engine.commit, with_dependents(batch, wanted), None)
        self.held = wanted
        return batch

    def differences(self) -> list[Change]:
        """What the kernel holds and should not, or the other way round, by its own bytes; libnftables' listings say the same."""

        def read() -> list[Change]:
            self.engine.looking()
            found = repairs(self.held, self._reference.of(self.held), self._reading.read(self.held))
            listed = repairs(self.held, self._listed.of(self.held), self.library.read_all(self.held))
            assert {item.key for item in found} == {item.key for item in listed}
            return found

        return self.call(read)

    def listing(self, table: str = TABLE) -> str:
        return self.run("nft", "-s", "list", "table", "inet", table)

    def counted(self, table: str = TABLE) -> int:
        """The packets that the first counter of a table counted."""
        found = re.search(r"counter packets (\d+)", self.run("nft", "list", "table", "inet", table))
        assert found
        return int(found[1])

    def close(self) -> None:
        self.call(self.engine.close)
        self.call(self.library.close)
        self.call(self._dumps.close)
        self._thread.shutdown()


def seed() -> dict[str, FirewallConfiguration]:
    found = [convert_topology(item) for item in yaml.safe_load_all(EXAMPLE.read_text(encoding="utf-8"))]
    return {item.name: item for item in found if isinstance(item, FirewallConfiguration)}
