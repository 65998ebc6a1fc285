"""The commands of README, CONTRIBUTING and docs, as their Markdown has them, and what they print.

    python tests/house/page_commands.py            # which pages show another output than the commands print
    python tests/house/page_commands.py --write    # put what they print into the pages

A command is a line of code that begins with one of `PROGRAMS`. Those of a page run one after the other, in one folder
and in this process. A command with its output below it (a fence `text` that follows at once) runs as it stands, every
other one for a small model and cluster (`smaller`). A part behind `|` is run by bash. Python in a fence runs as well
where output follows it. What a page cannot run stands in a fence that begins with "```sh not run: REASON", with one of
`REASONS`; the names and flags of such a command are still read.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml
from typer.testing import CliRunner

from autoplan import catalog
from autoplan.cli import app
from autoplan.search import clock

ROOT = Path(__file__).resolve().parents[2]
PAGES = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))
PROGRAMS = ("autoplan", "python", "pip", "make", "torchrun", ".venv/bin/torchrun")
REASONS = {
    "installs": "changes the environment that it runs in",
    "minutes": "takes minutes of a core",
    "processes": "starts processes; tests/house, tests/quick or tests/profiler run it for a small case",
    "a cluster": "needs machines that are not here",
    "tests": "runs the tests themselves",
}
WIDTH = 80


@dataclass(frozen=True)
class Command:
    """A command of a page, or Python that shows its output."""

    line: str  # as typed, or the text of Python
    reason: str  # why it is not run; "" if it is
    shown: str | None  # the output below it
    place: tuple[int, int]  # the lines of the output in the page, as a slice
    python: bool = False


def commands(page: Path) -> tuple[Command, ...]:
    """The commands of a page in their order."""
    lines = page.read_text().splitlines()
    found: list[Command] = []
    inside, first = None, 0  # the words after ``` where a fence is open, and its first line
    for at, line in enumerate(lines):
        if line.startswith("```"):
            if inside is None:
                inside, first = line[3:].strip(), at + 1
                continue
            if inside == "python":
                found += _with_output("\n".join(lines[first:at]), lines, at + 1, python=True)
            inside = None
        elif inside is None and line.startswith("    ") and _is_command(line[4:]):
            found += _with_output(line[4:], lines, at + 1)
        elif inside is not None and inside.startswith("sh") and _is_command(line):
            found.append(Command(line.split("  #")[0].strip(), _reason(inside, page), None, (0, 0)))
    return tuple(found)


def _is_command(line: str) -> bool:
    return line.split(" ", 1)[0] in PROGRAMS and " " in line


def _reason(info: str, page: Path) -> str:
    """The reason that the first line of a fence gives."""
    name = info.removeprefix("sh not run: ")
    if name not in REASONS:
        raise ValueError(f"{page.name}: a fence of commands begins with {info!r}; reasons are {', '.join(REASONS)}")
    return name


def _with_output(line: str, lines: list[str], at: int, python: bool = False) -> list[Command]:
    """A command with the output that follows it from line `at`; Python without output is no command."""
    after = at
    while after < len(lines) and not lines[after].strip():
        after += 1
    if after < len(lines) and lines[after] == "```text":
        end = lines.index("```", after + 1)
        return [Command(line, "", "\n".join(lines[after + 1 : end]), (after + 1, end), python)]
    return [] if python else [Command(line.split("  #")[0].strip(), "", None, (0, 0))]


def smaller(line: str) -> str:
    """The same options for a model and a cluster that take a second to search."""
    line, *rest = re.split(r"(?= [>|] )", line, maxsplit=1)
    line = re.sub("|".join(rf"(?<= ){re.escape(name)}(?= )" for name in catalog.names()), "gpt2", line)
    line = re.sub(r"--cluster [^@\s]+", f"--cluster {4 if '--pp' in line else 2}xh100", line)
    line = re.sub(r"--(seq-len|global-batch-size) \S+", lambda m: f"--{m[1]} {SIZES[m[1]]}", line)
    line = re.sub(r"--tokens \S+", "--tokens 100B", line)
    for large, small in SMALLER:
        line = re.sub(large, small, line)
    searched = re.match(r"autoplan (fit|plan|whatif|size) (?!\S+\.json)", line)
    task = "" if "--global-batch-size" in line or not searched else " --seq-len 1k --global-batch-size 16"
    return "".join((line, task, *rest))


SIZES = {"seq-len": "1k", "global-batch-size": "16"}
SMALLER = (
    (r"--tp 8 --pp 8", "--tp 2 --pp 2"),
    (r"--dp 64 --ep 8", "--dp 2"),
    (r"nodes=[\d,]+", "nodes=1,2"),
    (r"tp=[48]", "tp=2"),
    (r"--tp 4", "--tp 2"),
    (r"--devices \S+", "--devices h100"),
    (r"nic=100\.\.400", "nic=100..200"),
    (r"^autoplan fit", "autoplan fit --seconds 2"),
    (r"^autoplan explain", "autoplan explain --seconds 2"),
)


class PageError(Exception):
    """A command of a page that does not run."""


def outputs(page: Path, folder: Path) -> Iterator[tuple[Command, str]]:
    """Run a page's commands in an empty folder; each with what it printed.

    Raises:
        PageError: a command ends with an error, prints nothing, or leaves a file unwritten.
    """
    names: dict[str, object] = {}
    (folder / "experiments").mkdir()
    of_file = yaml.safe_load((ROOT / "experiments" / "capacity.yaml").read_text())
    small = {"models": ["gpt2"], "clusters": ["4xh100", "2xh100"], "seq_len": "1k", "global_batch_size": 16}
    (folder / "experiments" / "capacity.yaml").write_text(yaml.safe_dump({**of_file, **small}))
    with contextlib.chdir(folder):
        for command in commands(page):
            if command.reason:
                continue
            if command.python:
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec(compile(command.line, page.name, "exec"), names)
                yield command, printed.getvalue().strip("\n")
            else:
                # A search whose answer is shown ends with its proof, on a machine ten times slower as well.
                yield command, _run(smaller(command.line)) if command.shown is None else _run(command.line, 0.1)


@contextlib.contextmanager
def _own_time(share: float) -> Iterator[None]:
    """Let searches count a share of this process's time, so that the machine does not change what a search finds."""
    before, clock.now_s = clock.now_s, lambda: share * time.process_time()
    try:
        yield
    finally:
        clock.now_s = before


