"""The rendered configuration, as text and as a table of permissions."""

import json

from services.runtime.accounts import HostUsers, ServerConfig, host_user, inbox_prefix, render

CONFIG = ServerConfig(store_dir="/data", planner='p"w', publisher="b", reader="r", system="s", hosts=(HostUsers("rome", "a.b", "x", "y"),))


def users(text, account):
    return {user["user"]: user for user in json.loads(text)["accounts"][account]["users"]}


def test_rendering_is_deterministic_and_quotes():
    """Equal values give equal text, and any password survives."""
    assert render(CONFIG) == render(CONFIG)
    assert users(render(CONFIG), "CONTROL")["planner"]["password"] == 'p"w'


def test_a_host_user_has_exactly_its_own_subjects():
    """No permission of a host has a wildcard where the host's name stands."""
    applier = users(render(CONFIG), "HOSTS")["applier=rome=a%2Eb"]["permissions"]
    assert applier["subscribe"]["allow"] == ["_INBOX.applier=rome=a%2Eb.>", "mesh.cmd.rome.a%2Eb.>"]
    assert applier["publish"]["allow"] == [
        "$JS.API.CONSUMER.MSG.NEXT.PLAN.applier=rome=a%2Eb",
        "$JS.ACK.PLAN.applier=rome=a%2Eb.>",
        "$JS.API.DIRECT.GET.PLAN.mesh.plan.rome.a%2Eb",
        "$JS.API.DIRECT.GET.SNAPSHOT.mesh.snapshot.rome.a%2Eb.>",
        "$JS.API.DIRECT.GET.STATUS.mesh.status.rome.a%2Eb",
        "mesh.deadletter.rome.a%2Eb.applier",
        "mesh.status.rome.a%2Eb",
        "mesh.topology.publickey.rome.a%2Eb",
        "_R_.>",
    ]


def test_the_auditor_reports_drift_only():
    """An auditor may say nothing about status or keys, and commands nobody. What was told of its own host it may read."""
    allowed = users(render(CONFIG), "HOSTS")["auditor=rome=a%2Eb"]["permissions"]["publish"]["allow"]
    assert {"mesh.drift.rome.a%2Eb.>", "$JS.API.DIRECT.GET.DRIFT.mesh.drift.rome.a%2Eb.>"} <= set(allowed)
    assert not any(subject.startswith(("mesh.status", "mesh.topology", "mesh.cmd", "_R_")) for subject in allowed)


def test_nobody_but_the_planner_shares_the_account_of_the_streams():
    """Inside that account any reply subject is a way to write."""
    assert list(users(render(CONFIG), "CONTROL")) == ["planner"]


def test_only_publishers_accept_what_a_planner_holds_back():
    """Readers see it, hosts do not even import it."""
    allowed = {name: user["permissions"]["publish"]["allow"] for name, user in users(render(CONFIG), "PEOPLE").items()}
    assert [name for name, subjects in allowed.items() if "mesh.planner.accept" in subjects] == ["publisher"]
    assert "mesh.planner" not in json.dumps(json.loads(render(CONFIG))["accounts"]["HOSTS"])
    assert {"stream": {"account": "CONTROL", "subject": "mesh.frozen.>"}} in json.loads(render(CONFIG))["accounts"]["PEOPLE"]["imports"]


def test_names_of_users_and_inboxes():
    """A host's user is its consumer; an anonymous client keeps the inbox that NATS clients have."""
    assert host_user("auditor", "rome", "a.b") == "auditor=rome=a%2Eb"
    assert inbox_prefix("planner") == "_INBOX.planner"
    assert inbox_prefix("") == "_INBOX"
