"""Dead letters: messages that could not be handled, published with the reason and the original, so that none is lost in silence."""

from __future__ import annotations

from schemas import codec, subjects
from schemas.status import DeadLetter
from services.runtime import events
from services.runtime.broker import Broker
from services.runtime.messages import Message

MAX_PAYLOAD_BYTES = 64 * 1024


def describe(message: Message, reason: str) -> DeadLetter:
    """The dead letter of `message`: its payload is cut to 64 KiB, so that a letter always fits where the message did."""
    return DeadLetter(
        subject=message.subject,
        reason=reason,
        sequence=message.sequence,
        deliveries=message.deliveries,
        payload=message.data[:MAX_PAYLOAD_BYTES],
    )


async def dead_letter(broker: Broker, service: str, message: Message, reason: str, *, cluster: str = "", host: str = "") -> None:
    """Publish the dead letter of `message`. The caller ends its delivery after that, so that a letter that is not stored is tried again.

    `cluster` and `host` are those of a service on a host, which may publish for itself only; empty for planners.
    """
    trace = events.child(message.headers.get(events.TRACEPARENT))
    subject = subjects.deadletter(cluster, host, service)
    identity = f"dead-{message.subject}-{message.sequence}" if message.sequence else None
    await broker.publish(subject, codec.encode(describe(message, reason)), message_id=identity, headers={events.TRACEPARENT: trace})
    broker.metrics.dead_letters.labels(service).inc()
