"""The command ``meshmark``: one application, one place where errors become one line and an exit code.

Exit codes: 0 all is well, 1 an error, 2 a difference (``plan --diff``, ``drift``, ``status``).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from schemas.codec import DecodeError
from services.cli import accept, daemons, drift, encrypt, explain, objects, plan, purge, rotate, status
from services.cli.doctor import command as doctor
from services.cli.lab.app import lab
from services.cli.output import EXIT_ERROR, console, errors, fail, system_words
from services.cli.trace import command as trace
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
for module in (objects, plan, status, accept, drift, encrypt, explain, trace, doctor, rotate, purge, daemons):
    module.register(app)
app.register_install_completion_command()


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    # What goes wrong is said in one line, and the standard output is the answer's: events are for services, which turn them on.
    logs.configure("cli", "critical", "console")
    code: object = EXIT_ERROR
    try:
        code = app(arguments, print_error=False, exit_on_error=False)
    except* (MeshmarkError, DecodeError) as group:
        fail(str(_first(group)))
    except* OSError as group:
        # A file or folder of the user's: its name and the system's own words are what is wrong.
        fail(system_words(_first(group)))
    except* CycloptsError as group:
        # Not cyclopts' own exit code, which is 2: that says that there is a difference.
        fail(f"{_first(group)} See: meshmark --help, meshmark COMMAND --help")
    except* KeyboardInterrupt:
        code = 130
    sys.exit(code if isinstance(code, int) else 0)


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The first error of a group: what went wrong beside it is mostly a consequence."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


if __name__ == "__main__":
    main()
