"""Which kernel modules are there, without loading one: from /sys/module, /proc and /lib/modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from services.kernel.survey.values import Ability

ModuleState = Literal["present", "installed", "absent", "unknown"]


class Modules:
    """The modules of the running kernel, whose release is given. In a container /lib/modules is mostly not there: ``unknown`` then."""

    def __init__(self, release: str, root: Path = Path("/")) -> None:
        self._loaded = root / "sys/module"
        self._folder = root / "lib/modules" / release
        self._proc = root / "proc"

    @cached_property
    def may_load(self) -> bool:
        """Whether asking the kernel for something could make it load a module. A kernel without /proc/modules has no modules at all."""
        kernel = self._proc / "sys/kernel"
        disabled = _text(kernel / "modules_disabled") == "1" or _text(kernel / "modprobe") == ""
        return (self._proc / "modules").exists() and not disabled

    def state(self, name: str) -> ModuleState:
        """Of one module: loaded or built in, a file that can be loaded, not there, or not to be known from here."""
        if (self._loaded / name).is_dir() or name in self._listed("modules.builtin"):
            return "present"
        if not self._folder.is_dir():
            return "unknown"
        return "installed" if name in self._listed("modules.dep") else "absent"

    def ability(self, names: Sequence[str], probe: Callable[[], Ability]) -> Ability:
        """Whether the kernel can do what these modules are for. It is asked by `probe` only where that loads nothing."""
        states = {name: self.state(name) for name in names}
        if not self.may_load:
            return probe()
        if all(state == "present" for state in states.values()):
            found = probe()
            # Where it may not be tried, what is there is still there.
            return found if found.state != "unknown" else Ability("yes", f"{' and '.join(names)} loaded; not tried ({found.detail})")
        missing = [name for name, state in states.items() if state != "present"]
        for state in ("absent", "unknown"):
            if named := [name for name in missing if states[name] == state]:
                if state == "absent":
                    return Ability("no", f"no module {named[0]} under {self._folder}")
                return Ability("unknown", f"module {named[0]} is not loaded, and asking the kernel would load it")
        return Ability("installed", f"module {missing[0]} is installed, and loads on first use")

    def _listed(self, file: str) -> frozenset[str]:
        if file not in self._lists:
            lines = (_text(self._folder / file) or "").splitlines()
            names = (line.partition(":")[0].rsplit("/", 1)[-1] for line in lines)
            self._lists[file] = frozenset(name.partition(".ko")[0].replace("-", "_") for name in names)
        return self._lists[file]

    @cached_property
    def _lists(self) -> dict[str, frozenset[str]]:
        return {}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None
