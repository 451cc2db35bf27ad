"""Any name is one token; what is built is what is parsed; consumers of different hosts have different names."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas import subjects

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=40)
ODD = ["a.b", "50%", "%2E", "%", "*", ">", "a b", "\t", "né", "名", "a/b", "", "-", "a=b", "\0", "\x7f"]


@pytest.mark.parametrize(
    "name,token",
    [
        ("node-1", "node-1"),
        ("ip-10-0-0-1.ec2.internal", "ip-10-0-0-1%2Eec2%2Einternal"),
        ("50%", "50%25"),
        ("*", "%2A"),
        (">", "%3E"),
        ("a b", "a%20b"),
        ("é", "%C3%A9"),
        ("", "%"),
    ],
)
def test_a_token_shows_what_it_can(name: str, token: str):
    assert subjects.token(name) == token
    assert subjects.untoken(token) == name


@pytest.mark.parametrize("name", ODD)
def test_an_odd_name_is_one_token_and_comes_back(name: str):
    subject = subjects.topology("Node", name, name)
    assert re.fullmatch(r"mesh\.topology\.node\.[!-~]+\.[!-~]+", subject)
    assert len(subject.split(".")) == 5
    assert not set("*>") & set(subject)
    assert subjects.parse(subject) == ("mesh.topology", ("node", name, name))


@given(NAMES)
def test_every_name_comes_back(name: str):
    token = subjects.token(name)
    assert re.fullmatch(r"[!-~]+", token)
    assert not set(".*>") & set(token)
    assert subjects.untoken(token) == name


@given(NAMES, NAMES)
def test_different_names_are_different_tokens(one: str, other: str):
    assert (subjects.token(one) == subjects.token(other)) == (one == other)


@pytest.mark.parametrize(
    "subject,stream,tokens",
    [
        (subjects.topology("Cluster", "rome", "rome"), subjects.TOPOLOGY, ("cluster", "rome", "rome")),
        (subjects.state("PublicKey", "rome", "n.1"), subjects.STATE, ("publickey", "rome", "n.1")),
        (subjects.refused("Node", "rome", "n.1"), subjects.REFUSED, ("node", "rome", "n.1")),
        (subjects.allocation("vni", "rome", "n.1"), subjects.ALLOCATION, ("vni", "rome", "n.1")),
        (subjects.plan("rome", "n.1"), subjects.PLAN, ("rome", "n.1")),
        (subjects.snapshot("rome", "n.1", "head"), subjects.SNAPSHOT, ("rome", "n.1", "head")),
        (subjects.status("rome", "n.1"), subjects.STATUS, ("rome", "n.1")),
        (subjects.drift("rome", "n.1", "nft"), subjects.DRIFT, ("rome", "n.1", "nft")),
        (subjects.deadletter("rome", "a.b", "applier"), subjects.DEADLETTER, ("rome", "a.b", "applier")),
        (subjects.command("rome", "n.1", "repair"), subjects.COMMAND, ("rome", "n.1", "repair")),
    ],
)
def test_what_is_built_is_what_is_parsed(subject: str, stream: str, tokens: tuple[str, ...]):
    assert subjects.parse(subject) == (stream, tokens)


def test_a_foreign_subject_is_parsed_without_an_error():
    assert subjects.parse("mesh") == ("mesh", ())
    for odd in ("%FF", "%70ublickey", "%2e", "a*"):
        with pytest.raises(ValueError, match="write"):
            subjects.parse(f"a.b.{odd}")


@given(NAMES, NAMES)
def test_a_consumer_name_has_nothing_that_nats_forbids(cluster: str, host: str):
    assert re.fullmatch(r"[^\s.*>/\\]+", subjects.consumer("applier", cluster, host))


@given(st.tuples(NAMES, NAMES), st.tuples(NAMES, NAMES))
def test_consumers_of_different_hosts_have_different_names(one: tuple[str, str], other: tuple[str, str]):
    assert (subjects.consumer("applier", *one) == subjects.consumer("applier", *other)) == (one == other)


def test_a_dash_in_a_name_does_not_mix_hosts_up():
    assert subjects.consumer("applier", "a-b", "c") != subjects.consumer("applier", "a", "b-c")
    assert subjects.consumer("applier", "a=b", "c") != subjects.consumer("applier", "a", "b=c")
    assert subjects.consumer("applier", "rome", "node-1") == "applier=rome=node-1"
