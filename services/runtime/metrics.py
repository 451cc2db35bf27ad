"""Every metric of every service, declared once. Labels are bounded: no host, object or subject name is ever one."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_APPLY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class Metrics:
    """One service's metrics, in a registry of their own, so that two services in one process do not mix."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._broker()
        self._planner()
        self._applier()
        self._auditor()

    def _broker(self) -> None:
        self.nats_connected = self._gauge("nats_connected", "1 while the broker is connected")
        self.nats_reconnects = self._counter("nats_reconnects", "Times the broker connection came back")
        self.nats_denied = self._counter("nats_denied", "Operations the broker refused for want of permission", "operation")
        self.nats_slow = self._counter("nats_slow_consumer", "Times the client dropped messages because nobody took them")
        self.nats_stalled = self._counter("nats_stalled_pulls", "Pull requests that went silent and were asked again", "stream")
        self.nats_last_fetch_timestamp = self._gauge(
            "nats_last_fetch_timestamp_seconds", "Unix time of the last sign of life of a pull; its age says idle from dead", "stream"
        )
        self.retries = self._counter("retries", "Attempts that failed for now and were made again", "what")
        self.dead_letters = self._counter("dead_letters", "Messages that could not be handled", "service")

    def _planner(self) -> None:
        self.planner_admitted = self._counter("planner_admitted", "Topology objects admitted", "kind")
        self.planner_refused = self._counter("planner_refused", "Topology objects refused", "kind")
        self.planner_plans = self._counter("planner_plans", "Plans published")
        self.planner_objects = self._gauge("planner_objects", "Topology objects in force", "kind")
        self.planner_hosts = self._gauge("planner_hosts", "Hosts that have a plan")
        self.planner_frozen = self._gauge("planner_frozen", "1 while plans that take something away are held back")
        self.planner_restarts = self._counter("planner_restarts", "Times the planner started again from the store")
        self.compile_seconds = self._histogram("planner_compile_seconds", "Time from an admitted change to its plans")

    def _applier(self) -> None:
        self.apply_seconds = self._histogram("apply_seconds", "Time of one application, by stage", "stage")
        self.event_to_applied_seconds = self._histogram(
            "event_to_applied_seconds", "Time from the broker storing a topology event to the kernel holding it"
        )
        self.applied_generation = self._gauge("applied_generation", "Generation that the kernel holds")
        self.wanted_generation = self._gauge("wanted_generation", "Newest generation received")
        self.unit_outcomes = self._gauge("units", "Units of the plan, by the outcome of the last turn", "outcome")
        self.operations = self._counter("operations", "Kernel operations made")
        self.tunnels = self._gauge("tunnels", "Tunnels by state: alive, withdrawn, or dead while all are", "state")
        self.peers = self._gauge("peers", "WireGuard peers by when they last shook hands: fresh (3 minutes), stale, or never", "state")
        self.tunnel_transitions = self._counter("tunnel_transitions", "Tunnels that died or came back", "to")
        self.resyncs = self._counter("resyncs", "Full comparisons with the kernel or the snapshot", "why")

    def _auditor(self) -> None:
        self.drift_open = self._gauge("drift_open", "Differences that are open now", "layer")
        self.drift_events = self._counter("drift_events", "Drift events, by layer and state", "layer", "state")
        self.drift_events_lost = self._counter("drift_events_lost", "Drift events given up because the broker was away for too long")
        self.audit_seconds = self._histogram("audit_seconds", "Time of one comparison with the kernel")
        at = ("point", "state", "direction", "traffic")
        self.encryption_packets = self._counter("encryption_packets", "Packets at the points of a node's encryption", *at)
        self.encryption_bytes = self._counter("encryption_bytes", "Bytes of packets at the points of a node's encryption", *at)
        self.plaintext_shown = self._counter("plaintext_shown", "Packets in clear that the kernel showed", "direction", "traffic")
        self.plaintext_lost = self._counter("plaintext_lost", "Packets in clear that the kernel would have shown, and had no room for")
        self.trace_events = self._counter("trace_events", "Flow events of traced packets that were published")
        self.trace_lost = self._counter("trace_lost", "Lost events of traced packets, or kernel buffers that overflowed", "by")
        self.audit_lost_events = self._counter("audit_lost_events", "Kernel event queues that overflowed")

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"meshmark_{name}", text, labels, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"meshmark_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"meshmark_{name}", text, labels, registry=self.registry, buckets=_APPLY_BUCKETS_S)
