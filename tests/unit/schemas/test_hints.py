"""What a payload's author is told when a field or word does not exist."""

from __future__ import annotations

import pytest

from schemas.codec import DecodeError
from schemas.topology import convert_topology, decode_topology

RULE = b'{"kind":"FirewallConfiguration","name":"a","cluster":"rome","chains":[{"name":"b","hook":"input","rules":[%s]}]}'
NODE = b'"kind":"Node","name":"a","cluster":"rome"'


@pytest.mark.parametrize(
    "payload, words",
    [
        (b'{%s,"adress":"172.18.0.1"}' % NODE, "unknown field `adress`; did you mean 'addresses'?"),
        (
            b'{%s,"colour":"red"}' % NODE,
            "the fields are addresses, cluster, endpoint, name, optOut, podPrefixes, revision, roaming, sourceAddresses, uplink",
        ),
        (b'{"kind":"Cluster","name":"rome","drift":{"nft":"repare"}}', "$.drift.nft: Invalid enum value 'repare'; did you mean 'repair'?"),
        (b'{"kind":"Cluster","name":"rome","drift":{"nft":"x"}}', "the words are alert, repair"),
        (b'{"kind":"Peering","name":"a","cluster":"rome","ends":[{"cluster":"rome","gatway":"b"}]}', "$.ends[0]: "),
        (b'{"kind":"Peering","name":"a","cluster":"rome","ends":[{"cluster":"rome","gatway":"b"}]}', "did you mean 'gateway'?"),
        (
            RULE % b'{"actions":[{"action":"clampMSS"}]}',
            "$.chains[0].rules[0].actions[0].action: Invalid value 'clampMSS'; did you mean 'clampMss'?",
        ),
        (RULE % b'{"actions":[{"action":"log"}]}', "the words are accept, clampMss, ctMarkFromMark, dnat, drop"),
        (RULE % b'{"match":[{"field":"sorce","value":"10.0.0.1"}]}', "did you mean 'source'?"),
    ],
)
def test_what_would_have_been_right_is_said(payload: bytes, words: str) -> None:
    """A near miss is named; of anything else, all that there is: of this kind and at this place only."""
    with pytest.raises(DecodeError) as caught:
        decode_topology(payload)
    assert words in str(caught.value)


def test_yaml_is_told_the_same() -> None:
    """Plain data gets the same words as JSON."""
    with pytest.raises(DecodeError, match="did you mean 'addresses'"):
        convert_topology({"kind": "Node", "name": "a", "cluster": "rome", "adress": "172.18.0.1"})
