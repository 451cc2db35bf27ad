"""The small pure parts: event headers, stream table, messages, settings, logs, readiness."""

import json

import pytest
from prometheus_client import generate_latest

from schemas import codec
from schemas.status import DeadLetter
from services.runtime import events, logs, streams
from services.runtime.deadletters import MAX_PAYLOAD_BYTES, describe
from services.runtime.errors import Permanent, Transient, Waiting
from services.runtime.health import STUCK_S, HealthServer, Readiness
from services.runtime.messages import Message, delivered, stored, unix_time
from services.runtime.metrics import Metrics
from services.runtime.retries import retrying
from services.runtime.settings import Credentials, load, read_credentials

TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_given_attributes_stay_and_missing_ones_are_filled_in():
    """A publisher's own CloudEvents attributes are not touched."""
    found = events.complete({"ce-id": "own", "traceparent": TRACE}, source="/meshmark/x", type="meshmark.y")
    assert found["ce-id"] == "own"
    assert found["traceparent"] == TRACE
    assert found["ce-source"] == "/meshmark/x"
    assert found["ce-time"].endswith("Z")


def test_a_child_keeps_the_trace_and_changes_the_span():
    """Work that follows from a message is in the message's trace."""
    child = events.child(TRACE)
    assert child.split("-")[1] == TRACE.split("-")[1]
    assert child.split("-")[2] != TRACE.split("-")[2]


@pytest.mark.parametrize("bad", [None, "", "x", TRACE.upper(), f"00-{'0' * 32}-b7ad6b7169203331-01", TRACE + "x"])
def test_a_malformed_trace_starts_a_new_one(bad):
    """What is no traceparent is dropped, as W3C asks."""
    assert events.child(events.child(bad))[:35] != events.child(bad)[:35]


def test_streams_keep_what_an_operator_set():
    """Replicas and limits of a stream in force survive; meshmark's own settings win."""
    spec = next(spec for spec in streams.STREAMS if spec.name == "STATE")
    found = streams.configuration(spec, {"num_replicas": 3, "max_bytes": 7, "max_msgs_per_subject": 5})
    assert (found["num_replicas"], found["max_bytes"], found["max_msgs_per_subject"]) == (3, 7, 1)


def test_only_snapshots_take_batches_and_all_give_direct_gets():
    """The flags that the readers and the planner rely on."""
    assert [spec.name for spec in streams.STREAMS if spec.atomic] == ["SNAPSHOT"]
    assert all(streams.configuration(spec)["allow_direct"] for spec in streams.STREAMS)


@pytest.mark.parametrize(
    "reply",
    ["$JS.ACK.PLAN.c.2.7.3.1700000000500000000.4", "$JS.ACK._.hash.PLAN.c.2.7.3.1700000000500000000.4.random"],
)
def test_place_and_time_from_the_acknowledgement_subject(reply):
    """Both forms of the subject are read."""
    found = delivered("s", b"x", {}, reply, None)
    assert (found.deliveries, found.sequence, found.stored_s) == (2, 7, 1700000000.5)


def test_a_stored_message_loses_the_servers_headers():
    """Place and time become fields; the publisher's headers stay."""
    headers = {"Nats-Subject": "s", "Nats-Sequence": "9", "Nats-Time-Stamp": "2023-11-14T22:13:20.25Z", "own": "1"}
    assert stored(Message("inbox", b"x", headers)) == Message("s", b"x", {"own": "1"}, 9, 1700000000.25)


def test_times_of_any_precision():
    """Go prints as many digits as there are."""
    assert unix_time("2023-11-14T22:13:20Z") == 1700000000
    assert unix_time("2023-11-14T22:13:20.123456789Z") == pytest.approx(1700000000.123456789)
    assert unix_time("") == 0


async def test_a_plain_message_cannot_be_acknowledged():
    """Acknowledging what no consumer delivered is a mistake in the program."""
    with pytest.raises(Permanent, match="nothing to acknowledge"):
        await Message("s", b"x").ack()


def test_a_dead_letter_is_cut():
    """The original is kept up to 64 KiB, and the letter decodes again."""
    letter = describe(Message("s", b"x" * (MAX_PAYLOAD_BYTES + 1), sequence=4, deliveries=5), "why")
    assert len(letter.payload) == MAX_PAYLOAD_BYTES
    assert codec.decode(codec.encode(letter), DeadLetter) == letter


def test_flags_win_over_the_environment_over_the_file(tmp_path):
    """The later source wins, and an absent flag does not count."""
    file = tmp_path / "meshmark.toml"
    file.write_text('host = "file"\ncluster = "file"\nresync_s = 7\n')
    environment = {
        "MESHMARK_HOST": "environment",
        "MESHMARK_CLUSTER": "environment",
        "MESHMARK_PORT": "tcp://10.0.0.1",
        "MESHMARK_SERVICE_HOST": "10.0.0.1",
    }
    found = load(file, environment, {"host": "flag", "cluster": None})
    assert (found.host, found.cluster, found.resync_s) == ("flag", "environment", 7.0)


