"""What deploy/ starts by the rights that it has: who keeps what, and the names of credentials."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from services.runtime.accounts import host_user

ROOT = Path(__file__).parents[3]
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
KEEPERS = {"applier", "broker"}


def unit(name: str) -> list[str]:
    return (ROOT / "deploy" / "systemd" / f"meshmark-{name}.service").read_text().splitlines()


def test_the_applier_alone_is_given_the_private_key():
    holders = {name for name, service in COMPOSE.items() if any("/var/lib/meshmark" in volume for volume in service["volumes"])}
    assert holders == {"applier"}
    assert all(volume.endswith(":ro") for volume in COMPOSE["auditor"]["volumes"])


@pytest.mark.parametrize("name", ["broker", "planner", "applier", "auditor"])
def test_a_unit_has_a_place_for_what_it_keeps_and_only_then(name: str):
    places = [line for line in unit(name) if line.startswith("StateDirectory=")]
    assert len(places) == (name in KEEPERS)


def test_the_auditors_unit_cannot_see_the_private_key():
    (hidden,) = [line for line in unit("auditor") if line.startswith("InaccessiblePaths=")]
    assert "-/var/lib/meshmark" in hidden.partition("=")[2].split()


@pytest.mark.parametrize("role", ["applier", "auditor"])
def test_the_documentation_names_the_credentials_that_the_server_writes(role: str):
    assert f"broker/creds/{host_user(role, 'rome', 'node-1')}.json" in (ROOT / "docs" / "deploy.md").read_text()
