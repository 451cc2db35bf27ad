"""What is in force, by what everybody said."""

from msgspec.structs import replace

from schemas import codec, subjects
from schemas.allocation import Remap, Remaps
from schemas.plan import PlanDiff
from schemas.status import ApplyReport, Refusal, UnitReport
from schemas.topology import Cluster, Node
from schemas.values import Address, Name, Prefix
from services.cli.lab.board import Board
from tests.topologies import cluster, peering

ROME = Cluster(name=Name("rome"), pod_prefixes=(Prefix("10.200.0.0/16"),), internal_prefixes=(Prefix("10.80.0.0/16"),))
NODE = Node(name=Name("w1"), cluster=Name("rome"), addresses=(Address("172.18.0.11"),))
WANTED = (ROME, NODE)


def admitted() -> Board:
    board = Board()
    board.tell(subjects.state("Cluster", "rome", "rome"), codec.encode(ROME))
    board.tell(subjects.state("Node", "rome", "w1"), codec.encode(NODE))
    return board


def plan(board: Board, generation: int) -> None:
    board.tell(subjects.plan("rome", "w1"), codec.encode(PlanDiff(Name("rome"), Name("w1"), 1, generation)))


def report(board: Board, generation: int, *units: UnitReport) -> None:
    board.tell(subjects.status("rome", "w1"), codec.encode(ApplyReport(Name("rome"), Name("w1"), 1, generation, units)))


def test_an_object_is_missing_until_it_is_admitted_as_it_is():
    assert Board().missing(WANTED) == ["Cluster/rome/rome is not admitted yet", "Node/rome/w1 is not admitted yet"]
    other = Node(name=Name("w1"), cluster=Name("rome"), addresses=(Address("172.18.0.99"),))
    assert admitted().missing([other])[0] == "Node/rome/w1 is not admitted yet"


def test_a_host_is_missing_until_it_reports_its_newest_plan_as_applied():
    board = admitted()
    assert board.missing(WANTED) == ["host rome/w1 has no plan yet"]
    plan(board, 4)
    assert board.missing(WANTED) == ["host rome/w1 has not reported yet"]
    report(board, 3)
    assert board.missing(WANTED) == ["host rome/w1 holds generation 3 of 4"]
    report(board, 4, UnitReport("peering/a", "", "b", "degraded", "no such device"))
    assert board.missing(WANTED) == ["host rome/w1: peering/a is degraded: no such device"]
    report(board, 4, UnitReport("peering/a", "b", "b", "applied"))
    assert board.missing(WANTED) == []


def test_a_deleted_object_is_forgotten_and_every_change_counts_once():
    board = admitted()
    before = board.version
    board.tell(subjects.state("Node", "rome", "w1"), codec.encode(NODE))
    assert board.version == before
    board.tell(subjects.state("Node", "rome", "w1"), b"")
    board.tell(subjects.state("Node", "rome", "w1"), b"")
    assert board.version == before + 1
    assert set(board.objects) == {"Cluster/rome/rome"}


def test_a_refusal_counts_only_while_the_object_is_not_in_force():
    board = Board()
    board.tell(subjects.refused("Node", "rome", "w1"), codec.encode(Refusal("Node", "rome", "w1", "no cluster rome")))
    assert board.refused(WANTED) == ["Node/rome/w1 was refused: no cluster rome"]
    board.tell(subjects.state("Node", "rome", "w1"), codec.encode(NODE))
    assert board.refused(WANTED) == []


def test_peerings_are_seen_with_what_came_from_pools():
    """A remap from a pool stands where the end would have given it; one that is given stays, and so does what is seen as it is."""
    board = admitted()
    for name in ("rome", "milan"):
        board.tell(subjects.state("Cluster", name, name), codec.encode(cluster(name)))
    rome, milan = peering().ends
    item = peering(ends=(replace(rome, remap_pods=(), remap_external=()), milan))
    board.tell(subjects.state("Peering", "rome", "rome-milan"), codec.encode(item))
    assert item in board.as_seen()
    remap = Remap(Name("rome"), Prefix("10.200.0.0/16"), Prefix("10.96.0.0/16"))
    told = subjects.allocation("remaps", "rome", "rome-milan")
    board.tell(told, codec.encode(Remaps((remap, replace(remap, cluster=Name("milan"))))))
    seen = peering(ends=(replace(rome, remap_pods=(Prefix("10.96.0.0/16"),), remap_external=()), milan))
    assert seen in board.as_seen()
    assert board.objects[item.ref] == item
    board.tell(told, b"")
    assert item in board.as_seen()
