"""Bytes become values at the border, and an error names the field and says what is right."""

from __future__ import annotations

import json

import pytest

from schemas import codec
from schemas.codec import DecodeError
from schemas.drift import DriftEvent
from schemas.status import DeadLetter
from schemas.topology import KINDS, Node, Peering, Pod, convert_topology, decode_topology
from schemas.values import Address, Name, Prefix

NODE = {"kind": "Node", "name": "n1", "cluster": "rome", "addresses": ["192.0.2.1"]}
PEERING = {
    "kind": "Peering",
    "name": "rome-milan",
    "cluster": "rome",
    "ends": [{"cluster": "rome", "gateway": "g"}, {"cluster": "milan", "gateway": "g"}],
}
CLUSTER = {"kind": "Cluster", "name": "rome", "podPrefixes": ["10.61.0.0/16"], "internalPrefixes": ["10.80.0.0/16"]}


def say(value: object) -> bytes:
    return json.dumps(value).encode()


@pytest.mark.parametrize(
    "payload,field,reason",
    [
        (say({**NODE, "addresses": ["192.0.2.1/32"]}), "$.addresses[0]", "without a length"),
        (say({**NODE, "addresses": [5]}), "$.addresses[0]", "expected text, got int"),
        (say({**NODE, "podPrefixes": ["10.0.0.0/24", "10.0.1.1/24"]}), "$.podPrefixes[1]", "write 10.0.1.0/24 for the prefix"),
        (say({**NODE, "revision": -1}), "$.revision", ">= 0"),
        (say({**NODE, "revision": True}), "$.revision", "got `bool`"),
        (say({**NODE, "colour": "red"}), "", "unknown field `colour`"),
        (say({**NODE, "pod_prefixes": []}), "", "unknown field `pod_prefixes`"),
        (say({"kind": "Node", "name": "n1", "cluster": "rome"}), "", "missing required field `addresses`"),
        (say({**NODE, "kind": "Nodes"}), "$.kind", "the kinds are Cluster, Node, Gateway, Peering, Endpoint, PublicKey"),
        (say({"name": "n1"}), "$.kind", "the kinds are Cluster, Node"),
        (say({**CLUSTER, "podPrefixes": []}), "$.podPrefixes", "length >= 1"),
        (say({**CLUSTER, "internalPrefixes": []}), "$.internalPrefixes", "length >= 1"),
        (say({**CLUSTER, "internalPrefixes": ["10.8.0.0/16", "10.9.0.0/16"]}), "$.internalPrefixes[1]", "the second of IPv4"),
        (say({**CLUSTER, "podPrefixes": ["10.6.0.0/16", "fd00::/32"]}), "$.internalPrefixes", "no IPv6 prefix for the overlay"),
        (say({**CLUSTER, "internalPrefixes": ["fd00::/64"]}), "$.internalPrefixes", "no IPv4 prefix for the overlay"),
        (say({**NODE, "addresses": []}), "$.addresses", "length >= 1"),
        (say({**NODE, "addresses": ["2001:db8::1", "2001:db8::2"]}), "$.addresses[1]", "2001:db8::2 is the second of IPv6"),
        (say({**CLUSTER, "mtu": 1279}), "$.mtu", ">= 1280"),
        (say({**CLUSTER, "overlay": "vlan"}), "$.overlay", "Invalid enum value 'vlan'"),
        (say({**CLUSTER, "drift": {"odd": "repair"}}), "$.drift", "unknown field `odd`"),
        (say({**PEERING, "tunnels": 65}), "$.tunnels", "<= 64"),
        (say({**PEERING, "tunnels": 2, "weights": [1]}), "$.weights", "1 weights for 2 tunnels; give one for each"),
        (say({**PEERING, "cluster": "turin"}), "$.cluster", "'turin' is at neither end"),
        (say({**PEERING, "ends": [PEERING["ends"][0]] * 2}), "$.ends[1].cluster", "both ends are in 'rome'"),
        (say({**PEERING, "ends": PEERING["ends"][:1]}), "$.ends", "length 2"),
        (say({**PEERING, "tunnels": 2, "port": 65535}), "$.port", "leaves no room for 64 tunnels"),
        (
            say({**PEERING, "ends": [{**PEERING["ends"][0], "remapPods": ["10.0.0.0/8", "10.1.1.1/8"]}, PEERING["ends"][1]]}),
            "$.ends[0].remapPods[1]",
            "host bits set; write 10.0.0.0/8",
        ),
        (b"", "", "not valid JSON"),
        (b"{", "", "not valid JSON"),
        (b"{'kind': 1}", "", "not valid JSON"),
        (b"\xff\xfe", "", "not valid JSON"),
        (b'{"kind":"Node","name":"\xff"}', "", "not valid JSON"),
        (b"[]", "", "Expected `object`, got `array`"),
        (b"null", "", "Expected `object`, got `null`"),
    ],
)
def test_an_error_names_the_field_and_says_what_is_right(payload: bytes, field: str, reason: str):
    with pytest.raises(DecodeError) as failure:
        decode_topology(payload)
    assert failure.value.field == field
    assert reason in failure.value.reason
    assert str(failure.value) == (f"{field}: {failure.value.reason}" if field else failure.value.reason)


