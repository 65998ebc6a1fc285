"""`autoplan` and `python -m autoplan`: the command line, where Ctrl-C is one line and an exit code from the start."""

from autoplan.report.output import EXIT_INTERRUPTED, TOO_EARLY, say_error


def run_command_line() -> None:
    """Run the `autoplan` command.

    Raises: SystemExit with its exit code.
    """
    try:
        from autoplan.cli import main

        main()
    except KeyboardInterrupt:
        say_error(TOO_EARLY)
        raise SystemExit(EXIT_INTERRUPTED) from None


if __name__ == "__main__":
    run_command_line()
