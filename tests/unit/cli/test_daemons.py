"""``meshmark server``: credentials that belong to one user each, and what is said about bad flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from services.cli.daemons import server_config
from services.runtime.accounts import host_user
from services.runtime.errors import Permanent

LISTEN = "127.0.0.1:4222"
# Two hosts of one dotted name: rome.a/b and rome/a.b.
TWINS = ["rome.a/b", "rome/a.b"]


def test_hosts_whose_dotted_names_are_the_same_have_credentials_of_their_own(tmp_path: Path):
    config = server_config(tmp_path, LISTEN, TWINS, anonymous=False)
    passwords = {password for host in config.hosts for password in (host.applier, host.auditor)}
    assert len(passwords) == 4
    for host in config.hosts:
        for role in ("applier", "auditor"):
            user = host_user(role, host.cluster, host.host)
            written = json.loads((tmp_path / "creds" / f"{user}.json").read_bytes())
            assert written == {"user": user, "password": getattr(host, role)}


def test_credentials_are_kept_and_only_their_owner_reads_them(tmp_path: Path):
    assert server_config(tmp_path, LISTEN, TWINS, anonymous=False).hosts == server_config(tmp_path, LISTEN, TWINS, anonymous=False).hosts
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "creds").iterdir()}
    assert set(modes.values()) == {0o600}
    assert {"planner.json", "publisher.json", "reader.json", "applier=rome=a%2Eb.json"} <= modes.keys()


@pytest.mark.parametrize("listen, address", [(LISTEN, "127.0.0.1"), ("[::1]:4222", "[::1]")])
def test_an_address_is_read_as_that_of_settings(tmp_path: Path, listen: str, address: str):
    config = server_config(tmp_path, listen, [], anonymous=False)
    assert (config.address, config.port) == (address, 4222)


@pytest.mark.parametrize("listen", ["127.0.0.1", ":4222", "127.0.0.1:70000", "127.0.0.1:²"])
def test_an_address_that_is_none_is_said_so(tmp_path: Path, listen: str):
    with pytest.raises(Permanent, match=r"--listen .* is wrong: write it as address:port"):
        server_config(tmp_path, listen, [], anonymous=False)


@pytest.mark.parametrize("host", ["rome", "rome/", "rome/a/b", "rome/a b", "rome/*"])
def test_a_host_that_is_none_is_said_so(tmp_path: Path, host: str):
    with pytest.raises(Permanent, match="rome"):
        server_config(tmp_path, LISTEN, [host], anonymous=False)


@pytest.mark.parametrize("content", ["", "{}", '{"user": "reader", "password": "x"}'])
def test_a_credentials_file_that_holds_nothing_is_named(tmp_path: Path, content: str):
    (tmp_path / "creds").mkdir()
    (tmp_path / "creds" / "planner.json").write_text(content)
    with pytest.raises(Permanent, match=r"creds/planner\.json"):
        server_config(tmp_path, LISTEN, [], anonymous=False)


def test_a_folder_that_cannot_be_made_is_said_so(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(Permanent, match="Not a directory"):
        server_config(tmp_path / "file" / "broker", LISTEN, [], anonymous=False)
