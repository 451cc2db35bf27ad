"""The host's keys while one takes the place of another: when the next is made, when one is let go.

Blocking; runs in the kernel's thread.
"""

from __future__ import annotations

from collections.abc import Collection

from schemas.commands import Rotating
from schemas.host_objects import Route, WireguardLink
from schemas.plan import HostPlan, mesh_unit
from services.kernel.port import Kernel, KeyRing
from services.runtime.errors import Permanent


def rotated(kernel: Kernel, plan: HostPlan, *, abort: bool) -> Rotating:
    """Make the key that is to follow, or take it back, on a host of this plan. Permanent where it cannot be, or not any more."""
    mesh = plan.units.get(mesh_unit(plan.cluster), {})
    if not any(isinstance(entry.object, WireguardLink) for entry in mesh.values()):
        what = "of a peering's tunnels no key is changed yet" if _devices(plan) else "it encrypts nothing"
        msg = f"{plan.cluster}/{plan.host} has no key of its cluster's mesh to change: {what}"
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
    return Rotating(ring.key, ring.next)


def settle(kernel: Kernel, plan: HostPlan, held: Collection[str]) -> bool:
    """Let go of keys that no device has any more; whether any went. Not before the kernel holds the devices of `plan`.

    `held` are the keys of the objects that it holds. The key in force goes when the only device has the next one: by then all others
    know that.
    """
    ring, devices = kernel.keys(), _devices(plan)
    if ring.all == (ring.key,) or any(link.key not in held for link in devices):
        return False
    planned = {link.public_key for link in devices}
    only = devices[0].public_key if len(devices) == 1 else None
    if only is not None and only in (ring.next, ring.withdrawn):
        kernel.promote_key(only)
    elif ring.withdrawn is not None and ring.withdrawn not in planned:
        kernel.forget_withdrawn_key()
    return kernel.keys() != ring


def _devices(plan: HostPlan) -> list[WireguardLink]:
    return [item for item in plan.objects().values() if isinstance(item, WireguardLink)]


def _has_moved(plan: HostPlan, ring: KeyRing) -> bool:
    """Whether packets go by a device that has another key than the one in force."""
    after = {link.name for link in _devices(plan) if link.public_key in (ring.next, ring.withdrawn)}
    return any(isinstance(item, Route) and any(hop.link in after for hop in item.hops) for item in plan.objects().values())
