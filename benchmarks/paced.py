"""Sends UDP datagrams at a rate, as a process of its own: ``python -m benchmarks.paced ADDRESS PORT PER_SECOND SECONDS``.

Each datagram holds its number (8 bytes), counted from 0. What is late is sent at once, so that the rate is kept on average as far as the
machine can. Prints how many were sent, and in how many seconds.
"""

from __future__ import annotations

import socket
import sys
import time

NUMBER_BYTES = 8
_PAUSE_S = 0.0005


def send(opened: socket.socket, per_second: float, seconds: float) -> tuple[int, float]:
    """How many were sent in how many seconds. The socket is connected; what it refuses because nobody is there counts as sent."""
    began_s = time.monotonic()
    sent = 0
    while (passed_s := time.monotonic() - began_s) < seconds:
        due = int(passed_s * per_second) + 1
        for number in range(sent, due):
            try:
                opened.send(number.to_bytes(NUMBER_BYTES, "big"))
            except ConnectionRefusedError:
                continue
        sent = max(sent, due)
        time.sleep(min(_PAUSE_S, 1 / per_second))
    return sent, time.monotonic() - began_s


def main() -> None:
    address, port, per_second, seconds = sys.argv[1:]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as opened:
        opened.connect((address, int(port)))
        sent, took_s = send(opened, float(per_second), float(seconds))
    print(f"{sent} {took_s}")


if __name__ == "__main__":
    main()
