"""Settings: one Struct, read from a TOML file, then the environment (``MESHMARK_…``), then flags; the later wins."""

from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import Meta, Struct

from schemas.values import Name
from services.runtime.errors import Permanent

ENVIRONMENT_PREFIX = "MESHMARK_"
_SCHEMES = ("nats", "tls", "ws", "wss")
_NEAR = 0.85
_CREDENTIALS_MODE = 0o600

log = structlog.get_logger(__name__)

Seconds = Annotated[float, Meta(ge=0)]
NftEngineName = Literal["nfnetlink", "libnftables"]


class BrokerSettings(Struct, frozen=True, kw_only=True):
    """How to reach NATS. Without `user` the server's anonymous user is taken, if it has one.

    `lost_after_s` is how long a lost connection may take to come back before it counts as lost for good; 0 is for ever.
    """

    url: str
    user: str = ""
    password: str = ""
    inbox_prefix: str = ""
    connect_s: float = 30.0
    request_s: float = 5.0
    ping_s: int = 10
    reconnect_wait_s: float = 0.25
    lost_after_s: float = 0.0


class Settings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All settings of a service. Durations are in seconds; `http` is ``address:port``, port 0 for any free one, empty for none."""

    nats_url: str = "nats://127.0.0.1:4222"
    credentials: str = ""
    cluster: str = ""
    host: str = ""
    state_dir: str = "/var/lib/meshmark"
    http: str = "127.0.0.1:9464"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_format: Literal["json", "console"] = "json"
    resync_s: Seconds = 300.0
    quiet_s: Seconds = 10.0
    shutdown_s: Seconds = 10.0
    connect_s: Seconds = 30.0
    lost_after_s: Seconds = 0.0
    nft_engine: NftEngineName = "nfnetlink"

    def broker(self) -> BrokerSettings:
        """How to reach NATS, with the user of the credentials file."""
        login = read_credentials(Path(self.credentials)) if self.credentials else Credentials()
        return BrokerSettings(
            url=self.nats_url, user=login.user, password=login.password, connect_s=self.connect_s, lost_after_s=self.lost_after_s
        )

    def require_host(self) -> tuple[str, str]:
        """The cluster and the host, for services that run on one; Permanent when either is missing."""
        missing = [name for name in ("cluster", "host") if not getattr(self, name)]
        if missing:
            variables = " and ".join(f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in missing)
            msg = f"{' and '.join(missing)} not set; give --{' and --'.join(missing)}, or set {variables}"
            raise Permanent(msg)
        return self.cluster, self.host


class Credentials(Struct, frozen=True):
    """A NATS user, as the credentials file holds it."""

    user: str = ""
    password: str = ""

    def __repr__(self) -> str:
        return f"Credentials(user={self.user!r})"


def load(file: Path | None = None, environment: Mapping[str, str] | None = None, flags: Mapping[str, object] | None = None) -> Settings:
    """The settings in force. A flag that is None counts as not given. Permanent names the setting, its origin and what is right."""
    values: dict[str, tuple[object, str]] = {}
    if file is not None:
        values |= {name: (value, str(file)) for name, value in _read_toml(file).items()}
    for key, text in (environment or {}).items():
        name = key.removeprefix(ENVIRONMENT_PREFIX).lower()
        if key.startswith(ENVIRONMENT_PREFIX) and name in Settings.__struct_fields__:
            values[name] = (text, f"the environment variable {key}")
        elif key.startswith(ENVIRONMENT_PREFIX) and (meant := difflib.get_close_matches(name, Settings.__struct_fields__, 1, _NEAR)):
            # Others may own variables with our prefix, as Kubernetes makes MESHMARK_PORT of a Service called meshmark; not such ones.
            msg = f"the environment variable {key}: no such setting; did you mean {ENVIRONMENT_PREFIX}{meant[0].upper()}?"
            raise Permanent(msg)
    for name, value in (flags or {}).items():
        if value is not None:
            values[name] = (value, f"the flag --{name.replace('_', '-')}")
    for name, (value, origin) in values.items():
        _check(name, value, origin)
    return msgspec.convert({name: value for name, (value, _) in values.items()}, Settings, strict=False)


def read_credentials(file: Path) -> Credentials:
    """The NATS user in a JSON file ``{"user": …, "password": …}``; a file that others may read gets a warning."""
    try:
        mode = stat.S_IMODE(file.stat().st_mode)
        found = msgspec.json.decode(file.read_bytes(), type=Credentials)
    except OSError as error:
        msg = f"credentials: cannot read {file}: {error.strerror}; give a JSON file with user and password"
        raise Permanent(msg) from error
    except msgspec.DecodeError as error:
        msg = f'credentials: {file} is not {{"user": …, "password": …}}: {error}'
        raise Permanent(msg) from error
    if mode & ~_CREDENTIALS_MODE & 0o077:
        log.warning("credentials_readable_by_others", file=str(file), mode=oct(mode), wanted=oct(_CREDENTIALS_MODE))
    return found


def _read_toml(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        msg = f"settings: cannot read {file}: {error.strerror}"
        raise Permanent(msg) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"settings: {file} is not TOML: {error}"
        raise Permanent(msg) from error


def _check(name: str, value: object, origin: str) -> None:
    """One value at a time, so that the text can say where it came from."""
    if name not in Settings.__struct_fields__:
        msg = f"{name} (from {origin}): no such setting; there are {', '.join(Settings.__struct_fields__)}"
        raise Permanent(msg)
    try:
        msgspec.convert({name: value}, Settings, strict=False)
        if name in ("cluster", "host") and value:
            Name.parse(value)
        if name == "http" and value:
            parse_address(str(value))
        if name == "nats_url":
            check_url(str(value))
    except (msgspec.ValidationError, ValueError) as error:
        reason = str(error).rpartition(" - at `")[0] or str(error)
        msg = f"{name} (from {origin}): {value!r} is wrong: {reason}"
        raise Permanent(msg) from error


def check_url(text: str) -> None:
    """ValueError, saying what is right, unless `text` names NATS servers: one, or several with commas between."""
    for part in text.split(","):
        url = urlsplit(part.strip() if "://" in part else f"nats://{part.strip()}")
        try:
            usable = url.scheme in _SCHEMES and bool(url.hostname) and url.port != 0
        except ValueError:  # a port that is none
            usable = False
        if not usable:
            msg = "write it as nats://host:port, as nats://127.0.0.1:4222"
            raise ValueError(msg)


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port`` or ``[v6]:port``; ValueError says what is right."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:  # noqa: PLR2004 - the last port
        msg = "write it as address:port, as 127.0.0.1:9464 or [::1]:0"
        raise ValueError(msg)
    return host.strip("[]"), int(port)


def from_environment(flags: Mapping[str, object] | None = None) -> Settings:
    """``load`` with this process's environment; ``MESHMARK_CONFIG`` names the file."""
    named = os.environ.get(f"{ENVIRONMENT_PREFIX}CONFIG")
    return load(Path(named) if named else None, os.environ, flags)
