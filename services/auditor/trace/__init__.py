"""Traced packets: from the kernel's messages to flow events, and from those to whether a flow was encrypted."""
