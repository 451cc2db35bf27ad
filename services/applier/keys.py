"""The host's keys while one takes the place of another: when the next is made, when one is let go.

Blocking; runs in the kernel's thread.
"""

from __future__ import annotations

from collections.abc import Collection

from schemas.commands import Rotating
from schemas.host_objects import LinkAddress, Route, WireguardLink
from schemas.plan import HostPlan, is_beside
from services.kernel.port import Kernel, KeyRing
from services.runtime.errors import Permanent


def rotated(kernel: Kernel, plan: HostPlan, *, abort: bool) -> Rotating:
    """Make the key that is to follow, or take it back, on a host of this plan. Permanent where it cannot be, or not any more."""
    if not _devices(plan):
        msg = f"{plan.cluster}/{plan.host} has no key to change: it encrypts nothing, and has no tunnel"
        raise Permanent(msg)
    if not abort:
        kernel.make_next_key()
    elif _has_moved(plan, kernel.keys()):
        msg = (
            f"{plan.cluster}/{plan.host}: packets have the next key already; let it go to its end, and change the key once more if need be"
        )
        raise Permanent(msg)
    else:
        kernel.withdraw_next_key()
    ring = kernel.keys()
    return Rotating(ring.key, ring.next, ring.withdrawn)


def settle(kernel: Kernel, plan: HostPlan, held: Collection[str]) -> bool:
    """Let go of keys that no device has any more; whether any went. Not before the kernel holds the devices of `plan`.

    `held` are the keys of the objects that it holds. The key in force goes when all devices have the next one and none is beside them any
    more: by then all others know that.
    """
    ring, devices = kernel.keys(), _devices(plan)
    if ring.all == (ring.key,) or any(link.key not in held for link in devices):
        return False
    planned = {link.public_key for link in devices}
    is_over = len(planned) == 1 and not any(is_beside(link.name) for link in devices)
    only = planned.copy().pop() if is_over else None
    if only is not None and only in (ring.next, ring.withdrawn):
        kernel.promote_key(only)
    elif ring.withdrawn is not None and ring.withdrawn not in planned:
        kernel.forget_withdrawn_key()
    return kernel.keys() != ring


def _devices(plan: HostPlan) -> list[WireguardLink]:
    return [item for item in plan.objects().values() if isinstance(item, WireguardLink)]


def _has_moved(plan: HostPlan, ring: KeyRing) -> bool:
    """Whether packets go by a device that has another key than the one in force; its own network is led there from the beginning."""
    objects = plan.objects().values()
    after = {link.name for link in _devices(plan) if link.public_key in (ring.next, ring.withdrawn)}
    own = {(item.link, item.length) for item in objects if isinstance(item, LinkAddress)}
    routes = (item for item in objects if isinstance(item, Route))
    return any(hop.link in after and (hop.link, route.prefix.length) not in own for route in routes for hop in route.hops)
