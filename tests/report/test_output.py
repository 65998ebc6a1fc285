"""What a command writes: lost standard output is an error, files are whole, rows of a sweep are there at once."""

import ast
import csv
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import PLAIN, ROOT, TASK
from typer.testing import CliRunner

from autoplan.cli import app
from autoplan.files import AppendedFile, write_whole
from autoplan.report.output import EXIT_BROKEN_PIPE, EXIT_LOST_OUTPUT
from autoplan.sweeps.whatif import columns

# -- standard output ---------------------------------------------------------------------------------------------------

SHORT, LONG = ("hw", "show", "h100-sxm5-80gb"), ("hw", "list", "--json")


def in_shell(words: Sequence[str], redirect: str) -> tuple[int, str, str]:
    """Exit code of the command, output of the line and its errors, `redirect` behind it in bash."""
    line = f"{sys.executable} -m autoplan {' '.join(words)} {redirect}; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], cwd=ROOT, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("words", [SHORT, LONG, ("--help",)], ids=["text", "json", "help"])
def test_a_full_disk_is_one_line_and_an_exit_code(words: tuple[str, ...]) -> None:
    code, _, errors = in_shell(words, "> /dev/full")
    assert code == EXIT_LOST_OUTPUT and "Traceback" not in errors
    (line,) = errors.splitlines()
    assert line == "error: standard output cannot be written: No space left on device; what was to be shown is lost"


@pytest.mark.parametrize("words", [SHORT, ("plan", *TASK)], ids=["catalog", "plan"])
def test_a_closed_output_is_refused(words: tuple[str, ...]) -> None:
    code, _, errors = in_shell(words, ">&-")
    assert code == EXIT_LOST_OUTPUT
    assert errors.splitlines() == [
        "error: standard output is closed: nothing could be shown; redirect it to a file or /dev/null"
    ]
    assert in_shell(words, "> /dev/null")[::2] == (0, "")  # negative: what that says works


def test_a_reader_that_goes_away_is_no_error_message() -> None:
    assert in_shell(LONG, "| true") == (EXIT_BROKEN_PIPE, "", "")
    assert in_shell(("--version",), "| true") == (EXIT_BROKEN_PIPE, "", "")
    assert in_shell(("plan", *TASK, "--pin", "tp=1"), "| true") == (EXIT_BROKEN_PIPE, "", "")
    code, out, errors = in_shell(LONG, "| cat")  # negative: one that reads all of it
    assert code == 0 and out.endswith("}\n") and not errors


@pytest.mark.parametrize("command", ["plan", "estimate", "whatif"])
def test_the_first_lines_of_an_answer(command: str) -> None:
    """`head` is gone before the rest is written, or takes it: either way there is no message."""
    more = {"plan": ("--pin", "tp=1"), "estimate": ("--dp", "4"), "whatif": ("--pin", "tp=1", "--vary", "nodes=1,2")}
    code, out, errors = in_shell((command, *TASK, *more[command]), "| head -3")
    assert out.startswith("autoplan ") and len(out.splitlines()) == 3 and not errors
    assert code in (0, EXIT_BROKEN_PIPE)


def test_an_error_that_cannot_be_shown_keeps_its_exit_code() -> None:
    assert in_shell(("hw", "show", "gone"), "2> /dev/full")[0] == 2
    assert in_shell(("hw", "show", "gone"), "2>&-")[0] == 2


# -- files -------------------------------------------------------------------------------------------------------------

_WRITERS = {"write_text", "write_bytes", "to_csv", "NamedTemporaryFile", "mkstemp", "dump"}


def writers(text: str) -> Iterator[str]:
    """Calls by which Python writes a file: `name:line`."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        modes = [a.value for a in (*node.args, *(k.value for k in node.keywords)) if isinstance(a, ast.Constant)]
        opened = name in ("open", "fdopen") and any(
            isinstance(m, str) and set(m) & set("wax") and len(m) < 4 for m in modes
        )
        if opened or (name in _WRITERS and isinstance(node.func, ast.Attribute)):
            yield f"{name}:{node.lineno}"


def test_every_file_is_written_by_the_one_helper() -> None:
    """Nothing in the product opens a file to write but `autoplan.files`."""
    found = {}
    for folder in ("autoplan", "cost_models", "runtime"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if list(writers(path.read_text())) and path != ROOT / "autoplan" / "files.py":
                found[str(path.relative_to(ROOT))] = list(writers(path.read_text()))
    assert not found
    assert list(writers((ROOT / "autoplan" / "files.py").read_text()))  # negative: it sees those that there are
    assert list(writers("with open(p, 'w') as f: json.dump(1, f)\nx.to_csv(p)")) == ["to_csv:2", "open:1", "dump:1"]


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.csv"
    file = AppendedFile(path, "a,b\n")
    file.append("1,2\n")
    real = file._file

    class Full:
        """Takes two bytes more."""

        def write(self, data: memoryview) -> int:
            if len(data) < 4:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real.write(data[:2]) or 0

        def fileno(self) -> int:
            return real.fileno()

    monkeypatch.setattr(file, "_file", Full())
    with pytest.raises(OSError, match="No space left"):
        file.append("3,4\n")
    assert path.read_text() == "a,b\n1,2\n"
    real.close()
    write_whole(path, b"whole")
    assert path.read_bytes() == b"whole" and list(tmp_path.iterdir()) == [path]


# -- rows of a sweep ---------------------------------------------------------------------------------------------------


def test_a_sweep_that_is_killed_leaves_the_rows_it_had(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("rows of another day\n")
    words = ["whatif", *TASK, "--vary", "global_batch_size=16..4096", "--vary", "seq_len=64..1024", "--csv", str(path)]
    process = subprocess.Popen([sys.executable, "-m", "autoplan", *words], cwd=ROOT, stdout=subprocess.DEVNULL)
    try:
        while process.poll() is None and path.read_bytes().count(b"\n") < 4:
            time.sleep(0.01)
        assert process.poll() is None, "it was done before it could be killed"
        os.kill(process.pid, signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    text = path.read_text()
    rows = list(csv.DictReader(text.splitlines()))
    assert text.endswith("\n") and 3 <= len(rows) < 45 and list(tmp_path.iterdir()) == [path]
    assert list(rows[0]) == columns(["global_batch_size", "seq_len"])
    assert [r["seq_len"] for r in rows[:3]] == ["64", "128", "256"] and all(r["status"] == "ok" for r in rows)


CAPACITY = """
models: gpt2
clusters: 1x4xh100-sxm5-80gb
tokens: [1B, 2B]
seq_len: [256, 512]
global_batch_size: 16
"""


def test_every_row_is_in_the_file_before_the_next_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of capacity tables, too; the file starts with the names of columns."""
    path, file, seen = tmp_path / "rows.csv", tmp_path / "task.yaml", list[int]()
    file.write_text(CAPACITY)

    def search(request: object) -> object:
        from autoplan.errors import InfeasibleError

        seen.append(len(path.read_text().splitlines()))
        raise InfeasibleError("nothing fits")

    monkeypatch.setattr("autoplan.sweeps.capacity.cells.__defaults__", (search,))
    result = CliRunner().invoke(app, ["capacity", str(file), "--csv", str(path)], env=PLAIN)
    assert result.exit_code == 3, result.output
    assert seen == [1, 3]  # names; names and two rows of tokens
    assert len(list(csv.DictReader(path.read_text().splitlines()))) == 4