def _run(line: str, share_of_time: float = 1.0) -> str:
    """Run one `autoplan` command; what it printed, through the pipe behind it."""
    typed, _, pipe = line.partition(" | ")
    typed, _, file = typed.partition(" > ")
    environment = {"NO_COLOR": "1", "COLUMNS": str(WIDTH), "TERM": "dumb"}
    with _own_time(share_of_time):
        result = CliRunner().invoke(app, shlex.split(typed)[1:], prog_name="autoplan", env=environment)
    said = result.stdout
    if result.exit_code not in ((0, 3) if " fit " in typed else (0,)) or not (said or "--out" in typed):
        raise PageError(f"{line}\n{result.output[-2000:]}") from result.exception
    for written in re.findall(r"--(?:out|report|csv|timeline) (\S+)", typed):
        path = Path(written)
        if not path.exists() or (path.is_file() and not path.stat().st_size):
            raise PageError(f"{line}\n{written} is not there, or empty")
    if file:
        Path(file).write_text(said)
    if pipe:
        said = subprocess.run(["bash", "-c", pipe], input=said, capture_output=True, text=True, check=True).stdout
        if not said.strip():
            raise PageError(f"{line}\nnothing is left behind the pipe")
    return said.strip("\n")


def bare(printed: str) -> str:
    """What was printed without blanks at the ends of lines, as it stands in a page."""
    return "\n".join(line.rstrip() for line in printed.splitlines())


def write(page: Path, found: list[tuple[Command, str]]) -> None:
    """Put what was printed into the page."""
    lines = page.read_text().splitlines()
    for command, printed in reversed(found):
        if command.shown is not None:
            lines[slice(*command.place)] = bare(printed).splitlines()
    page.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the pages that show output; say which differ, or write them."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("pages", nargs="*", type=Path, help="all that show output, if none is named")
    arguments = parser.parse_args()
    os.environ["AUTOPLAN_PROFILE"] = "assumed"
    for page in [path.resolve() for path in arguments.pages] or PAGES:
        if not any(command.shown is not None for command in commands(page)):
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = list(outputs(page, Path(folder)))
        for command, printed in found:
            if command.shown is not None and command.shown != bare(printed):
                print(f"{page.relative_to(ROOT)}: {command.line}")
        if arguments.write:
            write(page, found)


if __name__ == "__main__":
    main()
