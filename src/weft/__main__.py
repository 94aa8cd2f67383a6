"""The program `weft`, also as `python -m weft`."""

from weft.interrupts import end_on_interrupt


def start() -> None:
    """Run the command line; Ctrl-C ends it in one line from here on, also while modules are imported."""
    end_on_interrupt()
    from weft.cli.main import main

    main()


if __name__ == "__main__":
    start()
