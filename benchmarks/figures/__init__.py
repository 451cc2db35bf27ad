"""The figures, one file each, in the order in which they run: pure ones first. A new figure is a file here and a line below."""

from benchmarks.figures import (
    compile_change,
    encryption_audit,
    event_to_kernel,
    key_rotation,
    lab_start,
    memory,
    nft_engine,
    nft_reading,
    packet_cost,
    peers,
    routes_in_bulk,
    rules_per_gateway,
    start_up,
    throughput,
    trace_cost,
    trace_seen,
    tunnel_loss,
)

FIGURES = (
    rules_per_gateway.FIGURE,
    compile_change.FIGURE,
    nft_engine.FIGURE,
    start_up.FIGURE,
    event_to_kernel.FIGURE,
    memory.FIGURE,
    tunnel_loss.FIGURE,
    key_rotation.FIGURE,
    throughput.GATEWAYS,
    throughput.NODES,
    lab_start.FIGURE,
    packet_cost.FIGURE,
    encryption_audit.FIGURE,
    trace_cost.FIGURE,
    trace_seen.FIGURE,
    peers.FIGURE,
    routes_in_bulk.FIGURE,
    nft_reading.FIGURE,
)
"""The registry."""
