"""From nothing to the first answer as each kind of user: environment, installation, first commands of the tutorial.

    python -m experiments.plans.first_answers [--here] [--only pretrain] [--json FILE]

A new virtual environment gets autoplan from this checkout as `pip install '.[report]'` does, torch included, from the
package index that pip is set to. Then the first block of commands of every page of docs/tutorials runs in a folder of
its own, each in a process of its own, as it stands; of a page without commands, its first Python. `--here` installs
nothing and takes the environment that this runs in. An answer that is not there, or an exit code but 0, is an error.
"""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from experiments.shared.measure import describe, environment, make_console, run_command, write_json

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs" / "tutorials"
_LIMIT_S = 600.0  # of one command
_INSTALL_LIMIT_S = 3600.0
_NOT_SOURCE = (".*", "build", "*.egg-info", "__pycache__", "demo_out")


@dataclass(frozen=True)
class Answer:
    """How long the first answer of one page took, in seconds of the clock and of processors, all commands together."""

    page: str
    question: str
    commands: int
    seconds: float
    processor_s: float
    last_line: str


class NoAnswer(Exception):
    """A command ended with an error, or without a word."""


def first_commands(page: Path) -> list[str]:
    """Return the shell commands of the first block of a page; of a page that has none, its first Python."""
    text = page.read_text()
    block = re.search(r"(?:^    autoplan .*\n)+", text, flags=re.MULTILINE)
    if block is not None:
        return [line[4:] for line in block[0].splitlines()]
    python = re.search(r"```python\n(.*?)```", text, flags=re.DOTALL)
    if python is None:
        raise NoAnswer(f"{page.name} has neither commands nor Python")
    return [f"python - <<'END'\n{python[1]}END"]


def answered(page: Path, programs: Path) -> Answer:
    """Run the first commands of a page with the programs of an environment; NoAnswer if they give none."""
    commands = first_commands(page)
    path = f"{programs}:/usr/bin:/bin"
    clean = {"PATH": path, "HOME": str(Path.home()), "COLUMNS": "80", "TERM": "dumb", "LANG": "C.UTF-8"}
    said, began, before = "", time.perf_counter(), _of_children()
    with tempfile.TemporaryDirectory() as folder:
        for command in commands:
            done = subprocess.run(
                ["bash", "-c", command], cwd=folder, env=clean, capture_output=True, text=True, timeout=_LIMIT_S
            )
            if done.returncode:
                raise NoAnswer(f"{page.name}: {command}\nexit code {done.returncode}\n{done.stderr[-2000:]}")
            files = "".join(p.read_text() for p in sorted(Path(folder).glob("*.json")))
            said = done.stdout or files
            if not said.strip():
                raise NoAnswer(f"{page.name}: {command}\nsaid nothing")
    title = page.read_text().splitlines()[0].removeprefix("# ")
    seconds, processor_s = time.perf_counter() - began, _of_children() - before
    return Answer(page.stem, title, len(commands), seconds, processor_s, said.strip().splitlines()[-1].strip())


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def installed(folder: Path) -> float:
    """Make a virtual environment with autoplan of this checkout; the seconds of it all. NoAnswer if that fails."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=_LIMIT_S)
    source = folder / "source"  # a copy, since a build leaves files behind
    shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*_NOT_SOURCE))
    done = subprocess.run(
        [str(folder / "bin" / "pip"), "install", "-q", "-c", str(ROOT / "constraints.txt"), f"{source}[report]"],
        capture_output=True,
        text=True,
        timeout=_INSTALL_LIMIT_S,
    )
    if done.returncode:
        raise NoAnswer(f"pip install failed:\n{done.stderr[-2000:]}")
    return time.perf_counter() - began


def main(
    here: Annotated[
        bool, typer.Option("--here", help="install nothing, use the environment that this runs in")
    ] = False,
    only: Annotated[str, typer.Option(help="pages whose name contains this")] = "",
    json: Annotated[Path | None, typer.Option(help="also write the results here")] = None,
) -> None:
    """Install autoplan, then ask the first question of every kind of user."""
    env, console = environment(), make_console()
    pages = [page for page in sorted(PAGES.glob("*.md")) if page.stem != "README" and only in page.stem]
    table = Table(title=f"first answers; {describe(env)}")
    for heading in ("page", "question", "commands", "seconds", "processor s"):
        table.add_column(heading, justify="left" if heading in ("page", "question") else "right")
    found = []
    with tempfile.TemporaryDirectory() as folder:
        install_s = 0.0
        programs = Path(sys.executable).parent
        if not here:
            with console.status("installing"):
                install_s = installed(Path(folder) / "environment")
            programs = Path(folder) / "environment" / "bin"
        for page in pages:
            with console.status(page.stem):
                found.append(answered(page, programs))
            a = found[-1]
            table.add_row(a.page, a.question, str(a.commands), f"{a.seconds:.1f}", f"{a.processor_s:.1f}")
    console.print(table)
    if not here:
        console.print(f"environment and installation: {install_s:.0f} s")
    write_json(json, "first_answers", {**env, "install_s": install_s}, [asdict(a) for a in found])


if __name__ == "__main__":
    run_command(main)
