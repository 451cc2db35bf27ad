"""The JetStream API as requests and answers: streams, consumers, reads. Raw JSON, because host users may only use parts of it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import structlog
from msgspec import Struct

from services.runtime import errormap, streams
from services.runtime.connection import Connection, Inbox
from services.runtime.errors import MeshmarkError, OutcomeUnknown, Transient, Waiting
from services.runtime.messages import Message, stored, unix_time

API = "$JS.API"
_TIMEOUT_S = 5.0
_NANOSECONDS = 10**9
_NO_RESPONDERS, _NOT_FOUND, _END_OF_BATCH = "503", "404", "204"
_NAME_TAKEN, _CONSUMER_MISSING, _MESSAGE_MISSING = 10058, 10014, 10037
_BATCH = 512
_READ_ATTEMPTS = 5
_SETTLE_ATTEMPTS, _SETTLE_S = 3, 0.25
"""A restarted server accepts clients a moment before its streams answer; nats.go waits in the same way."""

log = structlog.get_logger(__name__)


class ApiError(Exception):
    """What the API answered instead of a result; mapped into the tree by ``call``'s callers or by ``mapped``."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.code = int(error.get("code", 0))
        self.err_code = int(error.get("err_code", 0))
        self.description = str(error.get("description", ""))
        super().__init__(self.description)

    def mapped(self, doing: str) -> MeshmarkError:
        return errormap.from_api(self.code, self.err_code, self.description, doing)


class StreamInfo(Struct, frozen=True):
    """A stream's incarnation (`created_s`, Unix time, changes when it is made anew) and extent in sequences."""

    created_s: float
    messages: int
    first_sequence: int
    last_sequence: int


async def settled_ask(connection: Connection, subject: str, data: bytes, headers: Mapping[str, str] | None = None) -> Message:
    """Ask JetStream; Waiting when nobody answers there, tried for a moment because a starting server looks the same."""
    answer = await connection.ask(subject, data, timeout_s=_TIMEOUT_S, headers=headers)
    for _ in range(_SETTLE_ATTEMPTS):
        if answer.status != _NO_RESPONDERS:
            return answer
        await asyncio.sleep(_SETTLE_S)
        answer = await connection.ask(subject, data, timeout_s=_TIMEOUT_S, headers=headers)
    if answer.status == _NO_RESPONDERS:
        raise _no_stream(subject)
    return answer


def _no_stream(subject: str) -> Waiting:
    msg = f"no stream answers on {subject}; start a planner, which creates the streams, and check that JetStream is on"
    return Waiting(msg, f"the stream behind {subject}")


def result(answer: Message) -> dict[str, Any]:
    """The JSON of an answer; ApiError when it is an error."""
    found: dict[str, Any] = json.loads(answer.data)
    if "error" in found:
        raise ApiError(found["error"])
    return found


async def call(connection: Connection, verb: str, body: Mapping[str, object] | None = None) -> dict[str, Any]:
    """One API call; raises ApiError, or the tree's errors when there is no answer."""
    answer = await settled_ask(connection, f"{API}.{verb}", json.dumps(body).encode() if body else b"")
    return result(answer)


async def ensure_stream(connection: Connection, spec: streams.StreamSpec, replicas: int) -> None:
    """Make the stream be as `spec` says, whether it exists or not, keeping what an operator set besides."""
    doing = f"stream {spec.name}"
    try:
        await call(connection, f"STREAM.CREATE.{spec.name}", {**streams.configuration(spec), "num_replicas": replicas})
    except ApiError as error:
        if error.err_code != _NAME_TAKEN:
            raise error.mapped(doing) from error
    else:
        return
    try:
        current = (await call(connection, f"STREAM.INFO.{spec.name}"))["config"]
        wanted = streams.configuration(spec, current)
        if any(current.get(key) != value for key, value in wanted.items()):
            await call(connection, f"STREAM.UPDATE.{spec.name}", wanted)
    except ApiError as error:
        raise error.mapped(doing) from error


