"""Why rules drop packets: how such a rule ends, with what a trace says of a packet that ends there.

A comment is of 128 bytes at most, and has no names in it that people give: a trace adds the topology objects behind the rule.
"""

from __future__ import annotations

from schemas.nft import Comment, Counter, Verdict

End = tuple[Counter, Verdict, Comment]


def _drop(why: str) -> End:
    return Counter(), Verdict("drop"), Comment(why)


UNKNOWN = _drop("of no known connection: it cannot be translated")
UNTRACKED = _drop("not tracked: it cannot be translated")
SPOOFED = _drop("came by a way that does not lead back to its source")
TO_INTERNAL = _drop("from a remote cluster to an overlay address")
STRANGER = _drop("for a remote cluster, from an address that is not the cluster's")
NOT_BY_TUNNEL = _drop("for a remote cluster, and would not leave by a tunnel")
NOT_TO_NODE = _drop("from a remote cluster, and would not go to a node")
FROM_OUTSIDE = _drop("from outside, and would go into the overlay or a tunnel")
NOT_TRANSLATED = _drop("from a remote cluster, and has no address to appear as")
BY_UPLINK = _drop("between clusters, and would leave by the uplink")
NOT_BY_OVERLAY = _drop("for a remote cluster, and would not leave by the overlay")
OUT_AGAIN = _drop("came by the overlay, and would leave by the uplink")
NOT_LET_OUT = _drop("to leave the cluster here, from a pod that no policy lets out")
NOT_BY_EXIT = _drop("to leave the cluster through another node, and would not go there")
NO_ANSWER = _drop("from outside by the overlay, and answers nothing that the pod said")
LOOP = _drop("loop: WireGuard's own packet, and would go into WireGuard")
