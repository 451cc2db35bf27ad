"""Sysctls of the network namespace: files under /proc/sys.

Owns the sysctls whose value it changed. The kernel keeps no owner for them, so the value from before the first change is kept in
``<state_dir>/sysctls.json``, written with fsync and rename *before* the change, and given back on removal; the file is all that is needed
after a restart. A sysctl that had the wanted value already is never written and never owned. Turning forwarding on or off makes the
kernel set other sysctls too (inet_forward_change in net/ipv4/devinet.c, addrconf_fixup_forwarding in net/ipv6/addrconf.c): what those were
is kept and given back as well. With IPv6 forwarding on, the kernel forgets the default routes that it learned from router advertisements:
links that took these are told to go on (``accept_ra`` 2 for 1), or a host would lose its way out. A link's
``rp_filter`` is read as what is in force, which is the larger of its own and that of ``all``. Fails with Permanent where /proc/sys is
read-only (as in most containers) and names what to set outside; with Waiting where the interface that a name speaks of is not there yet.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from schemas.host_objects import PlanObject, Sysctl
from services.kernel.failures import mapped, unreadable
from services.kernel.transaction import Change
from services.runtime.errors import MeshmarkError, Permanent, Waiting

_PROC = Path("/proc/sys")
_PER_LINK = ("conf", "neigh")
_FORWARDING = {"net/ipv4/ip_forward": "net/ipv4/conf", "net/ipv6/conf/all/forwarding": "net/ipv6/conf"}
"""Switches of forwarding, and where the kernel keeps what follows them by link."""
_IPV6_FORWARDING = Sysctl("net/ipv6/conf/all/forwarding", "1")
_LISTEN_ALWAYS = "2"
_ALONG = " > "
"""Between a sysctl and another one that the kernel sets along with it, in the names under which old values are kept."""


class Sysctls:
    """Reads and writes sysctls, and keeps what they were."""

    def __init__(self, state_dir: Path | None, proc: Path = _PROC) -> None:
        """`state_dir` is None for a process that only looks: it sees what is wanted, and not what else was changed."""
        self._folder = state_dir
        self._proc = proc

    def read(self, wanted: Mapping[str, PlanObject]) -> dict[str, Sysctl]:
        """Wanted sysctls and those that we changed, as they are now; one that this kernel does not have is left out."""
        names = {item.name for item in wanted.values() if isinstance(item, Sysctl)}
        names |= {name for name in self._kept() if _ALONG not in name}
        found = {}
        for name in sorted(names):
            value = self._value(name)
            if value is not None:
                general = general_of(name)
                item = Sysctl(name, stricter(value, self._value(general)) if general else value)
                found[item.key] = item
        return found

    def write(self, change: Change) -> None:
        if isinstance(change.new, Sysctl):
            self._set(change.new)
        else:
            self._give_back(change.key.removeprefix("sysctl "))

    def _set(self, wanted: Sysctl) -> None:
        held = self._value(wanted.name)
        if held is None:
            raise self._missing(wanted.name)
        if held == normal(wanted.value):
            return
        kept = self._kept()
        if wanted.name not in kept:
            listening = self._listening() if wanted == _IPV6_FORWARDING else {}
            kept = {**kept, wanted.name: held, **self._set_along(wanted.name, held), **listening}
            self._keep(kept)
        if wanted == _IPV6_FORWARDING:
            self._keep_listening(kept)
        self._write(wanted.name, wanted.value)

    def _give_back(self, name: str) -> None:
        kept = self._kept()
        if name not in kept:
            return
        if self._value(name) not in (None, kept[name]):
            self._write(name, kept[name])
        along = f"{name}{_ALONG}"
        for other, value in kept.items():
            if other.startswith(along) and self._value(other.removeprefix(along)) not in (None, value):
                self._write(other.removeprefix(along), value)
        self._keep({other: value for other, value in kept.items() if other != name and not other.startswith(along)})

    def _set_along(self, name: str, held: str) -> dict[str, str]:
        """What the kernel sets besides `name`, as it is now, where giving `name` its value `held` back would not lead there."""
        conf = _FORWARDING.get(name)
        if conf is None:
            return {}
        left = {f"{conf}/{link.name}/forwarding": held for link in (self._proc / conf).glob("*") if link.name != "all"}
        if conf == "net/ipv4/conf":
            left[f"{conf}/all/accept_redirects"] = "1" if held == "0" else "0"
        values = {other: self._value(other) for other in left}
        return {f"{name}{_ALONG}{other}": value for other, value in sorted(values.items()) if value not in (None, left[other])}

    def _listening(self) -> dict[str, str]:
        """Links that take routes from router advertisements while they do not forward, and what says so."""
        names = [f"net/ipv6/conf/{link.name}/accept_ra" for link in sorted((self._proc / "net/ipv6/conf").glob("*"))]
        links = [name for name in names if name.split("/")[3] not in ("all", "default") and self._value(name) == "1"]
        return dict.fromkeys((f"{_IPV6_FORWARDING.name}{_ALONG}{name}" for name in links), "1")

    def _keep_listening(self, kept: Mapping[str, str]) -> None:
        """Let those links go on, also where a kill came between keeping what they were and this."""
        names = (name.removeprefix(f"{_IPV6_FORWARDING.name}{_ALONG}") for name in kept if name.endswith("/accept_ra"))
        for name in names:
            if self._value(name) == "1":
                self._write(name, _LISTEN_ALWAYS)

    def _value(self, name: str) -> str | None:
        try:
            return normal(self._path(name).read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise unreadable(error, f"sysctl {name}") from error

    def _write(self, name: str, value: str) -> None:
        try:
            self._path(name).write_text(value)
        except FileNotFoundError as error:
            raise self._missing(name) from error
        except OSError as error:
            if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
                dotted = name.replace("/", ".")
                msg = (
                    f"cannot set sysctl {name} to {value!r}: {error.strerror}; set it where the container is started "
                    f"(--sysctl {dotted}={value}, or securityContext.sysctls) or mount /proc/sys writable"
                )
                raise Permanent(msg) from error
            raise mapped(error, f"set sysctl {name} to {value!r}") from error

    def _missing(self, name: str) -> MeshmarkError:
        parts = name.split("/")
        if len(parts) > 3 and parts[2] in _PER_LINK:  # noqa: PLR2004 - net/ipv4/conf/LINK/...
            return Waiting(f"sysctl {name}: there is no link {parts[3]}", f"link {parts[3]}")
        return Permanent(f"this kernel has no sysctl {name}")

    def _path(self, name: str) -> Path:
        if not name.startswith("net/") or ".." in name.split("/"):
            msg = f"{name!r} is not a sysctl of a network namespace; write it like net/ipv4/ip_forward"
            raise Permanent(msg)
        return self._proc / name

    @property
    def _file(self) -> Path:
        if self._folder is None:
            msg = "a process that only looks at the kernel changes no sysctls"
            raise Permanent(msg)
        return self._folder / "sysctls.json"

    def _kept(self) -> dict[str, str]:
        if self._folder is None:
            return {}
        try:
            return msgspec.json.decode(self._file.read_bytes(), type=dict[str, str])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.MsgspecError) as error:
            msg = f"{self._file}, which keeps the sysctls' old values, cannot be read: {error}; move it away to start without"
            raise Permanent(msg) from error

    def _keep(self, kept: Mapping[str, str]) -> None:
        try:
            write_durably(self._file, msgspec.json.format(msgspec.json.encode(dict(sorted(kept.items())))), 0o644)
        except OSError as error:
            raise mapped(error, f"keep sysctls' old values in {self._file}") from error


def general_of(name: str) -> str | None:
    """The sysctl of all links that counts as well for this one of a single link, the larger of the two in force; None for all others."""
    parts = name.split("/")
    is_checked = parts[:3] == ["net", "ipv4", "conf"] and parts[4:] == ["rp_filter"] and parts[3] not in ("all", "default")
    return "net/ipv4/conf/all/rp_filter" if is_checked else None


def stricter(value: str, general: str | None) -> str:
    """What is in force of two values of rp_filter (fib_validate_source and IN_DEV_RPFILTER, include/linux/inetdevice.h)."""
    return str(max(int(value), int(general or 0)))


def normal(value: str) -> str:
    """A sysctl's value with single spaces between its numbers."""
    return " ".join(value.split())


def write_durably(path: Path, content: bytes, mode: int) -> None:
    """Replace a file so that after a crash it holds the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode)
    try:
        os.fchmod(descriptor, mode)
        os.write(descriptor, content)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    rename_durably(temporary, path)


def rename_durably(old: Path, new: Path) -> None:
    """Let a file take the place of another one in its folder; after a crash it did, or it did not."""
    old.rename(new)
    folder = os.open(new.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