@pytest.mark.parametrize(
    "environment, flags, text",
    [
        ({"MESHMARK_RESYNC_S": "soon"}, {}, r"resync_s \(from the environment variable MESHMARK_RESYNC_S\): 'soon'"),
        ({}, {"log_format": "xml"}, r"log_format \(from the flag --log-format\)"),
        ({}, {"http": "9464"}, "write it as address:port"),
        ({}, {"nats_url": ""}, "write it as nats://host:port"),
        ({}, {"nats_url": "nats://127.0.0.1:notaport"}, "write it as nats://host:port"),
        ({}, {"nats_url": "nats://a:4222,nats://:4222"}, "write it as nats://host:port"),
        ({}, {"host": "a b"}, "is not a name"),
        ({}, {"nats_url": "http://127.0.0.1:4222"}, "write it as nats://host:port"),
        ({"MESHMARK_NATS_ULR": "nats://a:1"}, {}, r"MESHMARK_NATS_ULR: no such setting; did you mean MESHMARK_NATS_URL\?"),
        ({}, {"nonsense": 1}, "no such setting; there are nats_url"),
    ],
)
def test_a_wrong_setting_names_itself_its_origin_and_what_is_right(environment, flags, text):
    """Whoever reads the error knows where to go."""
    with pytest.raises(Permanent, match=text):
        load(None, environment, flags)


def test_require_host_says_what_is_missing():
    """A host service without its name cannot start."""
    with pytest.raises(Permanent, match="host not set"):
        load(None, {}, {"cluster": "rome"}).require_host()


def test_credentials(tmp_path):
    """The file gives the user; its password is in no representation; a broken one is explained."""
    file = tmp_path / "credentials.json"
    file.write_text(json.dumps({"user": "u", "password": "hidden"}))
    file.chmod(0o600)
    found = read_credentials(file)
    assert found == Credentials("u", "hidden")
    assert "hidden" not in repr(found)
    file.write_text("no")
    with pytest.raises(Permanent, match="is not"):
        read_credentials(file)
    with pytest.raises(Permanent, match="No such file"):
        read_credentials(tmp_path / "none")


def test_secrets_never_reach_the_log():
    """Fields named like secrets and logins in URLs are hidden; other fields stay."""
    event = {"event": "x", "password": "p", "private_key": "k", "url": "nats://u:p@host:4222", "tokens": 3}
    assert logs.hide_secrets(None, "info", event) == {
        "event": "x",
        "password": "***",
        "private_key": "***",
        "url": "nats://***@host:4222",
        "tokens": 3,
    }


def test_readiness_is_all_conditions():
    """One unmet condition is enough, and says why."""
    ready = Readiness("broker", "plan")
    ready("broker")
    assert not ready.ready
    ready("plan")
    assert ready.ready
    ready("broker", "gone")
    assert ready.reasons() == {"broker": "gone", "plan": ""}


def test_a_loop_that_stands_still_is_not_alive():
    """Liveness is the event loop's beat, not the HTTP thread's."""
    ready = Readiness()
    assert ready.alive(ready._beat_s + STUCK_S - 1)
    assert not ready.alive(ready._beat_s + STUCK_S + 1)


def test_health_over_http():
    """Probes and metrics are served on a free port that can be read."""
    from urllib.error import HTTPError
    from urllib.request import urlopen

    metrics, ready = Metrics(), Readiness("broker")
    metrics.planner_plans.inc()
    with HealthServer("127.0.0.1:0", metrics.registry, ready) as server:
        base = f"http://127.0.0.1:{server.port}"
        with pytest.raises(HTTPError) as refused:
            urlopen(f"{base}/readyz")  # noqa: S310 - our own server
        with refused.value as answer:
            assert (answer.status, json.load(answer)["conditions"]) == (503, {"broker": "not yet"})
        ready("broker")
        for path, part in (("readyz", b'"ready": true'), ("healthz", b'"alive": true'), ("metrics", b"meshmark_planner_plans_total 1.0")):
            with urlopen(f"{base}/{path}") as answer:  # noqa: S310 - our own server
                assert part in answer.read()
        with pytest.raises(Permanent, match="set `http`"):
            HealthServer(f"127.0.0.1:{server.port}", metrics.registry, ready)


def test_two_services_have_metrics_of_their_own():
    """Nothing is registered process-wide, and every name begins with the product's."""
    one, two = Metrics(), Metrics()
    one.nats_reconnects.inc()
    assert two.nats_reconnects._value.get() == 0
    names = [line.split()[2] for line in generate_latest(one.registry).decode().splitlines() if line.startswith("# TYPE")]
    assert names
    assert all(name.startswith("meshmark_") for name in names)


async def test_retries_wait_at_least_as_long_as_asked_and_count():
    """A Transient error is tried again after its own wait; the result then is the action's."""
    waits, metrics, failures = [], Metrics(), [Transient("no", 3.0), Transient("no", 0.0)]

    async def action():
        if failures:
            raise failures.pop(0)
        return "done"

    async def sleep(seconds):
        waits.append(seconds)

    assert await retrying("test", action, metrics=metrics, sleep=sleep) == "done"
    assert waits[0] >= 3.0
    assert 0 <= waits[1] <= 5.0
    assert metrics.retries.labels("test")._value.get() == 2


async def test_only_transient_errors_are_tried_again_and_not_for_ever():
    """Any other error is raised at once, and the last Transient one at the end."""
    calls = []

    async def sleep(_):
        """No time passes."""

    async def fail(error):
        calls.append(error)
        raise error

    with pytest.raises(Waiting):
        await retrying("test", lambda: fail(Waiting("x", "y")), sleep=sleep)
    assert len(calls) == 1
    with pytest.raises(Transient):
        await retrying("test", lambda: fail(Transient("x")), attempts=4, sleep=sleep)
    assert len(calls) == 5
