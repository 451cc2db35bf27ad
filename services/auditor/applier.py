"""What the applier beside this auditor says, over the local socket, or said last, on NATS."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import structlog

from schemas import codec, subjects
from schemas.commands import Repair, Settled
from schemas.drift import DriftLayer
from schemas.status import ApplyReport
from services.runtime import neighbour
from services.runtime.broker import Broker
from services.runtime.errors import MeshmarkError

_log = structlog.get_logger()


class ApplierBeside:
    """The applier of the same host, which need not be there. `withdrawn` are the links of dead tunnels as far as is known."""

    def __init__(self, broker: Broker, cluster: str, host: str) -> None:
        self._broker = broker
        self._cluster, self._host = cluster, host
        self.withdrawn: tuple[str, ...] = ()

    async def settled(self) -> Settled | None:
        """What the applier holds, once it has finished the turn that it may be in. One that is not there changes nothing either."""
        try:
            return codec.decode(await neighbour.ask("settle"), Settled)
        except (MeshmarkError, codec.DecodeError) as error:
            _log.info("applier_silent", error=str(error))
            return None

    async def held(self) -> Mapping[str, str]:
        """Which digest of each unit the applier says that it holds, or, where it is not there, last said."""
        return (await self.settled() or await self.last_said()).held

    async def last_said(self) -> Settled:
        """What an applier that is not there said last; as far as that cannot be heard, what it told this auditor."""
        try:
            message = await self._broker.last("STATUS", subjects.status(self._cluster, self._host))
            report = codec.decode(message.data, ApplyReport) if message else None
        except (MeshmarkError, codec.DecodeError) as error:
            _log.info("no_report", error=str(error))
            return Settled(0, {}, self.withdrawn)
        if report is None:
            return Settled(0, {}, self.withdrawn)
        return Settled(0, {unit.unit: unit.held for unit in report.units}, tuple(sorted(report.tunnels.links)))

    async def repair(self, leave: Iterable[DriftLayer]) -> ApplyReport | None:
        """Have the kernel brought back to the plan, but for the layers of `leave`; the report, None when nobody did."""
        try:
            return codec.decode(await neighbour.ask("repair", codec.encode(Repair(tuple(leave)))), ApplyReport)
        except (MeshmarkError, codec.DecodeError) as error:
            _log.warning("repair_failed", error=str(error))
            return None