def test_plain_data_is_read_as_json_is():
    assert convert_topology(PEERING) == decode_topology(say(PEERING))
    with pytest.raises(DecodeError) as failure:
        convert_topology({**NODE, "addresses": ["x"]})
    assert failure.value.field == "$.addresses[0]"


@pytest.mark.parametrize("value", [None, [], "Node", 5])
def test_a_yaml_document_that_is_no_object_is_refused(value: object):
    with pytest.raises(DecodeError, match=f"got {type(value).__name__}"):
        convert_topology(value)


def test_values_are_canonical_and_typed_after_decoding():
    node = decode_topology(say({**NODE, "podPrefixes": ["10.0.0.7"]}))
    assert isinstance(node, Node)
    assert node.pod_prefixes == (Prefix("10.0.0.7/32"),)
    assert (type(node.addresses[0]), type(node.pod_prefixes[0]), type(node.uplink)) == (Address, Prefix, Name)


def test_a_pod_is_an_endpoint_on_the_wire():
    pod = Pod(name=Name("p"), cluster=Name("rome"), node=Name("n"), addresses=(Address("10.0.0.1"),))
    assert json.loads(codec.encode(pod))["kind"] == "Endpoint"
    assert pod.kind == "Endpoint"
    assert pod.ref == "Endpoint/rome/p"
    assert decode_topology(codec.encode(pod)) == pod


def test_every_kind_has_its_name_and_refuses_an_empty_object():
    for kind in KINDS:
        with pytest.raises(DecodeError, match="missing required field"):
            decode_topology(say({"kind": kind}))


def test_topology_survives_the_wire_and_yaml():
    for value in (NODE, PEERING, CLUSTER):
        item = decode_topology(say(value))
        assert decode_topology(codec.encode(item)) == item
        assert convert_topology(codec.to_builtins(item)) == item


def test_fields_are_camel_case_on_the_wire():
    item = decode_topology(say({**PEERING, "keepaliveSeconds": 5}))
    assert isinstance(item, Peering)
    assert item.keepalive_seconds == 5
    assert b'"keepaliveSeconds":5' in codec.encode(item)


def test_messages_between_services_tolerate_fields_of_a_newer_version():
    event = {"cluster": "rome", "host": "n1", "layer": "nft", "key": "table meshmark.x", "state": "raised", "mood": "new"}
    assert codec.decode(say(event), DriftEvent).key == "table meshmark.x"


def test_a_payload_of_any_bytes_travels_in_a_dead_letter():
    letter = DeadLetter("mesh.topology.node.rome.n1", "not valid JSON", payload=b"\xff{")
    assert codec.decode(codec.encode(letter), DeadLetter) == letter


def test_an_unknown_type_is_not_encoded_by_accident():
    with pytest.raises(NotImplementedError):
        codec.encode(object())
