"""By what events of one packet are held together, on all hosts: what is the same bytes everywhere. Pure."""

from __future__ import annotations

from schemas.flow import Correlation
from schemas.values import IPV4
from services.kernel.headers import TCP, Packet, WireguardHeader

HEADERS = "headers"
"""The method that goes by what a packet says in its headers."""
_IDENT, _PIECE = "id ", "piece"


def outer_group(said: WireguardHeader) -> Correlation:
    """Receiver index and counter are the same bytes on both hosts, and no two packets of a session have the same."""
    counter = "-" if said.counter is None else str(said.counter)
    return Correlation(f"wg/{said.message}/{said.index:08x}/{counter}", "wireguard-counter", "exact")


def inner_group(item: Packet) -> Correlation:
    """What of a packet is the same on all hosts, whatever is translated but ports. TTL and checksums are not."""
    words = [str(item.protocol), f"{item.source_port}-{item.destination_port}", str(item.length)]
    is_certain = False
    if item.family == IPV4:
        words.append(f"{_IDENT}{item.ident}")
        is_certain = item.ident != 0
    if item.echo_sequence is not None:
        words.append(f"echo {item.kind} {item.echo_id} {item.echo_sequence}")
        is_certain = True
    if item.protocol == TCP:
        words.append(item.transport[4:13].hex())
    return Correlation("ip/" + "/".join(words), HEADERS, "high" if is_certain else "inferred")


def piece_group(item: Packet) -> Correlation:
    """What all fragments of a packet have alike."""
    return Correlation(f"ip/{item.protocol}/{_PIECE}/{_IDENT}{item.ident}", HEADERS, "high" if item.ident else "inferred")


def is_piece(corr: Correlation) -> bool:
    """Whether it is of a fragment."""
    return f"/{_PIECE}/" in corr.group


def pieces_of(corr: Correlation) -> str | None:
    """The group that a whole packet's fragments have; None where nobody can tell, as with IPv6, whose whole packets have no number."""
    kind, *words = corr.group.split("/")
    ident = next((word for word in words if word.startswith(_IDENT)), f"{_IDENT}0")
    return f"{kind}/{words[0]}/{_PIECE}/{ident}" if ident != f"{_IDENT}0" else None
