"""The command ``meshmark``: one application, one place where errors become one line and an exit code.

A service is started once and stays: it has only its own command imported, since what the others need would be in its memory for ever.

Exit codes: 0 all is well, 1 an error, 2 a difference (``plan --diff``, ``drift``, ``status``), 3 nothing was seen (``trace``), and 128
more than a signal's number when it was interrupted or nobody read on.
"""

from __future__ import annotations

import functools
import importlib
import os
import signal
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError

from schemas.codec import DecodeError
from services.cli import daemons
from services.cli.output import EXIT_ERROR, console, errors, fail, system_words
from services.runtime import logs
from services.runtime.errors import MeshmarkError

_MODULES = (
    "lab.app",
    "objects",
    "plan",
    "status",
    "accept",
    "drift",
    "encrypt",
    "explain",
    "trace.command",
    "doctor.command",
    "rotate",
    "purge",
)
"""Modules of commands under this package, in the order of the help."""
_INTERRUPTED, _UNREAD = 128 + signal.SIGINT, 128 + signal.SIGPIPE


def application(words: Sequence[str] = ()) -> App:
    """The application; for the command line of a service, one that knows services only."""
    return _application(is_service=bool(words) and words[0] in daemons.SERVICES)


@functools.cache
def _application(*, is_service: bool) -> App:
    app = App(
        name="meshmark",
        help="Keep the kernels of many Linux hosts in the state that a multi-cluster, encrypted overlay network needs.",
        console=console,
        error_console=errors,
        result_action="return_value",
    )
    if not is_service:
        for name in _MODULES:
            importlib.import_module(f"services.cli.{name}").register(app)
    daemons.register(app)
    app.register_install_completion_command()
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    # What goes wrong is said in one line, and the standard output is the answer's: events are for services, which turn them on.
    logs.configure("cli", "critical", "console")
    code: object = EXIT_ERROR
    try:
        app = application(sys.argv[1:] if arguments is None else arguments)
        code = app(arguments, print_error=False, exit_on_error=False)
        sys.stdout.flush()
    except* BrokenPipeError:
        # Whoever read has enough, as head does. What is still in the buffer is for nobody.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = _UNREAD
    except* (MeshmarkError, DecodeError) as group:
        fail(str(_first(group)))
    except* OSError as group:
        # A file or folder of the user's: its name and the system's own words are what is wrong.
        fail(system_words(_first(group)))
    except* CycloptsError as group:
        # Not cyclopts' own exit code, which is 2: that says that there is a difference.
        error = _first(group)
        fail(f"{error} See: {' '.join(('meshmark', *_commands(error)))} --help")
    except* KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code if isinstance(code, int) else 0)


def _commands(error: BaseException) -> tuple[str, ...]:
    """The words of the command whose arguments are wrong; none where there is no such command."""
    return tuple(error.command_chain or ()) if isinstance(error, CycloptsError) else ()


def _first(group: BaseExceptionGroup[Exception]) -> BaseException:
    """The first error of a group: what went wrong beside it is mostly a consequence."""
    found: BaseException = group
    while isinstance(found, BaseExceptionGroup):
        found = found.exceptions[0]
    return found


if __name__ == "__main__":
    main()
