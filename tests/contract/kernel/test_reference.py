"""What a wanted chain looks like in the kernel does not depend on where it was asked, and asking leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

from schemas.host_objects import NftChain, PlanObject
from schemas.nft import Match, Verdict
from services.kernel.events import EventSource, KernelEvent
from services.kernel.namespace import enter_new_network
from services.kernel.nfnetlink.engine import Nfnetlink
from services.kernel.nft import reference
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.kernel.nft.skeleton import Skeleton
from services.kernel.nft.steps import SCRATCH_PREFIX
from services.kernel.nftread.dumps import Dumps
from services.kernel.nftread.loading import ByMessages
from services.kernel.nftread.reading import Reading
from services.kernel.transaction import Change, Held, ListedChain
from services.planner.state import HostId
from services.runtime.errors import MeshmarkError, Permanent, Transient
from services.runtime.settings import NftEngineName
from tests.topologies import MILAN_GATEWAY, ROME_GATEWAY, settled_plans, two_clusters

pytestmark = pytest.mark.privileged

T = TypeVar("T")
Inside = Callable[[Callable[[], T]], T]
HOSTS = (ROME_GATEWAY, MILAN_GATEWAY, HostId("rome", "worker-1"), HostId("milan", "worker-2"))
FOREIGN_DORMANT = "add table inet sleeping { flags dormant; }\nadd table inet meshmark.own\n"


@pytest.fixture
def inside() -> Iterator[Inside[Any]]:
    """Calls a function in one thread that has a network namespace of its own; both are gone with the test."""
    with ThreadPoolExecutor(1, initializer=enter_new_network) as thread:
        yield lambda work: thread.submit(work).result(60)


@pytest.fixture(params=["nfnetlink", "libnftables"])
def engine(request: pytest.FixtureRequest) -> NftEngineName:
    """By whose messages or text it is asked."""
    return request.param


@pytest.fixture
def net_admin_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container: no namespace can be made."""

    def refuse(*_arguments: object) -> list[object]:
        raise PermissionError

    monkeypatch.setattr(reference, "in_thread", refuse)
    monkeypatch.setattr(reference, "in_user_namespace", refuse)


def firewall(host: HostId) -> dict[str, PlanObject]:
    return {key: item for key, item in settled_plans(two_clusters())[host].objects().items() if item.layer == "nft"}


def ask(engine: NftEngineName, wanted: dict[str, PlanObject]) -> dict[str, Held]:
    return Reference(LOADING[engine]).of(wanted)


def live(engine: NftEngineName, wanted: dict[str, PlanObject]) -> dict[str, Held]:
    """The live tables as they are read."""
    if engine == "libnftables":
        return LibNftables().read_all(wanted)
    with contextlib.closing(Dumps()) as dumps:
        return Reading(dumps, remembers=False).read(wanted)


def chains(found: dict[str, Held]) -> dict[str, Held]:
    return {key: item for key, item in found.items() if isinstance(item, ListedChain)}


@pytest.mark.parametrize("host", HOSTS, ids=str)
def test_a_dormant_table_and_a_scratch_namespace_list_every_chain_alike(
    host: HostId, engine: NftEngineName, inside: Inside[dict[str, Held]], request
) -> None:
    """For each chain that the planner plans, and again when asked again."""
    wanted = firewall(host)
    in_namespace = inside(lambda: ask(engine, wanted))
    request.getfixturevalue("net_admin_only")
    dormant = [inside(lambda: ask(engine, wanted)) for _ in range(5)]
    assert chains(in_namespace).keys() == {item.key for item in wanted.values() if isinstance(item, NftChain)}
    assert dormant == [in_namespace] * 5


@pytest.mark.parametrize("host", HOSTS[1:3], ids=str)
@pytest.mark.usefixtures("net_admin_only")
def test_what_a_dormant_table_says_is_what_the_live_table_says(host: HostId, engine: NftEngineName, inside: Inside[object]) -> None:
    """The reference made beside the live tables equals what is read of them."""
    wanted = firewall(host)

    def work() -> tuple[dict[str, Held], dict[str, Held]]:
        with contextlib.closing(Nfnetlink()) as writer:
            writer.commit([Change(None, item) for item in wanted.values()], None)
        return chains(ask(engine, wanted)), chains(live(engine, wanted))

    said, held = inside(work)
    assert said == held


@pytest.mark.usefixtures("net_admin_only")
def test_a_dormant_table_is_gone_when_the_answer_is_there(engine: NftEngineName, inside: Inside[object]) -> None:
    """Also beside somebody else's dormant table, which stays."""
    wanted = firewall(ROME_GATEWAY)

    def work() -> list[str]:
        library = LibNftables()
        library.run(FOREIGN_DORMANT)
        ask(engine, wanted)
        return _tables(library)

    assert inside(work) == ["meshmark.own", "sleeping"]


