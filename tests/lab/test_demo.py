"""The guided lab, whole: what a newcomer sees is what the checks say."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.privileged, pytest.mark.slow, pytest.mark.timeout(400)]

OWN_RUN = 'mount -t tmpfs none /run && mkdir /run/netns && exec "$@"'
"""A /run of its own, and with it its own network namespace names: this lab may run beside another one of the machine."""


def test_every_check_of_the_guided_lab_holds():
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", OWN_RUN, "sh", sys.executable, "-m", "services.cli.main"]
    done = subprocess.run(
        [*command, "lab", "demo", "--output", "json"], capture_output=True, text=True, cwd=Path.cwd(), timeout=380, check=False
    )
    document = json.loads(done.stdout)
    failed = [check for check in document["checks"] if not check["ok"]]
    assert not failed, done.stderr[-4000:]
    assert document["ok"] is True
    assert done.returncode == 0
    assert len(document["checks"]) >= 20