async def stream_info(connection: Connection, stream: str) -> StreamInfo:
    try:
        info = await call(connection, f"STREAM.INFO.{stream}")
    except ApiError as error:
        msg = f"stream {stream}"
        raise error.mapped(msg) from error
    state = info["state"]
    return StreamInfo(unix_time(info["created"]), state["messages"], state["first_seq"], state["last_seq"])


async def last(connection: Connection, stream: str, subject: str) -> Message | None:
    """The newest message on `subject`, None when there is none. In a NATS cluster a replica may answer that lags a little."""
    answer = await settled_ask(connection, f"{API}.DIRECT.GET.{stream}.{subject}", b"")
    if answer.status == _NOT_FOUND:
        return None
    if answer.status:
        raise Transient(f"reading {subject} from {stream}: status {answer.status} {answer.headers.get('Description', '')}".strip())
    return stored(answer)


async def replay(connection: Connection, stream: str, filter_subject: str) -> AsyncGenerator[Message, None]:
    """All messages that match, in stream order, until the stream's leader says that there are no more.

    Batched direct gets (ADR-31) are fast and need no consumer, but any replica may serve them, and one that lags would end too
    early. So the end is the leader's word: STREAM.MSG.GET finds nothing after the last message seen.
    """
    sequence, failures = 1, 0
    while True:
        seen = sequence
        try:
            async with connection.inbox() as inbox:
                async for message in _batch(connection, inbox, stream, filter_subject, sequence):
                    sequence = message.sequence + 1
                    yield message
            if sequence == seen:
                found = await _next(connection, stream, filter_subject, sequence)
                if found is None:
                    return
                sequence = found.sequence + 1
                yield found
            failures = 0
        except (Transient, OutcomeUnknown) as error:
            failures = failures + 1 if sequence == seen else 0
            if failures >= _READ_ATTEMPTS:
                raise Transient(str(error), 1.0) from error
            await asyncio.sleep(_SETTLE_S)


async def _batch(connection: Connection, inbox: Inbox, stream: str, filter_subject: str, sequence: int) -> AsyncGenerator[Message, None]:
    subject = f"{API}.DIRECT.GET.{stream}"
    inbox.asks = subject.lower()
    body = {"seq": sequence, "next_by_subj": filter_subject, "batch": _BATCH, "max_bytes": connection.max_payload_bytes * 8}
    await connection.send(subject, json.dumps(body).encode(), reply=f"{inbox.subject}.1")
    while True:
        try:
            answer = await inbox.get(_TIMEOUT_S)
        except TimeoutError as error:
            msg = f"reading {stream}: no answer within {_TIMEOUT_S:g} s"
            raise Transient(msg) from error
        if answer.status in (_END_OF_BATCH, _NOT_FOUND):
            return
        if answer.status == _NO_RESPONDERS:
            raise _no_stream(subject)
        if answer.status:
            raise Transient(f"reading {stream}: status {answer.status} {answer.headers.get('Description', '')}".strip())
        yield stored(answer)


async def _next(connection: Connection, stream: str, filter_subject: str, sequence: int) -> Message | None:
    """The first message from `sequence` on, as the leader knows it."""
    try:
        body = {"seq": sequence, "next_by_subj": filter_subject}
        found = (await call(connection, f"STREAM.MSG.GET.{stream}", body))["message"]
    except ApiError as error:
        if error.err_code == _MESSAGE_MISSING:
            return None
        msg = f"reading {stream}"
        raise error.mapped(msg) from error
    return raw(found)


def raw(found: Mapping[str, Any]) -> Message:
    """A message as STREAM.MSG.GET returns it: data and headers in base64."""
    head = base64.b64decode(found.get("hdrs", "")).decode(errors="replace")
    pairs = (line.partition(":") for line in head.split("\r\n")[1:] if ":" in line)
    headers = {key.strip(): value.strip() for key, _, value in pairs}
    return Message(found["subject"], base64.b64decode(found.get("data", "")), headers, found["seq"], unix_time(found["time"]))
