"""The lab's broker: nats-server in the underlay, kept running, and the relay by which the machine itself reaches it."""

from __future__ import annotations

import structlog

from services.cli.lab.crew import Crew
from services.cli.lab.layout import UNDERLAY
from services.cli.lab.processes import ended
from services.cli.lab.relay import Relay
from services.cli.lab.state import Folder
from services.runtime.server import Server

log = structlog.get_logger(__name__)


class LabBroker:
    """One nats-server. To be used from the main thread: the server is tied to the thread that starts it."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        # The relay looks for a free port, and the server takes the same one in the underlay, where every port is free.
        self._relay = Relay(UNDERLAY)
        self.crew = Crew(folder, self._relay.port)
        self._server = Server(self.crew.config(), folder.nats, prefix=["ip", "netns", "exec", UNDERLAY])

    @property
    def url(self) -> str:
        """The address, right both on the machine and in the underlay."""
        return f"nats://127.0.0.1:{self._relay.port}"

    async def start(self) -> None:
        """Start the server and the relay, and write down the address and the credentials."""
        self._server.start()
        await self._relay.start()
        self.crew.write_credentials()
        self._folder.url.write_text(f"{self.url}\n", encoding="ascii")

    async def keep(self) -> None:
        """Start the server again whenever it ends, until cancelled."""
        while True:
            if self._server.pid is not None:
                await ended(self._server.pid)
            log.warning("nats-server ended, starting it again")
            self._server.stop()
            self._server.start()

    def reload(self) -> None:
        """Let the users in that were enrolled since."""
        self._server.reload(self.crew.config())

    async def stop(self) -> None:
        await self._relay.stop()
        self._server.stop()
