"""The compose file and the units start what there is: stages, commands and settings by the names that they have now."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from services.runtime.settings import ENVIRONMENT_PREFIX, Settings

DEPLOY = Path(__file__).parents[3] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
UNITS = {path.stem.removeprefix("meshmark-"): path.read_text() for path in (DEPLOY / "systemd").glob("*.service")}
SETTINGS = {f"{ENVIRONMENT_PREFIX}{name.upper()}" for name in Settings.__struct_fields__}
OF_A_UNIT = {"MESHMARK_LISTEN", "MESHMARK_HOSTS"}  # words of the broker's command line


def help_of(command: str) -> str:
    done = subprocess.run([sys.executable, "-m", "services.cli.main", command, "--help"], check=True, capture_output=True, text=True)
    return done.stdout


@pytest.mark.parametrize("name", COMPOSE)
def test_a_container_of_the_compose_file_can_be_built_and_understands_its_environment(name: str, replay):
    service = COMPOSE[name]
    assert service["build"]["target"] in replay.parse(replay.CONTAINERFILE.read_text())
    assert {key for key in service["environment"] if key.startswith(ENVIRONMENT_PREFIX)} <= SETTINGS
    assert service["init"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service.get("cap_add", []) == (["NET_ADMIN"] if name in ("applier", "auditor") else [])


def test_containers_have_the_time_to_end_that_services_take():
    assert all(int(service["stop_grace_period"].removesuffix("s")) > 2 * Settings().shutdown_s for service in COMPOSE.values())


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_runs_a_command_with_settings_that_there_are(name: str):
    (start,) = [line for line in UNITS[name].splitlines() if line.startswith("ExecStart=")]
    program, command, *options = start.removeprefix("ExecStart=").split()
    assert program == "/opt/meshmark/bin/meshmark"
    text = help_of(command)
    assert all(option in text for option in options if option.startswith("--"))
    lines = [line for line in UNITS[name].splitlines() if line.startswith("Environment=")]
    variables = {word.partition("=")[0] for line in lines for word in line.removeprefix("Environment=").split()}
    assert variables <= SETTINGS | (OF_A_UNIT if name == "broker" else set())


def test_services_of_one_machine_serve_health_at_ports_of_their_own():
    default = Settings().http
    words = {name: UNITS[name].split() for name in ("planner", "applier", "auditor")}
    used = [next((word.partition("HTTP=")[2] for word in found if "HTTP=" in word), default) for found in words.values()]
    assert len(set(used)) == 3
    assert COMPOSE["applier"]["environment"]["MESHMARK_HTTP"] != COMPOSE["auditor"]["environment"]["MESHMARK_HTTP"]
