"""What hosts say of a flow, as it comes: messages, and events held until their packet's way is known as a whole. Pure: time comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from schemas import codec
from schemas.flow import FlowEvent, FlowMessage
from services.auditor.trace.trails import Trail
from services.cli.trace.ends import Session

SETTLED_S = 1.0
"""So long after the last event of a packet, no other one comes: hosts tell of a packet once it has left, or within a tenth of a second."""
_KEPT_S = 4.0
_EVENTS_MAX = 20_000
_MESSAGES_MAX = 10_000


class Inbox:
    """Messages of hosts until they are taken. Bounded: what does not fit is lost, as with any subscriber that is too slow.

    `turned_away` counts these, `not_understood` those that are no flow messages.
    """

    def __init__(self) -> None:
        self._messages: deque[FlowMessage] = deque()
        self.turned_away = 0
        self.not_understood = 0

    def put(self, data: bytes) -> None:
        """Take a message in, as it came."""
        if len(self._messages) >= _MESSAGES_MAX:
            self.turned_away += 1
            return
        try:
            self._messages.append(codec.decode(data, FlowMessage))
        except codec.DecodeError:
            self.not_understood += 1

    def take(self) -> Iterator[FlowMessage]:
        """All that came since, in that order; each is given once."""
        while self._messages:
            yield self._messages.popleft()


class Stream:
    """Events of a session, as packets that are complete. Bounded: of more events than can be held, the oldest are given up.

    `given_up` counts them, but for those of packets that were told before.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._events: dict[str, tuple[float, FlowEvent]] = {}
        self._told: set[str] = set()
        self.given_up = 0

    def add(self, event: FlowEvent, now_s: float) -> None:
        """Take an event in; `now_s` is any clock that only goes forward, in seconds."""
        self._events[event.uuid] = now_s, event
        if len(self._events) > _EVENTS_MAX:
            oldest = next(iter(self._events))
            del self._events[oldest]
            self.given_up += oldest not in self._told

    def complete(self, now_s: float, *, all_of_them: bool = False) -> list[Trail]:
        """Packets of which all is known by now, each once, in the order of time."""
        came = {uuid: at_s for uuid, (at_s, _) in self._events.items()}
        found = self._session.trails(event for _, event in self._events.values())
        ready = [trail for trail in found if all_of_them or now_s - max(came[event.uuid] for event in trail.seen) > SETTLED_S]
        new = [trail for trail in ready if not any(event.uuid in self._told for event in trail.seen)]
        self._told.update(event.uuid for trail in new for event in trail.seen)
        old = [uuid for uuid, at_s in came.items() if now_s - at_s > _KEPT_S]
        for uuid in old:
            del self._events[uuid]
        self._told.intersection_update(self._events)
        return new
