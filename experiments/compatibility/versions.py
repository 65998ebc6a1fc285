"""Does autoplan compute the same on another version of torch, Python or transformers?

    python -m experiments.compatibility.versions --torch 2.15.0 --python python3.13
        [--transformers 5.23.0] [--tests core]
    make versions TORCH=2.15.0 PYTHON=python3.13

Makes a virtual environment of that Python with that torch and otherwise the versions of constraints.txt, installs this
checkout in it, and runs the tests that compare sharded programs with one process: over real processes, pipelines of all
schedules, ZeRO 0 to 3 and hybrid, context parallelism, experts, mixed precision, recompute, offload, compiled blocks.
Prints the row of docs/versions.md, adds it with `--write`, and ends with an error if a test failed. PyPI's builds of
torch are 5 GB and run on a CPU as well; the tests take about half an hour on two cores (`core`: a tenth of that).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = "convert parity_processes shards".split()
MORE = (
    "api batch capture compiled compression context documents encoder_decoder experts failure faithful hybrid_zero "
    "local_shards losses modules offload parity_local parity_matrix pipeline precision recompute router_loss rules "
    "runtime_ops runtime_program saved side_by_side split_backward state zero"
).split()
TESTS: Mapping[str, Sequence[str]] = {"core": CORE, "parity": [*CORE, *MORE]}
PATIENCE = 5  # a test that waits for processes may take so many times longer than usual
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "hypothesis", "setuptools")
HEAD = "| Python | torch | transformers | spmd_types | tests | passed | failed | skipped | minutes |"


@dataclass(frozen=True)
class Row:
    """What one environment gave. `tests`: a name of TESTS."""

    python: str
    torch: str
    transformers: str
    spmd_types: str
    tests: str
    passed: int
    failed: int
    skipped: int
    minutes: int

    def __str__(self) -> str:
        return "| " + " | ".join(str(value) for value in asdict(self).values()) + " |"

    @property
    def key(self) -> tuple[str, ...]:
        return self.python, self.torch, self.transformers, self.spmd_types, self.tests


def make_environment(folder: Path, python: str, wanted: Mapping[str, str]) -> Path:
    """Return the interpreter of a virtual environment with `wanted` (package -> version) and this checkout."""
    found = folder / "bin" / "python"
    if not found.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
    kept = [
        line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.partition("==")[0] not in wanted
    ]
    with tempfile.TemporaryDirectory() as temporary:
        constraints = Path(temporary) / "constraints.txt"
        constraints.write_text("\n".join([*kept, *(f"{name}=={version}" for name, version in wanted.items())]) + "\n")
        pip = [found, "-m", "pip", "install", "--quiet", "-c", constraints]
        subprocess.run([*pip, "torch"], check=True)
        # without its own ranges: what is tried here may lie outside
        ranges = (ROOT / "pyproject.toml").read_text().partition("dependencies = [")[2].partition("]")[0]
        names = [re.split(r"[<>=]", name)[0] for name in re.findall(r'"([^"]+)"', ranges)]
        subprocess.run([*pip, *names, "transformers", *TOOLS], check=True)
        subprocess.run([*pip, "--no-deps", "--no-build-isolation", "-e", ROOT], check=True)
    return found


def versions_of(python: Path) -> dict[str, str]:
    code = (
        "import importlib.metadata as m, json, platform\n"
        "found = {name: m.version(name) for name in ('torch', 'transformers', 'spmd_types')}\n"
        "print(json.dumps({'python': platform.python_version(), **found}))"
    )
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    found: dict[str, str] = json.loads(done.stdout)
    return found


def run_tests(python: Path, names: Sequence[str], workers: int) -> dict[str, int]:
    """Counts of outcomes; an interrupted run counts as failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        files = [str(path) for name in names for path in ROOT.glob(f"tests/*/test_{name}.py")]
        parallel = ["-n", str(workers), "--dist", "loadfile"] if workers > 1 else ["-n", "0"]
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *parallel, f"--junitxml={report}"]
        command += [f"--timeout={PATIENCE * 300}", *files]
        patient = {**os.environ, "AUTOPLAN_TEST_PATIENCE": str(PATIENCE)}
        code = subprocess.run(command, cwd=ROOT, env=patient).returncode
        if not report.exists():
            raise SystemExit(f"pytest ended with {code} and left no report")
        suites = list(ElementTree.parse(report).getroot().iter("testsuite"))
    total, failed, errors, skipped = (
        sum(int(suite.get(name, "0")) for suite in suites) for name in ("tests", "failures", "errors", "skipped")
    )
    bad = failed + errors
    return {"passed": total - bad - skipped, "failed": bad or int(code != 0), "skipped": skipped}


def with_row(text: str, row: Row) -> str:
    """Return the document with `row` in its table, in place of an earlier one of the same versions."""
    lines = text.splitlines()
    first = lines.index(HEAD) + 2
    last = next((i for i in range(first, len(lines)) if not lines[i].startswith("|")), len(lines))
    kept = [line for line in lines[first:last] if tuple(c.strip() for c in line.split("|")[1:6]) != row.key]
    return "\n".join([*lines[:first], *sorted([*kept, str(row)]), *lines[last:]]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", required=True, help="its version")
    parser.add_argument("--python", default=sys.executable, help="an interpreter, default this one")
    parser.add_argument("--transformers", help="its version, default that of constraints.txt")
    parser.add_argument("--venv", type=Path, help="where the environment is made or found, default a temporary folder")
    parser.add_argument("--tests", choices=list(TESTS), default="parity")
    parser.add_argument("--workers", type=int, default=2, help="test files that run at a time")
    parser.add_argument("--write", type=Path, help="a document whose table gets the row (docs/versions.md)")
    parser.add_argument("--json", type=Path, help="file for the row")
    args = parser.parse_args()

    wanted = {"torch": args.torch} | ({"transformers": args.transformers} if args.transformers else {})
    with tempfile.TemporaryDirectory() as temporary:
        python = make_environment(args.venv or Path(temporary) / "venv", args.python, wanted)
        start = time.monotonic()
        counts = run_tests(python, TESTS[args.tests], args.workers)
        minutes = round((time.monotonic() - start) / 60)
        row = Row(**versions_of(python), tests=args.tests, **counts, minutes=minutes)
    print(f"{HEAD}\n{row}")
    if args.write:
        args.write.write_text(with_row(args.write.read_text(), row))
    if args.json:
        args.json.write_text(json.dumps(asdict(row), indent=2) + "\n")
    sys.exit(row.failed > 0)


if __name__ == "__main__":
    main()
