"""How one Linux host is read and written: nftables, links, addresses, routes, rules, sysctls, WireGuard, events.

`port` is the interface, `linux` the real kernel behind it, `fake` one in memory with the same behaviour. Policy (what to write,
in which order, what to do about an error) is not here.
"""

from services.kernel import pyroute_parts

__all__ = ["pyroute_parts"]
