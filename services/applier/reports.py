"""What a host tells the planner: the newest report, and the public key until the planner knows it.

A task of its own, so that a broker that is away holds up no turn. Of several reports that wait, the last one says all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog

from schemas import codec, subjects
from schemas.plan import WireguardLink
from schemas.status import ApplyReport
from schemas.topology import PublicKey
from schemas.values import Key, Name
from services.runtime import events
from services.runtime.errors import MeshmarkError
from services.runtime.plans import Update
from services.runtime.service import Context

_KEY_REPEAT_S = 10.0

_log = structlog.get_logger()


class Reporter:
    """Publishes what it is given last. `public_key` reads the host's own."""

    def __init__(self, context: Context, public_key: Callable[[], Awaitable[Key]]) -> None:
        self._context = context
        self._cluster, self._host = context.settings.require_host()
        self._public_key = public_key
        self._wake = asyncio.Event()
        self._waiting: tuple[ApplyReport, Update] | None = None
        self._key_lacking = False
        self._key_said_s = float("-inf")

    def put(self, report: ApplyReport, update: Update) -> None:
        """Note the report on `update`; it takes the place of one that is not published yet."""
        self._waiting = report, update
        self._wake.set()

    async def run(self) -> None:
        """Publish until told to stop."""
        update: Update | None = None
        while not self._context.stop.is_set():
            await self._context.until(self._wake, _KEY_REPEAT_S if self._key_lacking else None)
            self._wake.clear()
            waiting, self._waiting = self._waiting, None
            if waiting is not None:
                report, update = waiting
                await self._publish(subjects.status(self._cluster, self._host), codec.encode(report), update)
            if update is not None:
                await self._publish_key(update)
            self._context.ready("applier")

    async def _publish_key(self, update: Update) -> None:
        """Publish the public key, and again, until the plan shows that the planner knows it."""
        links = [item for item in update.plan.objects().values() if isinstance(item, WireguardLink)]
        self._key_lacking = False
        if not links:
            return
        try:
            key = await self._public_key()
        except MeshmarkError as error:
            _log.error("no_key", error=str(error))
            return
        self._key_lacking = any(link.public_key != key for link in links)
        now_s = asyncio.get_running_loop().time()
        if self._key_lacking and now_s - self._key_said_s >= _KEY_REPEAT_S:
            self._key_said_s = now_s
            item = PublicKey(name=Name(self._host), cluster=Name(self._cluster), key=key)
            await self._publish(subjects.topology("PublicKey", self._cluster, self._host), codec.encode(item), update)
            _log.info("public_key_published", key=key)

    async def _publish(self, subject: str, data: bytes, update: Update) -> None:
        headers = {events.TRACEPARENT: events.child(update.trace)} if update.trace else None
        await self._context.broker.publish_surely(subject, data, headers=headers)
