"""Sysctls over a folder that stands for /proc/sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from schemas.host_objects import Sysctl
from services.kernel.sysctls import Sysctls
from services.kernel.transaction import Change
from services.runtime.errors import Permanent, Waiting

FORWARD = Sysctl("net/ipv4/ip_forward", "1")


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "net/ipv4/conf/all").mkdir(parents=True)
    (folder / "net/ipv4/ip_forward").write_text("0\n")
    (folder / "net/ipv4/tcp_rmem").write_text("4096\t131072\t6291456\n")
    return folder


@pytest.fixture
def sysctls(tmp_path: Path, proc: Path) -> Sysctls:
    return Sysctls(tmp_path, proc)


def test_the_old_value_is_kept_before_the_change(tmp_path: Path, proc: Path, sysctls: Sysctls) -> None:
    """A kill between keeping and changing loses nothing: the file is there when the value changes."""
    sysctls.write(Change(None, FORWARD))
    assert (proc / FORWARD.name).read_text() == "1"
    assert '"net/ipv4/ip_forward": "0"' in (tmp_path / "sysctls.json").read_text()
    Sysctls(tmp_path, proc).write(Change(FORWARD, None))
    assert (proc / FORWARD.name).read_text() == "0"


def test_a_kept_sysctl_is_found_without_being_wanted(tmp_path: Path, proc: Path, sysctls: Sysctls) -> None:
    """After a restart with another plan, what we changed shows, so that it can be given back."""
    sysctls.write(Change(None, FORWARD))
    assert Sysctls(tmp_path, proc).read({}) == {FORWARD.key: FORWARD}


def test_ipv6_forwarding_is_given_back_link_by_link(proc: Path, sysctls: Sysctls) -> None:
    """The kernel sets every link's switch with the one for all; a link that forwarded before does so afterwards, and no other."""
    item = Sysctl("net/ipv6/conf/all/forwarding", "1")
    for link, value in {"all": "0", "eth0": "1", "eth1": "0"}.items():
        (proc / f"net/ipv6/conf/{link}").mkdir(parents=True)
        (proc / f"net/ipv6/conf/{link}/forwarding").write_text(value)
    sysctls.write(Change(None, item))
    for link in ("all", "eth0", "eth1"):
        (proc / f"net/ipv6/conf/{link}/forwarding").write_text("0")  # as the kernel will do when all of them is switched off
    (proc / item.name).write_text("1")
    sysctls.write(Change(item, None))
    assert [(proc / f"net/ipv6/conf/{link}/forwarding").read_text() for link in ("all", "eth0", "eth1")] == ["0", "1", "0"]


def test_links_that_learn_routes_go_on_when_they_forward(tmp_path: Path, proc: Path, sysctls: Sysctls) -> None:
    """Before forwarding is switched on, who listens to router advertisements is told to do so all the same; who does not is left alone."""
    item = Sysctl("net/ipv6/conf/all/forwarding", "1")
    before = {"all": "1", "default": "1", "eth0": "1", "eth1": "0", "eth2": "2"}
    for link, value in before.items():
        (proc / f"net/ipv6/conf/{link}").mkdir(parents=True)
        (proc / f"net/ipv6/conf/{link}/accept_ra").write_text(value)
    (proc / item.name).write_text("0")
    sysctls.write(Change(None, item))
    held = {link: (proc / f"net/ipv6/conf/{link}/accept_ra").read_text() for link in before}
    assert held == {**before, "eth0": "2"}
    assert Sysctls(tmp_path, proc).read({}) == {item.key: item}
    Sysctls(tmp_path, proc).write(Change(item, None))
    assert {link: (proc / f"net/ipv6/conf/{link}/accept_ra").read_text() for link in before} == before


def test_white_space_is_no_difference(sysctls: Sysctls, proc: Path) -> None:
    item = Sysctl("net/ipv4/tcp_rmem", "4096  131072 6291456")
    before = (proc / item.name).read_text()
    sysctls.write(Change(None, item))
    assert (proc / item.name).read_text() == before


def test_a_read_only_proc_says_what_to_do(sysctls: Sysctls, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container the error names the sysctl and the two ways out."""

    def refuse(*_arguments: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(Permanent, match=r"net/ipv4/ip_forward.*--sysctl net\.ipv4\.ip_forward=1.*writable"):
        sysctls.write(Change(None, FORWARD))


def test_a_sysctl_of_a_missing_link_waits_and_an_unknown_one_never_comes(sysctls: Sysctls) -> None:
    with pytest.raises(Waiting) as caught:
        sysctls.write(Change(None, Sysctl("net/ipv4/conf/mo.a/rp_filter", "0")))
    assert caught.value.waiting_for == "link mo.a"
    with pytest.raises(Permanent):
        sysctls.write(Change(None, Sysctl("net/ipv4/nonsense", "0")))


@pytest.mark.parametrize("name", ["kernel/panic", "net/../kernel/panic", "/net/ipv4/ip_forward"])
def test_only_the_namespace_s_own_sysctls_are_touched(sysctls: Sysctls, name: str) -> None:
    with pytest.raises(Permanent):
        sysctls.write(Change(None, Sysctl(name, "1")))


def test_a_broken_file_of_old_values_is_never_taken_for_empty(tmp_path: Path, sysctls: Sysctls) -> None:
    (tmp_path / "sysctls.json").write_text("{")
    with pytest.raises(Permanent, match=r"sysctls\.json"):
        sysctls.read({})


def test_the_larger_rp_filter_is_in_force(sysctls: Sysctls, proc: Path) -> None:
    """A link's value is read as the kernel takes it, with that of all links; what is written is the link's alone."""
    (proc / "net/ipv4/conf/mo.1").mkdir()
    own, general = proc / "net/ipv4/conf/mo.1/rp_filter", proc / "net/ipv4/conf/all/rp_filter"
    wanted = Sysctl("net/ipv4/conf/mo.1/rp_filter", "2")
    for link, everybody, in_force in (("0", "0", "0"), ("0", "1", "1"), ("2", "1", "2"), ("1", "2", "2")):
        own.write_text(link)
        general.write_text(everybody)
        assert sysctls.read({wanted.key: wanted})[wanted.key].value == in_force
    sysctls.write(Change(None, wanted))
    assert (own.read_text(), general.read_text()) == ("2", "2")
    every = Sysctl("net/ipv4/conf/all/rp_filter", "0")
    assert sysctls.read({every.key: every})[every.key].value == "2"


def test_who_only_looks_keeps_nothing_and_sees_what_is_wanted(proc: Path, sysctls: Sysctls) -> None:
    """Without a folder of its own, a process reads the plan's sysctls and not those that somebody changed."""
    sysctls.write(Change(None, FORWARD))
    looking = Sysctls(None, proc)
    assert looking.read({}) == {}
    assert looking.read({FORWARD.key: FORWARD}) == {FORWARD.key: FORWARD}
