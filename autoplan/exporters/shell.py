"""Shell scripts, read and never run: their words, with the variables that the script itself sets.

    shell_words('TP=4\nARGS=(--tensor-model-parallel-size $TP)\ntorchrun pretrain.py "${ARGS[@]}"')

Assignments, defaults (`${X:-8}`), arithmetic, arrays, texts that hold flags, and tests of known values (`if`, `case`,
`[ ] &&`) are followed; other commands are taken to succeed. A value that only the caller, a command or the node knows
is kept as it is written, with its $.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from autoplan.errors import PinError

_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_VARIABLE = re.compile(r"\$(?:\{(?P<braced>\w+)(?::?-(?P<default>[^{}]*))?\}|(?P<plain>\w+))")
_ARITHMETIC = re.compile(r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_COMMAND = re.compile(r"\$\((?!\()[^()]*(?:\([^()]*\)[^()]*)*\)|`[^`\n]*`")
_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1[^\n]*\n.*?^\s*(?P=end)\s*$", re.DOTALL | re.MULTILINE)
_OPERATORS: dict[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
# What Slurm says to a script that asks for nodes
_SLURM = {
    "nodes": ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"),
    "gpus-per-node": ("SLURM_GPUS_PER_NODE", "SLURM_GPUS_ON_NODE"),
    "ntasks-per-node": ("SLURM_NTASKS_PER_NODE",),
}
BREAK = ";"  # between commands
_AND, _OR, _PART = "&&", "||", "("  # _PART: the begin, the end and the line ends of an array, within a command
_TESTS: dict[str, Callable[[str, str], bool]] = {
    "=": operator.eq,
    "==": operator.eq,
    "!=": operator.ne,
    "-eq": lambda a, b: int(a) == int(b),
    "-ne": lambda a, b: int(a) != int(b),
    "-gt": lambda a, b: int(a) > int(b),
    "-ge": lambda a, b: int(a) >= int(b),
    "-lt": lambda a, b: int(a) < int(b),
    "-le": lambda a, b: int(a) <= int(b),
}


@dataclass(frozen=True)
class Word:
    """A word of a script.

    Attributes:
        sure: False inside an `if` or `case` whose test depends on a value that the script does not set.
    """

    text: str
    sure: bool = True


def shell_words(text: str, where: str) -> list[Word]:
    """Return the words of a script in order, BREAK between commands; words of branches that are not taken are left out.

    Raises: PinError if the quotes of the script do not close.
    """
    return list(_Reader({**_slurm_variables(text)}).words(_cleaned(text), where))


def _slurm_variables(text: str) -> dict[str, str]:
    asked = re.findall(r"^#SBATCH\s+--([\w-]+)[= ](\d+)", text, re.MULTILINE)
    return {variable: number for name, number in asked for variable in _SLURM.get(name, ())}


def _cleaned(text: str) -> str:
    """Return a script without the bodies of here-documents and without blanks in sums and commands in $( )."""
    text = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.MULTILINE)  # a comment does not continue after a backslash
    text = _DOCUMENT.sub("\n", re.sub(r"\\\r?\n", " ", text))
    text = _COMMAND.sub("$()", text)
    return _ARITHMETIC.sub(lambda found: f"$(({''.join(found['sum'].split())}))", text)


@dataclass
class _Branch:
    """An `if` or `case` that is open.

    Attributes:
        taken: whether this branch is taken; None: not known.
        over: True if a branch before it was taken for certain.
        doubt: True if a branch before it may have been taken.
        value: of a `case`, what is compared; None if it is not known.
    """

    taken: bool | None
    over: bool = False
    doubt: bool = False
    value: str | None = None


@dataclass
class _Reader:
    """Follows a script word by word.

    Attributes:
        variables: what was assigned; a name with None has a value that is not known.
        open: the branches that are open, the innermost last.
        command: the words of this command so far.
        chained: the branch that `&&` or `||` opened; None where this command follows none.
        last: whether the command before succeeded.
    """

    variables: dict[str, str | None]
    open: list[_Branch] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    chained: _Branch | None = None
    last: bool | None = True

    def words(self, text: str, where: str) -> Iterator[Word]:
        """Yield the words of a script, and follow its assignments and tests."""
        try:
            tokens = _tokens(text)
        except ValueError as error:
            raise PinError(f"{where} is not a shell script: {error}") from None
        k = 0
        while k < len(tokens):
            token = tokens[k]
            if token in (BREAK, _AND, _OR):
                self._ends(token)
                if self._live is not False:
                    yield Word(BREAK)
            elif token == _PART:
                if self._live is not False:
                    yield Word(BREAK)
            elif token in ("if", "elif"):
                k = self._test(tokens, k)
            elif token == "case" and k + 2 < len(tokens) and tokens[k + 2] == "in":
                value = self._expanded(tokens[k + 1])
                self.open.append(_Branch(False, value=None if "$" in value else value))
                k += 2
            elif self._closes(tokens, k):
                pass
            else:
                self.command.append(token)
                if self._live is not False:
                    yield from self._word(token, where)
            k += 1

    def _ends(self, token: str) -> None:
        """Follow the end of a command: of a test, `&&` and `||` open a branch that ends with the next command."""
        before = self.chained.taken if self.chained is not None else True
        if self.chained in self.open:
            self.open.remove(self.chained)
        held = self._holds(self.command) if self.command[:1] in (["["], ["[["], ["test"]) else True
        succeeded = self.last if before is False else None if before is None else held
        self.command, self.chained, self.last = [], None, succeeded
        if token != BREAK:
            taken = succeeded if succeeded is None else succeeded is (token == _AND)
            self.chained = _Branch(taken)
            self.open.append(self.chained)

    @property
    def _live(self) -> bool | None:
        """True if the words here are run, False if not, None if that is not known."""
        if any(branch.taken is False for branch in self.open):
            return False
        return None if any(branch.taken is None for branch in self.open) else True

    def _test(self, tokens: list[str], at: int) -> int:
        """Open a branch by the test of an `if` or `elif` at a place; return the place of its `then`."""
        end = at
        while end < len(tokens) - 1 and tokens[end] != "then":
            end += 1
        known = self._holds([t for t in tokens[at + 1 : end] if t != BREAK])
        if tokens[at] == "if":
            self.open.append(_Branch(known, over=known is True, doubt=known is None))
        elif self.open:
            branch = self.open[-1]
            branch.taken = False if branch.over else None if branch.doubt else known
            branch.over, branch.doubt = branch.over or branch.taken is True, branch.doubt or known is None
        return end

    def _holds(self, test: list[str]) -> bool | None:
        """Return whether a test of the form `[ a = b ]` holds; None if that is not known."""
        words = [self._expanded(word) for word in test]
        if words[:1] == ["test"]:
            words = ["[", *words[1:], "]"]
        if len(words) == 5 and words[0] in ("[", "[[") and words[2] in _TESTS:
            left, how, right = words[1:4]
            if "$" in left + right:
                return None
            try:
                return _TESTS[how](left, right)
            except ValueError:
                return None
        if len(words) == 4 and words[0] in ("[", "[[") and words[1] in ("-z", "-n") and "$" not in words[2]:
            return (words[2] == "") is (words[1] == "-z")
        return None

    def _closes(self, tokens: list[str], at: int) -> bool:
        """Follow a word that ends or changes a branch; return False for any other."""
        token = tokens[at]
        if token in ("fi", "esac"):
            if self.open:
                self.open.pop()
            return True
        if token == "else" and self.open:
            branch = self.open[-1]
            branch.taken = False if branch.over else None if branch.doubt else True
            return True
        pattern = re.fullmatch(r"\(?['\"]?([\w.*|-]+)['\"]?\)", token)
        if pattern and self.open and tokens[at - 1] in ("in", BREAK) and _is_case(tokens, at):
            branch, names = self.open[-1], pattern[1].split("|")
            if branch.value is None:
                branch.taken = None
            else:
                branch.taken = not branch.over and (branch.value in names or "*" in names)
                branch.over = branch.over or branch.taken
            return True
        return token in ("then", "do", "done")

    def _word(self, token: str, where: str) -> Iterator[Word]:
        """Yield the words of a token: of an assignment its name and value, of a text with flags its words."""
        assigned, sure = _ASSIGNED.fullmatch(token), self._live is True
        if assigned is not None and not token.startswith("-"):
            name, value = assigned["name"], self._expanded(assigned["value"])
            before = self.variables.get(name) or "" if assigned["more"] else ""
            self.variables[name] = before + value if sure else None
            if not _has_flags(value):
                yield Word(f"{name}={value}", sure)
                return
            token = value
        text = self._expanded(token)
        if token and not text:  # a variable without quotes that is empty, or whose flags stand where it was set
            return
        if not _has_flags(text) or not re.search(r"\s", text):
            yield Word(text, sure)
            return
        yield Word(BREAK)
        yield from self.words(text, where)
        yield Word(BREAK)

    def _expanded(self, text: str) -> str:
        """Return a text with the values of the variables that are known; texts with flags stand where they are set."""

        def value(found: re.Match[str]) -> str:
            name, default = found["braced"] or found["plain"], found["default"]
            known = self.variables.get(name)
            if known is None and name not in self.variables and default is not None:
                return self._expanded(default.strip("\"'"))
            if known is None:
                return found[0].replace("{", "").replace("}", "") if default is None else f"${name}"
            return "" if _has_flags(known) else known

        out = _VARIABLE.sub(value, text)
        return _ARITHMETIC.sub(lambda found: _sum(found["sum"], found[0], self.variables), out)


def _is_case(tokens: list[str], at: int) -> bool:
    """Return True if the innermost open word before a place is `case`."""
    depth = 0
    for token in reversed(tokens[:at]):
        depth += token in ("esac", "fi")
        if token in ("case", "if"):
            if depth == 0:
                return token == "case"
            depth -= 1
    return False


def _has_flags(text: str) -> bool:
    return re.search(r"(^|\s)--\w", text) is not None


def _tokens(text: str) -> list[str]:
    """Return the words of a text; BREAK for the ends of lines outside of quotes, and for `;`."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";\n&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, "#"
    out: list[str] = []
    inside = False  # of an array
    for token in lexer:
        if set(token) <= set(";\n&|"):
            out.append(_PART if inside else token if token in (_AND, _OR) else BREAK)
            continue
        array = re.fullmatch(r"[A-Za-z_]\w*\+?=\((.*)", token, re.DOTALL)
        if array is not None:
            out.append(_PART)
            token, inside = array[1], True
        ends = token.endswith(")") and token.count(")") > token.count("(") and (inside or token == ")" or "--" in token)
        word = token.removesuffix(")") if ends else token
        out += [word] * bool(word) + [_PART if inside else BREAK] * ends
        inside = inside and not ends
    return out


def _sum(text: str, written: str, variables: dict[str, str | None]) -> str:
    """Return the value of a sum of integers and variables, or the text as it is written if one is not known."""
    names = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: variables.get(found[0]) or "?", text)
    try:
        return str(_evaluated(ast.parse(names.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return written


def _evaluated(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return _OPERATORS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
    raise ValueError("not a sum of integers")
