"""`weft`: the command line. Its commands are in this folder, one module per kind of question.

Exit codes: 0 success, 1 the run failed, 2 the input was refused, 130 interrupted.
"""

from __future__ import annotations

import logging
import os
import shlex
import sys
from collections.abc import Mapping

from cyclopts import App, CycloptsError, Group, Parameter, UnusedCliTokensError
from cyclopts.help import DefaultFormatter

from weft import __version__
from weft.cli.console import PipeConsole
from weft.cli.help import HELP_ALL, ShortHelp
from weft.errors import InputError, RunError
from weft.installed import failure_of_package
from weft.interrupts import INTERRUPTED, interruptible

INPUT_REFUSED = 2
RUN_FAILED = 1

# The functions of each module. A command imports no other's module: the heaviest need half a second.
COMMANDS: Mapping[str, tuple[str, ...]] = {
    "files": ("init", "schema", "check"),
    "machines": ("doctor", "measure"),
    "captures": ("capture",),
    "plans": ("plan",),
    "shown": ("show", "simulate"),
    "explain": ("explain",),
    "schedules": ("schedule",),
    "scores": ("score",),
    "corrections": ("corrections",),
    "runs": ("train", "eval_", "compare"),
    "run_list": ("runs",),
    "watching": ("watch",),
    "weights": ("export", "import_"),
    "labs": ("lab",),
}

app = App(
    name="weft",
    help="Plan, predict, run and watch the training of large models on the cluster you really have.",
    version=__version__,
    help_flags=("--help", "-h", HELP_ALL),
    help_formatter=ShortHelp(),
    exit_on_error=False,
    print_error=False,
    suppress_keyboard_interrupt=False,
    result_action="return_value",
    # Lists are left out, and never given as empty ones.
    default_parameter=Parameter(negative_iterable=()),
)
for module, functions in COMMANDS.items():
    for function in functions:
        app.command(f"weft.cli.{module}:{function}")
FLAGS = Group("Flags", sort_key=1)
app.register_install_completion_command(group=FLAGS)
for flag in ("--help", "--version"):
    app[flag].group = FLAGS


def main(arguments: list[str] | None = None) -> None:
    """Run one command and exit; each input error prints one line, never a traceback."""
    # As with `python -m`: the user's own tasks and models are imported from the working folder.
    sys.path.insert(0, os.getcwd())
    # torchao tells of kernels that it cannot load, and weft uses none of them.
    for name in ("torchao", "torch.utils._pytree"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # The hub's library tells of each retry, before the error that counts.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code; print errors to standard error."""
    if not arguments or arguments[0] in app.help_flags:
        # Only imported commands have a line in the list.
        app.resolved_commands()
    try:
        result = _answer(arguments)
    except UnusedCliTokensError as error:
        return _refuse(f"this command takes no {shlex.join(error.unused_tokens or ())}")
    except CycloptsError as error:
        if isinstance(error.__cause__, InputError):
            return _refuse(*(str(violation) for violation in error.__cause__.violations))
        return _refuse(" ".join(str(error).split()))
    except InputError as error:
        return _refuse(*(str(violation) for violation in error.violations))
    except RunError as error:
        print(f"weft: {error}", file=sys.stderr)
        return RUN_FAILED
    except KeyboardInterrupt:
        print("weft: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of the pipe (head, less) has enough.
        _drop_output()
        return 0
    except OSError as error:
        if error.filename is None:
            # Perhaps the output itself: its disk is full.
            _drop_output()
        print(f"weft: {error.filename or 'output'}: {error.strerror}", file=sys.stderr)
        return RUN_FAILED
    except Exception as error:
        if (line := failure_of_package(error)) is None:
            raise
        print(f"weft: {line}", file=sys.stderr)
        return RUN_FAILED
    return result if isinstance(result, int) else 0


def _answer(arguments: list[str]) -> object:
    formatter = DefaultFormatter() if HELP_ALL in arguments else None
    with app.app_stack([app], overrides={"help_formatter": formatter}):
        # This imports the command.
        command, bound, _ = app.parse_args(arguments, console=PipeConsole())
        with interruptible():
            result = command(*bound.args, **bound.kwargs)
            sys.stdout.flush()
    return result


def _drop_output() -> None:
    """Let the rest of the output go nowhere, also at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refuse(*lines: str) -> int:
    for line in lines:
        print(f"weft: {line}", file=sys.stderr)
    return INPUT_REFUSED


if __name__ == "__main__":
    main()
