"""Packets on links, as the lab itself looks at them."""

from services.cli.lab.captures import Packet, capture

__all__ = ["Packet", "capture"]
