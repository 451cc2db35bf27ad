"""The command ``meshmark``: one application, one place where errors become one line and an exit code.

Exit codes: 0 all is well, 1 an error, 2 a difference (``plan --diff``, ``drift``, ``status``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App

from schemas.codec import DecodeError
from services.cli import daemons, objects, plan, watch
from services.cli.lab.app import lab
from services.cli.output import EXIT_ERROR, console, errors, fail
from services.runtime import logs
from services.runtime.errors import MeshmarkError

app = App(
    name="meshmark",
    help="Keep the kernels of many Linux hosts in the state that a multi-cluster, encrypted overlay network needs.",
    console=console,
    error_console=errors,
    result_action="return_value",
)
app.command(lab)
for module in (objects, plan, watch, daemons):
    module.register(app)
app.register_install_completion_command()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    # What goes wrong is said in one line, and the standard output is the answer's: events are for services, which turn them on.
    logs.configure("cli", "critical", "console")
    try:
        code = app(arguments)
    except (MeshmarkError, DecodeError) as error:
        fail(str(error))
        sys.exit(EXIT_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else 0)


if __name__ == "__main__":
    main()
