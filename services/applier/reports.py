"""What a host tells the planner: the newest report, what others use here, and the public key until the planner knows it.

A task of its own, so that a broker that is away holds up no turn. Of several reports that wait, the last one says all. A broker whose store
was lost has forgotten what was said: it is asked now and then, and told again.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable

import structlog
from msgspec.structs import replace

from schemas import codec, subjects
from schemas.host_objects import WireguardLink
from schemas.in_use import InUse
from schemas.status import ApplyReport, Greetings, Peers
from schemas.topology import PublicKey
from schemas.values import Name
from services.applier.in_use import collisions
from services.kernel.port import KeyRing
from services.runtime import events
from services.runtime.errors import MeshmarkError, OutcomeUnknown, Transient, Waiting
from services.runtime.plans import Update
from services.runtime.service import Context

_KEY_REPEAT_S = 10.0
_NEXT_REPEAT_S = 60.0
_ASK_S = 10.0
"""How often the broker is asked whether it still has the last report."""

_log = structlog.get_logger()


class Reporter:
    """Publishes what it is given last. `keys` reads the host's own, `uses_key` whether a device in the kernel has one."""

    def __init__(self, context: Context, keys: Callable[[], Awaitable[KeyRing]], uses_key: Callable[[], Awaitable[bool]]) -> None:
        self._context = context
        self._cluster, self._host = context.settings.require_host()
        self._read_keys = keys
        self._uses_key = uses_key
        self._wake = asyncio.Event()
        self._waiting: tuple[ApplyReport, Update] | None = None
        self._last: ApplyReport | None = None
        self._in_use: InUse | None = None
        self._peers, self._greetings = Peers(), Greetings()
        self._notes_told = True
        self._stranger = False
        self._introduced = 0
        """The epoch of the stranger that was told the public key last."""
        self._key_lacking = False
        self._key_said_s = float("-inf")
        self._keys_said: KeyRing | None = None
        """What was said of the host's keys last; nothing yet by this process."""

    def put(self, report: ApplyReport, update: Update, *, stranger: bool = False) -> None:
        """Note the report on `update`; it takes the place of one that is not published yet.

        A `stranger` is a plan that knows nothing of what the host holds; so its planner has lost the public key, too.
        """
        self._waiting = report, update
        self._stranger = stranger
        self._wake.set()

    def remember(self, report: ApplyReport) -> None:
        """Note what to say when the broker has no word of this host: what an earlier applier left in the kernel."""
        self._last = report

    def note(self, in_use: InUse) -> None:
        """Note what others use here; if that is news, the last report is told again with it."""
        if in_use != self._in_use:
            self._in_use, self._notes_told = in_use, False
            self._wake.set()

    def note_peers(self, peers: Peers, greetings: Greetings) -> None:
        """Note how the WireGuard peers are; news of them are told like those of what others use."""
        if (peers, greetings) != (self._peers, self._greetings):
            self._peers, self._greetings, self._notes_told = peers, greetings, False
            self._wake.set()

    def note_keys(self) -> None:
        """Note that the host's keys are others now: they are published, and with the next report told."""
        self._notes_told, self._key_lacking = False, True
        self._wake.set()

    async def run(self) -> None:
        """Publish until told to stop."""
        update: Update | None = None
        asked_s = asyncio.get_running_loop().time()
        while not self._context.stop.is_set():
            await self._context.until(self._wake, _ASK_S * random.uniform(0.8, 1.2))  # noqa: S311 - jitter, not a secret
            self._wake.clear()
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                self._last, update = waiting
                await self._publish_report(self._last, update)
                if self._stranger and update.epoch != self._introduced:
                    self._introduced = update.epoch
                    await self._say_used_key(update)
            elif update is not None and self._last is not None and not self._notes_told:
                await self._publish_report(self._last, update)
            if update is not None and (waiting is not None or self._key_lacking):
                await self._publish_key(update)
                self._context.ready("applier")
            now_s = asyncio.get_running_loop().time()
            if waiting is None and now_s - asked_s >= _ASK_S / 2:
                asked_s = now_s
                await self._say_again(update)

    async def _say_again(self, update: Update | None) -> None:
        """Tell a broker that has forgotten this host what it holds, and its key: its planner has lost them as well."""
        last = self._last
        if last is None or await self._is_known(last):
            return
        _log.warning("report_was_lost", epoch=last.epoch, generation=last.generation)
        await self._publish_report(last, update)
        await self._say_used_key(update)

    async def _is_known(self, report: ApplyReport) -> bool:
        """Whether the broker has this report or one on the same plan; True while it cannot say."""
        try:
            message = await self._context.broker.last("STATUS", subjects.status(self._cluster, self._host))
            found = codec.decode(message.data, ApplyReport) if message is not None else None
        except (Transient, OutcomeUnknown, Waiting, codec.DecodeError) as error:
            _log.debug("last_report_unknown", error=str(error))
            return True
        return found is not None and (found.epoch, found.generation) == (report.epoch, report.generation)

    async def _publish_report(self, report: ApplyReport, update: Update | None) -> None:
        self._notes_told = True
        ring = await self._keys()
        report = replace(report, peers=self._peers, greetings=self._greetings, keys=ring.all if ring is not None else ())
        if self._in_use is not None:
            met = collisions(update.plan.objects().values(), self._in_use) if update is not None else ()
            report = replace(report, in_use=self._in_use, collisions=met)
        await self._publish(subjects.status(self._cluster, self._host), codec.encode(report), update)

    async def _publish_key(self, update: Update) -> None:
        """Publish the public keys once, and again, until the plan shows that the planner knows them.

        Not before there is a device: peers would send to a host that does not listen, or to somebody else's port.
        """
        links = [item for item in update.plan.objects().values() if isinstance(item, WireguardLink)]
        self._key_lacking = False
        if not links:
            return
        ring = await self._keys()
        if ring is None:
            return
        planned = {link.public_key for link in links}
        is_unknown, is_news = not planned <= set(ring.all), ring != self._keys_said
        # A key that is to follow may wait for its turn for long, and no plan shows it before.
        waits = ring.next is not None and ring.next not in planned
        self._key_lacking = is_unknown or waits or is_news
        silent_s = asyncio.get_running_loop().time() - self._key_said_s
        is_due = is_news or silent_s >= (_KEY_REPEAT_S if is_unknown else _NEXT_REPEAT_S)
        if self._key_lacking and is_due and await self._is_key_used():
            await self._say_keys(ring, update)

    async def _say_used_key(self, update: Update | None) -> None:
        """Publish the public key if a device has it, whatever the plan says."""
        if await self._is_key_used() and (ring := await self._keys()) is not None:
            await self._say_keys(ring, update)

    async def _is_key_used(self) -> bool:
        try:
            return await self._uses_key()
        except MeshmarkError as error:
            _log.warning("links_unreadable", error=str(error))
            return False

    async def _keys(self) -> KeyRing | None:
        try:
            return await self._read_keys()
        except MeshmarkError as error:
            _log.error("no_key", error=str(error))
            return None

    async def _say_keys(self, ring: KeyRing, update: Update | None) -> None:
        self._key_said_s, self._keys_said = asyncio.get_running_loop().time(), ring
        item = PublicKey(name=Name(self._host), cluster=Name(self._cluster), key=ring.key, next=ring.next)
        await self._publish(subjects.topology("PublicKey", self._cluster, self._host), codec.encode(item), update)
        _log.info("public_key_published", key=ring.key, next=ring.next)

    async def _publish(self, subject: str, data: bytes, update: Update | None) -> None:
        headers = {events.TRACEPARENT: events.child(update.trace)} if update is not None and update.trace else None
        await self._context.broker.publish_surely(subject, data, headers=headers)
