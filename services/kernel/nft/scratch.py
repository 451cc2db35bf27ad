"""A child process that loads the chains it is given in a namespace of its own, and prints them as the kernel holds them (msgpack).

Run by ``reference`` where only user namespaces are allowed. Exits with EX_NOPERM when those are not allowed either.
"""

from __future__ import annotations

import os
import sys

import msgspec

from schemas import codec
from services.kernel.namespace import enter_new_network
from services.kernel.nft.loading import LOADING
from services.kernel.nft.reference import loaded
from services.kernel.nft.skeleton import Skeleton
from services.runtime.errors import MeshmarkError


def main() -> int:
    try:
        enter_new_network(with_user=True)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_NOPERM
    skeleton = codec.decode(sys.stdin.buffer.read(), Skeleton)
    try:
        found = loaded(LOADING[sys.argv[1]], skeleton, dormant=False)  # type: ignore[index]
    except MeshmarkError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_DATAERR
    sys.stdout.buffer.write(msgspec.msgpack.encode([msgspec.structs.astuple(item) for item in found], enc_hook=str))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