@pytest.mark.usefixtures("net_admin_only")
@pytest.mark.parametrize("broken", ["everything", "the listing"])
def test_a_dormant_table_is_gone_when_asking_failed(broken: str, engine: NftEngineName, inside: Inside[object], monkeypatch) -> None:
    """Whether the reading fails, or even the removal: the kernel drops the table with the socket that owns it."""
    wanted = firewall(ROME_GATEWAY)
    run, loaded = LibNftables.run, []

    def broken_run(self: LibNftables, text: str) -> str:
        if loaded and (broken == "everything" or text.startswith("list chain")):
            raise Transient(broken)
        output = run(self, text)
        loaded.extend([text] * text.startswith("add table"))
        return output

    def broken_read(*_: object) -> list[ListedChain]:
        raise Transient(broken)

    def work() -> list[str]:
        with monkeypatch.context() as patched:
            patched.setattr(LibNftables, "run", broken_run)
            patched.setattr(ByMessages, "_read", broken_read)
            with pytest.raises(Transient):
                ask(engine, wanted)
        return _tables(LibNftables())

    assert inside(work) == []


@pytest.mark.usefixtures("net_admin_only")
def test_chains_that_the_kernel_refuses_leave_no_dormant_table(engine: NftEngineName, inside: Inside[object]) -> None:
    """A rule that names a set which is not there is Permanent, and nothing stays."""
    chain = NftChain("meshmark.own", "c", ((Match("ip saddr", ("@nowhere",)), Verdict("accept")),))

    def work() -> list[str]:
        with pytest.raises(Permanent):
            ask(engine, {chain.key: chain})
        return _tables(LibNftables())

    assert inside(work) == []


def test_a_scratch_table_is_no_table_of_a_host(engine: NftEngineName, inside: Inside[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """While it is there, listings leave it out, and nobody else can change or empty it."""
    chain = NftChain("meshmark.own", "c", ((Verdict("drop"),),), "filter", "prerouting", 0)
    seen: dict[str, object] = {}

    def look() -> None:
        if not seen:
            other = LibNftables()
            name = next(name for name in _tables(other) if name.startswith(SCRATCH_PREFIX))
            seen["own tables"] = other.tables()
            with pytest.raises(MeshmarkError, match="not permitted"):
                other.run(f"delete table inet {name}")

    def watched(cls: type, name: str) -> None:
        method = getattr(cls, name)

        def call(self: object, argument: str) -> object:
            if argument.startswith((SCRATCH_PREFIX, "list chain")):
                look()
            return method(self, argument)

        monkeypatch.setattr(cls, name, call)

    def work() -> list[ListedChain]:
        LibNftables().run(FOREIGN_DORMANT)
        watched(LibNftables, "list_json") if engine == "libnftables" else watched(ByMessages, "_read")
        return reference.in_dormant_table(LOADING[engine], Skeleton((), (chain,)))

    inside(work)
    assert seen["own tables"] == ["meshmark.own"]


ASK = """
import sys
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import Reference
from services.planner.state import HostId
from tests.contract.kernel.test_reference import firewall
kept, wanted = LibNftables(), firewall(HostId("rome", "gateway"))
print("ready", flush=True)
sys.stdin.readline()
answers = []
for _ in range(40):
    asked = Reference(LOADING[sys.argv[1]])
    asked._allowed = []
    answers.append(asked.of(wanted))
assert answers == [answers[0]] * 40
"""


@pytest.mark.any_kernel
def test_two_services_may_ask_at_once(engine: NftEngineName, inside: Inside[Any]) -> None:
    """An applier and an auditor in one network namespace ask for the same tables and do not meet."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = inside(lambda: [subprocess.Popen([sys.executable, "-c", ASK, engine], **pipe) for _ in range(2)])
    try:
        for process in both:
            assert process.stdout.readline() == "ready\n", process.stderr.read()
        for process in both:
            process.stdin.write("\n")
            process.stdin.flush()
        for process in both:
            _, error = process.communicate(timeout=60)
            assert process.returncode == 0, error
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert inside(lambda: _tables(LibNftables())) == []


@pytest.mark.usefixtures("net_admin_only")
def test_asking_wakes_no_audit(engine: NftEngineName, inside: Inside[KernelEvent]) -> None:
    """The first event that is heard is the one of an own table which another process makes after all that asking."""
    wanted = firewall(ROME_GATEWAY)

    async def first_event() -> KernelEvent:
        async with EventSource() as events:
            for _ in range(3):
                ask(engine, wanted)
            subprocess.run(["nft", "add table inet meshmark.own"], check=True)  # noqa: ASYNC221 - nothing else is to run
            return await anext(events)

    event = inside(lambda: asyncio.run(first_event()))
    assert (event.layer, event.kind, event.process_name) == ("nft", "transaction", "nft")


def _tables(engine: LibNftables) -> list[str]:
    """All inet tables by the text listing, whose words do not depend on flags."""
    engine._context.set_json_output(False)
    try:
        return sorted(line.split()[-1] for line in engine.run("list tables inet").splitlines())
    finally:
        engine._context.set_json_output(True)
