"""Two network namespaces that are brought to the same plans, one by each engine, and compared."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from schemas.host_objects import NftTable, PlanObject
from services.kernel.namespace import enter_new_network
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft.engine import LibNftables
from services.kernel.transaction import Change, Marker, changes, with_dependents
from services.runtime.errors import MeshmarkError
from tests.contract.kernel.raw_dump import dump


class Side:
    """A namespace that dies with its thread, and the engine in it."""

    def __init__(self, engine: type[LibNftables | Nfnetlink]) -> None:
        self._thread = ThreadPoolExecutor(1, initializer=enter_new_network, thread_name_prefix="engine")
        self.engine: Any = self.call(engine)
        self.lister: LibNftables = self.call(LibNftables)

    def call(self, work: Any, *arguments: Any) -> Any:
        return self._thread.submit(work, *arguments).result(60)

    def commit(self, batch: list[Change], marker: Marker | None) -> MeshmarkError | None:
        """The error with which the batch was refused; None when it was made."""
        try:
            self.call(self.engine.commit, batch, marker)
        except MeshmarkError as error:
            return error
        return None

    def listed(self) -> dict[str, object]:
        """All own tables as plans are compared with them, and the marker."""

        def read() -> dict[str, object]:
            self.engine.looking()
            return {**self.lister.read_all({}), "marker": self.lister.marker()}

        return dict(self.call(read))

    def close(self) -> None:
        self.call(self.engine.close)
        self.call(self.lister.close)
        self._thread.shutdown()


class Pair:
    """libnftables on one side, nfnetlink on the other. `by_library` counts what the second one passed on to libnftables."""

    def __init__(self) -> None:
        self.library, self.native = Side(LibNftables), Side(Nfnetlink)
        self.held: dict[str, PlanObject] = {}
        self.by_library = 0
        library = self.native.call(self.native.engine.library)
        passed_on = library.commit

        def commit(batch: list[Change], marker: Marker | None) -> None:
            self.by_library += 1
            passed_on(batch, marker)

        library.commit = commit

    def hold(self, wanted: dict[str, PlanObject], marker: Marker | None = None) -> None:
        """Bring both sides to a plan by a difference, and compare them."""
        batch = with_dependents(changes(self.held, wanted), wanted)
        assert self.library.commit(batch, marker) is None
        assert self.native.commit(batch, marker) is None
        self.held = wanted
        self.compare()

    def compare(self) -> None:
        assert self.native.listed() == self.library.listed()
        assert self.native.call(dump) == self.library.call(dump)

    def reset(self) -> None:
        """Back to nothing, whatever failed before."""
        for side in (self.library, self.native):
            tables = [NftTable(name) for name in side.call(side.lister.tables)]
            assert side.commit([Change(item, None) for item in tables], None) is None
        self.held = {}

    def close(self) -> None:
        self.library.close()
        self.native.close()
