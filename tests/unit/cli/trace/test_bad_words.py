"""What ``meshmark trace`` does not take: it is named, and how to write it, before any host is asked."""

from __future__ import annotations

import pytest

from services.cli.trace.command import trace
from services.cli.trace.filters import Filters
from services.runtime.errors import Permanent
from tests.unit.cli.broker import StubBroker


@pytest.mark.parametrize(
    "options,words",
    [
        ({"source": "rome/shob"}, r"did you mean rome/shop\?"),
        ({"source": "rome/worker-9"}, "no pod, host or address 'rome/worker-9'; did you mean rome/worker-"),
        ({"source": ""}, "no pod, host or address ''; there are "),
        ({"source": "x"}, "no pod, host or address 'x'; there are "),
        ({"destination": "rome/shop"}, "the same end"),
        ({"source": "192.0.2.1", "destination": "192.0.2.2"}, "neither 192.0.2.1 nor 192.0.2.2 is in a cluster"),
        ({"service": ["shop.example"]}, "--service: "),
        ({"duration": "2h"}, "between 1s and 10m"),
        ({"duration": "soon"}, "30s, 5m or 500ms"),
        ({"sample": 3}, "a power of two between 1 and 128"),
        ({"sample": 256}, "a power of two between 1 and 128"),
        ({"cluster": "roma"}, r"no cluster 'roma'; did you mean rome\?"),
        ({"source": "10.200.1.10", "destination": "192.0.2.1", "cluster": "x"}, "no cluster 'x'; there are rome"),
        ({"filters": Filters(ip=["shop"])}, "--ip takes an address or a prefix: 'shop' is not a prefix"),
        ({"filters": Filters(ip=["10.200.1.10", "10.200.1.10/16"])}, "--ip .*: '10.200.1.10/16' has host bits set; write 10.200.0.0/16"),
        ({"filters": Filters(ip=["fe80::1%eth0"])}, "--ip .*zone"),
        ({"filters": Filters(node=["rome/worker-9"])}, "--node rome/worker-9: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(node=["rome/worker-3"])}, "--node rome/worker-3: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(node=["worker-1"])}, "--node worker-1: .* there are rome/worker-1, rome/worker-2"),
        ({"filters": Filters(port=[443, 0])}, "--port 0: between 1 and 65535"),
        ({"filters": Filters(port=[65536])}, "--port 65536: between 1 and 65535"),
        ({"filters": Filters(port=[443], protocol=["icmp"])}, "packets of ICMP have none"),
        ({"filters": Filters(since="lately")}, "'lately' is no span of time"),
        ({"filters": Filters(since="9" * 400 + "s")}, "s' is no span of time"),
        ({"filters": Filters(since="\u0665s")}, "'\u0665s' is no span of time"),
        ({"filters": Filters(since="1.5s")}, "without fractions"),
        ({"filters": Filters(since="0ms")}, "--since 0ms: more than 0"),
        ({"duration": "9" * 5000}, "' is no span of time"),
        ({"filters": Filters(first=0)}, "--first 0: at least 1"),
        ({"filters": Filters(last=-1)}, "--last -1: at least 1"),
    ],
)
async def test_a_bad_word_is_named(mesh: StubBroker, options: dict[str, object], words: str):
    """Before anything is asked of a host."""
    ends = {"source": "rome/shop", "destination": "rome/stock", **options}
    with pytest.raises(Permanent, match=words):
        await trace(**ends, nats=mesh)  # type: ignore[arg-type]
    assert mesh.asked == []


@pytest.mark.parametrize(
    "options, words",
    [
        ({"follow": True}, "--follow: for hosts that are asked, and --input-file asks none"),
        ({"duration": "30s"}, "--for: for hosts that are asked"),
        ({"duration": "30s", "follow": True, "sample": 2}, "--follow, --for, --sample: for hosts that are asked"),
        ({"filters": Filters(node=["rome/worker-9"])}, "--node rome/worker-9"),
    ],
)
async def test_of_a_recording_what_cannot_be_is_named(mesh: StubBroker, recorded, options: dict[str, object], words: str):
    """What hosts would be asked for, and a host that is not in it; also where it has no packet that would be judged by it."""
    recorded["native"].write_bytes(b"")
    ends = {"source": "rome/shop", "destination": "rome/stock", **options}
    with pytest.raises(Permanent, match=words):
        await trace(**ends, input_file=recorded["native"], nats=mesh)  # type: ignore[arg-type]
