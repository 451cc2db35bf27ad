"""What all topology objects share, and the base of those that go to hosts as they are (pass-through objects)."""

from __future__ import annotations

import re
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, Struct

from schemas.values import Name, Text

ORDER_LIMIT = 100
_PATTERN = re.compile(r"[A-Za-z0-9._*?-]{1,63}")


class Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True, rename="camel"):
    """What people write: camelCase fields, and no field that is not known. Subclasses inherit all but `kw_only`."""


class Object(Strict, frozen=True, kw_only=True, tag_field="kind"):
    """What all topology objects share.

    `name` is unique among the objects of one kind in a cluster. `revision`, where given, grows with each change: an object is refused
    whose revision is lower than that of the admitted one, or of one that waits to be admitted, or equal with other content.
    """

    name: Name
    revision: Annotated[int, Meta(ge=0)] | None = None

    @property
    def kind(self) -> str:
        return type(self).__name__

    @property
    def home(self) -> Name:
        """The cluster whose subject space holds this object."""
        raise NotImplementedError

    @property
    def ref(self) -> str:
        """``Kind/cluster/name``: how refusals, plans and drift name this object."""
        return f"{self.kind}/{self.home}/{self.name}"


class HostPattern(Text):
    """The name of a host, or a pattern of names: ``*`` stands for any characters, ``?`` for any one."""

    __slots__ = ()
    json_schema: ClassVar[dict[str, Any]] = {"pattern": f"^{_PATTERN.pattern}$", "examples": ["worker-*"]}

    @classmethod
    def canonical(cls, value: str) -> str:
        if not _PATTERN.fullmatch(value):
            msg = f"{value!r} is not a pattern of host names; use 1 to 63 letters, digits, '.', '_', '-', '*' and '?'"
            raise ValueError(msg)
        return value


class HostSelector(Strict, frozen=True, kw_only=True):
    """Which hosts of a cluster are meant: all that every given field fits; without fields, all of them.

    `names` fits when one of its patterns does. `peering` is the name of a peering: its gateway in this cluster takes part in it, and so
    do the cluster's nodes while it is there.
    """

    names: Annotated[tuple[HostPattern, ...], Meta(max_length=256)] = ()
    role: Literal["node", "gateway"] | None = None
    peering: Name | None = None


class PassThrough(Object, frozen=True, kw_only=True):
    """An object that hosts hold as it is written. Each is a unit of its own on every host that `hosts` selects.

    Where objects on one host meet, the one of lower `order` comes first.
    """

    cluster: Name
    hosts: HostSelector = HostSelector()
    order: Annotated[int, Meta(ge=-ORDER_LIMIT, le=ORDER_LIMIT)] = 0

    @property
    def home(self) -> Name:
        return self.cluster
