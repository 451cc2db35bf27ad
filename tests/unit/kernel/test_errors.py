"""Every errno of netlink has its place in the error tree, and faults are injected where asked for."""

from __future__ import annotations

import errno

import pytest

from schemas.host_objects import NftTable, Sysctl
from schemas.plan import unit_tag
from services.kernel.failures import mapped
from services.kernel.fake import FakeHost, FakeKernel
from services.kernel.netlink import NetlinkError, attribute, attributes, message, messages
from services.kernel.nfnetlink import engine
from services.kernel.transaction import Change, Listed, ListedChain
from services.runtime.errors import Conflict, MeshmarkError, OutcomeUnknown, Permanent, Transient, Waiting

ITEM = Sysctl("net/ipv4/ip_forward", "1")


@pytest.mark.parametrize(
    "number,kind",
    [
        (errno.ENODEV, Waiting),
        (errno.ENETDOWN, Waiting),
        (errno.ENETUNREACH, Waiting),
        (errno.EEXIST, Conflict),
        (errno.EPERM, Permanent),
        (errno.EINVAL, Permanent),
        (errno.EBUSY, Transient),
        (errno.ENOMEM, Transient),
        (errno.ENOBUFS, OutcomeUnknown),
        (errno.ETIMEDOUT, OutcomeUnknown),
    ],
)
def test_an_errno_is_one_kind_of_error(number: int, kind: type[MeshmarkError]) -> None:
    assert type(mapped(NetlinkError(number), "write route", "link eth1")) is kind


@pytest.mark.parametrize(
    "number,kind",
    [
        (errno.ENOENT, Conflict),
        (errno.EEXIST, Conflict),
        (errno.EBUSY, Conflict),
        (errno.ENOTEMPTY, Conflict),
        (errno.EPERM, Permanent),
        (errno.EINVAL, Permanent),
        (errno.EOPNOTSUPP, Permanent),
        (errno.ELOOP, Permanent),
        (errno.ENOMEM, Transient),
        (errno.EINTR, Transient),
        (errno.ENOBUFS, OutcomeUnknown),
    ],
)
def test_an_errno_of_a_transaction_is_one_kind_of_error(number: int, kind: type[MeshmarkError]) -> None:
    """Of nftables' messages, where what is missing or there already means that somebody else wrote."""
    error = engine.mapped(number, "cannot add element")
    assert type(error) is kind
    assert "cannot add element" in str(error)


def test_every_errno_is_mapped_with_the_kernel_s_words() -> None:
    for number in errno.errorcode:
        error = mapped(NetlinkError(number, "the kernel's words"), "write route")
        assert "write route: the kernel's words" in str(error)


def test_attributes_survive_a_round_trip() -> None:
    body = attribute(1, b"abc") + attribute(2, attribute(3, b"\1"))
    [(kind, _, sequence, payload)] = list(messages(message(16, body, 0, 7)))
    assert (kind, sequence) == (16, 7)
    found = attributes(payload)
    assert found[1] == b"abc"
    assert attributes(found[2]) == {3: b"\1"}


@pytest.mark.parametrize("data", [b"", b"\0" * 3, b"\0" * 16, b"\3\0\1\0", b"\xff\xff\1\0abc"])
def test_broken_bytes_end_a_walk(data: bytes) -> None:
    """A length that cannot be right stops the reader; it neither loops nor raises."""
    assert list(messages(data)) == []
    assert len(attributes(data)) <= 1


def test_a_refused_change_is_not_made() -> None:
    kernel = FakeKernel(FakeHost(), fail=lambda change: Transient(change.key))
    with pytest.raises(Transient):
        kernel.write(Change(None, ITEM))
    with pytest.raises(Transient):
        kernel.commit([Change(None, NftTable("meshmark.x"))], None)
    assert kernel.host == FakeHost()


def test_an_unknown_outcome_was_made_all_the_same() -> None:
    """The lost answer is the case that callers forget: read back first."""
    kernel = FakeKernel(FakeHost(), fail=lambda change: OutcomeUnknown(change.key))
    with pytest.raises(OutcomeUnknown):
        kernel.commit([Change(None, NftTable("meshmark.x"))], None)
    assert "table meshmark.x" in kernel.read({})


def test_what_is_only_listed_cannot_be_restored() -> None:
    for old in (ListedChain("meshmark.x", "c", ()), Listed("link", "link mo.x", "down")):
        with pytest.raises(ValueError, match="listing only"):
            Change(old, None).inverse()


def test_a_unit_s_tag_never_changes() -> None:
    """Tags are compared across releases: they stand in kernels."""
    assert unit_tag("peering/rome/rome-milan") == "3ee069bb8e09612a"
    assert unit_tag("a") != unit_tag("b")
