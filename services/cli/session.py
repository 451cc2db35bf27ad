"""How the command reaches NATS: by flags or environment, else the lab that runs on this machine."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Annotated

from cyclopts import Parameter

from services.cli.lab.state import find_folder
from services.runtime.broker import Broker
from services.runtime.errors import Permanent
from services.runtime.settings import Settings, from_environment

_CONNECT_S = 2.0
_REFUSED = "authorization violation"
"""Of nats-server's words, those for a user that it does not know."""


@Parameter(name="*")
@dataclass(frozen=True)
class Nats:
    """Where NATS is. Without any of it, the environment (MESHMARK_NATS_URL, MESHMARK_CREDENTIALS), else this machine's lab."""

    nats_url: Annotated[str | None, Parameter(help="NATS server [default: MESHMARK_NATS_URL, else this machine's lab]")] = None
    credentials: Annotated[
        str | None, Parameter(help='JSON file with {"user": …, "password": …} [default: MESHMARK_CREDENTIALS, else the lab\'s]')
    ] = None

    def settings(self) -> Settings:
        flags: dict[str, object] = {"nats_url": self.nats_url, "credentials": self.credentials, "connect_s": _CONNECT_S}
        if self.nats_url is None and "MESHMARK_NATS_URL" not in os.environ:
            folder = find_folder(None)
            with contextlib.suppress(OSError):
                flags["nats_url"] = folder.url.read_text(encoding="utf-8").strip()
                publisher = folder.credentials("publisher")
                if self.credentials is None and os.access(publisher, os.R_OK):
                    flags["credentials"] = str(publisher)
        return from_environment(flags)

    @contextlib.asynccontextmanager
    async def connect(self) -> AsyncIterator[Broker]:
        """A connected broker, for the time of the body."""
        settings = self.settings().broker()
        async with contextlib.AsyncExitStack() as stack:
            try:
                broker = await stack.enter_async_context(Broker.connect(settings, "cli"))
            except Permanent as error:
                if _REFUSED not in str(error).lower():
                    raise
                who = f"{settings.user} with this password" if settings.user else "clients without credentials"
                msg = f"{settings.url} does not take {who}; give --credentials (MESHMARK_CREDENTIALS) a file of this server's"
                raise Permanent(msg) from error
            yield broker
