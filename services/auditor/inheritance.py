"""What an auditor before this one may have left open. Only of which layers: what it was does not matter to one that looks by itself."""

from __future__ import annotations

import asyncio

import structlog

from schemas import codec, subjects
from schemas.drift import DriftEvent, DriftLayer
from services.auditor.findings import LAYERS
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError, Permanent
from services.runtime.retries import backoff_s

_log = structlog.get_logger()


async def left_open(broker: Broker, cluster: str, host: str) -> set[DriftLayer]:
    """The layers of which the last that was told of this host left something open; none where one may not ask.

    Waits for a broker that is away.
    """
    attempt = 0
    while True:
        try:
            return {layer for layer in LAYERS if await _is_left_open(broker, subjects.drift(cluster, host, layer))}
        except (Permanent, codec.DecodeError) as error:  # a broker whose permissions, or an auditor whose words, are of another version
            _log.warning("no_inheritance", error=str(error))
            return set()
        except MeshmarkError as error:
            attempt += 1
            _log.info("no_inheritance", error=str(error))
            await asyncio.sleep(backoff_s(attempt))


async def _is_left_open(broker: Broker, subject: str) -> bool:
    last = await broker.last("DRIFT", subject)
    return last is not None and codec.decode(last.data, DriftEvent).leaves_open
