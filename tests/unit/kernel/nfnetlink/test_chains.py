"""When a chain is written rule by rule, and when as a whole."""

from __future__ import annotations

import pytest

from schemas.host_objects import NftChain
from schemas.nft import Counter, Rule, Verdict
from services.kernel.nfnetlink import chains
from services.kernel.nfnetlink.chains import Chains
from services.kernel.nfnetlink.rules import Encoders
from services.kernel.transaction import Change

ACCEPT, DROP, COUNT = (Verdict("accept"),), (Verdict("drop"),), (Counter(), Verdict("accept"))


class AskedError(Exception):
    """The kernel was asked what the chain holds."""


def _asked(_protocol: int) -> None:
    raise AskedError


def chain(*rules: Rule) -> NftChain:
    return NftChain("meshmark.x", "c", rules)


def test_a_chain_of_which_no_rule_stays_is_written_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """What it holds does not matter then, and is not asked for."""
    monkeypatch.setattr(chains, "NetlinkSocket", _asked)
    assert Chains(Encoders()).edit(Change(chain(ACCEPT, DROP), chain(COUNT)), is_certain=False) is None


@pytest.mark.parametrize("wanted", [(ACCEPT, COUNT), (COUNT, COUNT, DROP), (DROP,)], ids=["same place", "another place", "one left"])
def test_a_chain_of_which_a_rule_stays_is_looked_at(wanted: tuple[Rule, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """The handle of a rule that stays is the kernel's to tell."""
    monkeypatch.setattr(chains, "NetlinkSocket", _asked)
    with pytest.raises(AskedError):
        Chains(Encoders()).edit(Change(chain(ACCEPT, DROP), chain(*wanted)), is_certain=False)
