"""The words of routing that plans and publishers share, and what the kernel makes of a metric."""

from __future__ import annotations

from typing import Literal

from schemas.values import IPV6, Family

RouteType = Literal["unicast", "unreachable", "blackhole", "prohibit", "throw"]
Scope = Literal["global", "site", "link", "host"]
"""How far away the destinations of an IPv4 route are."""
METRIC_MAX = 4278198271
"""The worst metric of an ordinary route; the next one is that of guards (``schemas.host_objects``)."""
_IPV6_METRIC = 1024


def kernel_metric(metric: int, family: Family) -> int:
    """The metric under which the kernel holds a route: an IPv6 one of metric 0 gets another."""
    return metric or (_IPV6_METRIC if family == IPV6 else 0)
