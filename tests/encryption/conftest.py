"""The cluster that a module's tests share, over an underlay of each family in turn, and what is counted for the suite's closing line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

import pytest

from schemas.values import FAMILIES, IPV4, Family
from services.cli.lab import namespaces
from tests.encryption.site import Mode, Site
from tests.hosts import NO_GENEVE, has_geneve

Made = Callable[[Mode], Site]


@pytest.fixture(scope="module")
def underlay(request: pytest.FixtureRequest) -> Family:
    """The family of the nodes' addresses; IPv4 where a module does not ask for both."""
    found: Family = getattr(request, "param", IPV4)
    return found


@pytest.fixture(scope="module")
def pods(request: pytest.FixtureRequest) -> Collection[Family]:
    """The families of pods' addresses; both where a module does not ask for less."""
    found: Collection[Family] = getattr(request, "param", FAMILIES)
    return found


@pytest.fixture(scope="module")
def site(underlay: Family, pods: Collection[Family], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    if namespaces.existing():
        pytest.skip("a lab is up on this machine")
    found = Site(tmp_path_factory.mktemp("site"), underlay, pods)
    try:
        found.make()
        yield found
    finally:
        found.close()


@pytest.fixture
def turned(site: Site) -> Made:
    """Brings the cluster to a mode, where this kernel has what it takes."""

    def turn(mode: Mode) -> Site:
        if mode.way == "geneve" and not has_geneve("mm.underlay"):
            pytest.skip(NO_GENEVE)
        site.turn_to(mode)
        return site

    return turn


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What switches of modes have lost, as their tests recorded it."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    found = [value for report in reports for name, value in report.user_properties if name == "lost"]
    if found:
        terminalreporter.section("lost while a cluster that encrypts was changed")
        for line in found:
            terminalreporter.write_line(str(line))
