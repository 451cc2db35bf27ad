"""Modules, without loading one: the kernel is asked only where that can load nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.kernel.survey.modules import Modules
from services.kernel.survey.values import Ability

RELEASE = "6.1.0"
TRIED = Ability("yes", "tried")
DENIED = Ability("unknown", "no right")


def root(
    folder: Path, *, modular: bool = True, loaded: tuple[str, ...] = (), installed: bool = True, modprobe: str = "/sbin/modprobe"
) -> Path:
    """A file tree in which vxlan is a module, wireguard is built in, and geneve is not there."""
    for name in loaded:
        (folder / "sys/module" / name).mkdir(parents=True)
    kernel = folder / "proc/sys/kernel"
    kernel.mkdir(parents=True)
    if modular:
        (folder / "proc/modules").write_text("")
        (kernel / "modules_disabled").write_text("0\n")
        (kernel / "modprobe").write_text(f"{modprobe}\n")
    if installed:
        lib = folder / "lib/modules" / RELEASE
        lib.mkdir(parents=True)
        (lib / "modules.builtin").write_text("kernel/drivers/net/wireguard/wireguard.ko\n")
        (lib / "modules.dep").write_text(
            "kernel/drivers/net/vxlan/vxlan.ko.xz: kernel/net/udp-tunnel.ko.xz\nkernel/net/udp-tunnel.ko.xz:\n"
        )
    return folder


@pytest.mark.parametrize(
    "options, name, expected",
    [
        ({}, "vxlan", Ability("installed", "module vxlan is installed, and loads on first use")),
        ({"loaded": ("vxlan",)}, "vxlan", TRIED),
        ({}, "wireguard", TRIED),
        ({}, "udp_tunnel", Ability("installed", "module udp_tunnel is installed, and loads on first use")),
        ({"installed": False}, "vxlan", Ability("unknown", "module vxlan is not loaded, and asking the kernel would load it")),
        ({"installed": False, "modular": False}, "vxlan", TRIED),
        ({"installed": False, "modprobe": ""}, "vxlan", TRIED),
    ],
)
def test_the_kernel_is_asked_where_that_loads_nothing(tmp_path: Path, options: dict, name: str, expected: Ability):
    assert Modules(RELEASE, root(tmp_path, **options)).ability([name], lambda: TRIED) == expected


def test_what_is_not_there_is_not_there(tmp_path: Path):
    found = Modules(RELEASE, root(tmp_path)).ability(["vxlan", "geneve"], lambda: TRIED)
    assert (found.state, "no module geneve" in found.detail) == ("no", True)


def test_what_is_loaded_is_there_even_where_it_may_not_be_tried(tmp_path: Path):
    modules = Modules(RELEASE, root(tmp_path, loaded=("vxlan",)))
    assert modules.ability(["vxlan"], lambda: DENIED) == Ability("yes", "vxlan loaded; not tried (no right)")


def test_without_modules_what_may_not_be_tried_is_unknown(tmp_path: Path):
    assert Modules(RELEASE, root(tmp_path, modular=False)).ability(["vxlan"], lambda: DENIED) == DENIED
