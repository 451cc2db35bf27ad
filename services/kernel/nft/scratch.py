"""A child process that loads nft text from its input in a namespace of its own and prints the table's listing as JSON.

Run by ``reference`` where only user namespaces are allowed. Exits with EX_NOPERM when those are not allowed either.
"""

from __future__ import annotations

import json
import os
import sys

from services.kernel.namespace import enter_new_network
from services.kernel.nft.engine import LibNftables
from services.kernel.nft.reference import load_and_list
from services.runtime.errors import MeshmarkError


def main() -> int:
    try:
        enter_new_network(with_user=True)
    except OSError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_NOPERM
    try:
        listed = load_and_list(LibNftables(), sys.stdin.read(), sys.argv[1])
    except MeshmarkError as error:
        sys.stderr.write(f"{error}\n")
        return os.EX_DATAERR
    sys.stdout.write(json.dumps(listed))
    return os.EX_OK


if __name__ == "__main__":
    sys.exit(main())
