"""Lets parts of pyroute2 be imported alone: what its package imports besides takes 6 MiB and a third of its time, and is not used here.

Importing this module puts the package in its place without running it. Whoever asks the package itself for something gets all of it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

_NAME = "pyroute2"


class _Package(ModuleType):
    """The package before it is run."""

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - as a module's attributes are
        if name.startswith("__"):
            raise AttributeError(name)
        if importlib.util.find_spec(f"{_NAME}.{name}") is not None:
            return importlib.import_module(f"{_NAME}.{name}")
        self.__class__ = ModuleType  # type: ignore[assignment]
        loader = self.__spec__.loader if self.__spec__ else None
        assert loader is not None
        loader.exec_module(self)
        return getattr(self, name)


def _put() -> None:
    spec = importlib.util.find_spec(_NAME)
    if _NAME in sys.modules or spec is None:
        return
    package = importlib.util.module_from_spec(spec)
    package.__class__ = _Package
    sys.modules[_NAME] = package


_put()
