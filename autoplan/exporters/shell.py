"""Shell scripts, read and never run: their commands, with the variables that the script itself sets.

    shell_commands('TP=4\nARGS=(--tensor-model-parallel-size $TP)\ntorchrun pretrain.py "${ARGS[@]}"', "a.sh").commands

Assignments, defaults (`${X:-8}`), arithmetic, arrays, texts that hold arguments, functions of the script, and tests of
known values (`if`, `case`, `[ ] &&`) are followed; other commands are taken to succeed. A value that only the caller, a
command, the node, or the turns of a loop decide is kept as it is written, with its $.
"""

from __future__ import annotations

import ast
import operator
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

from autoplan.errors import PinError

_ASSIGNED = re.compile(r"(?P<name>[A-Za-z_]\w*)(?P<more>\+?)=(?P<value>.*)", re.DOTALL)
_DEFAULT = r"(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*"  # with variables in braces, and their defaults
_VARIABLE = re.compile(rf"\$(?:\{{(?P<braced>\w+)(?::?-(?P<default>{_DEFAULT}))?\}}|(?P<plain>\w+))")
_LIST = re.compile(r"\$(?:\{(?P<name>\w+)(?:\[[@*]\])?(?::?-[^{}]*)?\}|(?P<plain>\w+|@|\*))")
_ARITHMETIC = re.compile(r"\$\(\((?P<sum>[^()]*(?:\([^()]*\)[^()]*)*)\)\)")
_COMMAND = re.compile(r"\$\((?!\()[^()]*(?:\([^()]*\)[^()]*)*\)|`[^`\n]*`")
_DOCUMENT = re.compile(r"<<-?\s*(['\"]?)(?P<end>\w+)\1[^\n]*\n.*?^\s*(?P=end)\s*$", re.DOTALL | re.MULTILINE)
_REDIRECTED = re.compile(r"\d*(?:>>?|<)(?P<to>.*)")
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
_BREAK, _AND, _OR, _CASE = ";", "&&", "||", ";;"  # between commands
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
_HASH = "\x01"  # stands for # while words are found
_SETS = ("export", "declare", "local", "readonly", "typeset")
_SHELLS = ("bash", "sh", "eval")
_DEPTH = 8  # of functions and of commands in texts


@dataclass(frozen=True)
class Word:
    """A word of a command.

    Attributes:
        under: the branches, by number, that put it there, and whose test depends on a value that nobody sets here.
    """

    text: str
    under: frozenset[int] = frozenset()

    @property
    def sure(self) -> bool:
        """True if the word is there for certain, where its command runs."""
        return not self.under


@dataclass(frozen=True)
class Script:
    """What a script does, in order.

    Attributes:
        commands: their words, with the values of variables.
        variables: what it sets in capitals, name -> value; also what Slurm sets for its `#SBATCH` lines.
        arguments: the flags that it gives to variables.
    """

    commands: tuple[tuple[Word, ...], ...]
    variables: dict[str, str]
    arguments: tuple[Word, ...]


def shell_commands(text: str, where: str) -> Script:
    """Return the commands of a script; those of branches that are not taken, and of functions not called, are left out.

    Raises: PinError if the quotes of the script do not close.
    """
    reader = _Reader({**_slurm_variables(text)}, where)
    slurm = {name: value for name, value in reader.variables.items() if value is not None}
    reader.read(_cleaned(text))
    return Script(tuple(reader.commands), reader.exported | slurm, tuple(reader.arguments))


def _slurm_variables(text: str) -> dict[str, str | None]:
    asked = re.findall(r"^#SBATCH\s+--([\w-]+)[= ](\d+)", text, re.MULTILINE)
    asked += [("nodes", number) for number in re.findall(r"^#SBATCH\s+-N\s*(\d+)", text, re.MULTILINE)]
    return {variable: number for name, number in asked for variable in _SLURM.get(name, ())}


def _cleaned(text: str) -> str:
    """Return a script without the bodies of here-documents and without blanks in sums and commands in $( )."""
    text = re.sub(r"^[ \t]*#[^\n]*", "", text, flags=re.MULTILINE)  # a comment does not continue after a backslash
    text = _DOCUMENT.sub("\n", re.sub(r"\\\r?\n", " ", text))
    text = re.sub(r"\d*[<>]&[\d-]|&(?=>)", " ", text)  # streams into one another
    text = re.sub(r"(?<=[^\s;&|])#", _HASH, text)  # within a word it begins no comment
    text = _COMMAND.sub("$()", text)
    return _ARITHMETIC.sub(lambda found: f"$(({''.join(found['sum'].split())}))", text)


@dataclass
class _Branch:
    """An `if`, `case` or loop that is open.

    Attributes:
        kind: its first word.
        taken: whether this branch is taken; None: not known.
        over: True if a branch before it was taken for certain.
        doubt: True if a branch before it may have been taken.
        value: of a `case`, what is compared; None if it is not known.
        changed: of a loop, the variables that its body sets, which after it are not known.
        number: of this branch; another after `else`.
    """

    kind: str
    taken: bool | None = True
    over: bool = False
    doubt: bool = False
    value: str | None = None
    changed: tuple[str, ...] = ()
    number: int = field(default_factory=count().__next__)


@dataclass(frozen=True)
class _Array:
    """The words of an array that is assigned."""

    name: str
    more: bool
    words: tuple[str, ...]


_Token = str | _Array


@dataclass
class _Reader:
    """Follows a script command by command.

    Attributes:
        variables: what was assigned; a name with None has a value that is not known.
        under: variable -> the branches in which it has this value, for those that nobody knows to be taken.
        lists: variables that hold arguments: arrays, and texts with flags.
        open: the branches that are open, the innermost last.
        chained: the branch that `&&` or `||` opened; None where this command follows none.
        last: whether the command before succeeded.
    """

    variables: dict[str, str | None]
    where: str
    under: dict[str, frozenset[int]] = field(default_factory=dict)
    lists: dict[str, list[Word]] = field(default_factory=dict)
    functions: dict[str, list[_Token]] = field(default_factory=dict)
    open: list[_Branch] = field(default_factory=list)
    chained: _Branch | None = None
    last: bool | None = True
    depth: int = 0
    commands: list[tuple[Word, ...]] = field(default_factory=list)
    exported: dict[str, str] = field(default_factory=dict)
    arguments: list[Word] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Follow a text of commands."""
        try:
            tokens = list(_tokens(text))
        except ValueError as error:
            raise PinError(f"{self.where} is not a shell script: {error}") from None
        self._follow(tokens)

    def _follow(self, tokens: Sequence[_Token]) -> None:
        command: list[_Token] = []
        k = 0
        while k <= len(tokens):
            token = tokens[k] if k < len(tokens) else _BREAK
            k += 1
            if token in (_BREAK, _AND, _OR, _CASE):
                if command:
                    self._ends(command, str(token))
                command = []
                if token == _CASE:
                    k = self._pattern(tokens, k)
            elif command or isinstance(token, _Array):
                command.append(token)
            else:
                at = self._keyword(tokens, k - 1)
                if at is None:
                    command.append(token)
                else:
                    k = at

    def _ends(self, command: list[_Token], token: str) -> None:
        """Follow a command, and its end: `&&` and `||` open a branch that ends with the next command."""
        if command and self._live is not False:
            self._run(command)
        before = self.chained.taken if self.chained is not None else True
        if self.chained in self.open:
            self.open.remove(self.chained)
        held = self._holds([str(t) for t in command]) if command[:1] in (["["], ["[["], ["test"]) else True
        succeeded = self.last if before is False else None if before is None else held
        self.chained, self.last = None, succeeded
        if token in (_AND, _OR):
            taken = succeeded if succeeded is None else succeeded is (token == _AND)
            self.chained = _Branch(token, taken)
            self.open.append(self.chained)

    @property
    def _live(self) -> bool | None:
        """True if the words here are run, False if not, None if that is not known."""
        if any(branch.taken is False for branch in self.open):
            return False
        return None if any(branch.taken is None for branch in self.open) else True

    @property
    def _doubts(self) -> frozenset[int]:
        """The open branches of which it is not known whether they are taken."""
        return frozenset(branch.number for branch in self.open if branch.taken is None)

    def _known(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not known here."""
        return self.variables.get(name) if self.under.get(name, frozenset()) <= self._doubts else None

    # -- words that open and close -------------------------------------------------------------------------------------

    def _keyword(self, tokens: Sequence[_Token], at: int) -> int | None:
        """Follow a word that begins or ends a branch, a loop or a function; return the place after it, None if none."""
        token = str(tokens[at])
        if token in ("if", "elif"):
            return self._test(tokens, at)
        if token == "case" and at + 2 < len(tokens) and tokens[at + 2] == "in":
            value = self._expanded(str(tokens[at + 1]))
            self.open.append(_Branch("case", False, value=None if "$" in value else value))
            return self._pattern(tokens, at + 3)
        if token in ("for", "while", "until", "select"):
            return self._loop(tokens, at)
        if token in ("fi", "esac", "done"):
            self._close()
            return at + 1
        if token == "else" and self.open:
            branch = self.open[-1]
            branch.taken = False if branch.over else None if branch.doubt else True
            branch.number = _Branch("").number
            return at + 1
        if token == "{":
            group = self.chained if self.chained in self.open else None
            self.chained = None  # the branch of `&&` lasts until the end of the group
            if group is None:
                self.open.append(_Branch("{"))
        elif token == "}":
            self._close()
        if token in ("then", "do", "{", "}", "!", "time"):
            return at + 1
        return self._function(tokens, at)

    def _test(self, tokens: Sequence[_Token], at: int) -> int:
        """Open a branch by the test of an `if` or `elif` at a place; return the place after its `then`."""
        end = _place(tokens, at, "then")
        known = self._holds([str(t) for t in tokens[at + 1 : end] if t != _BREAK])
        if tokens[at] == "if":
            self.open.append(_Branch("if", known, over=known is True, doubt=known is None))
        elif self.open:
            branch = self.open[-1]
            branch.taken = False if branch.over else None if branch.doubt else known
            branch.over, branch.doubt = branch.over or branch.taken is True, branch.doubt or known is None
            branch.number = _Branch("").number
        return end + 1

    def _loop(self, tokens: Sequence[_Token], at: int) -> int:
        """Open a loop. What its body sets is not known at its begin, since an earlier turn may have set it."""
        start, end = _place(tokens, at, "do"), _closing(tokens, at, ("for", "while", "until", "select"), "done")
        names = [t.name if isinstance(t, _Array) else t.partition("=")[0] for t in tokens[start:end] if _sets(t)]
        names += [str(tokens[at + 1])] if tokens[at] == "for" else []
        changed = tuple(dict.fromkeys(name.rstrip("+") for name in names))
        self._forget(changed)
        self.open.append(_Branch(str(tokens[at]), changed=changed))
        return start + 1

    def _forget(self, names: Sequence[str]) -> None:
        for name in names:
            if name in self.lists:
                never = frozenset((_Branch("").number,))
                self.lists[name] = [replace(word, under=word.under | never) for word in self.lists[name]]
            else:
                self.variables[name] = None

    def _close(self) -> None:
        if self.open:
            self._forget(self.open.pop().changed)

    def _pattern(self, tokens: Sequence[_Token], at: int) -> int:
        """Take or leave the branch of a `case` by its pattern at a place; return the place after it."""
        while at < len(tokens) and tokens[at] == _BREAK:
            at += 1
        end = at
        while end < len(tokens) and not str(tokens[end]).endswith(")") and tokens[end] not in ("esac", _CASE):
            end += 1
        if end == len(tokens) or not str(tokens[end]).endswith(")") or not self.open:
            return at
        names = "".join(str(t) for t in tokens[at : end + 1]).strip("()").replace(_BREAK, "|").split("|")
        branch = self.open[-1]
        branch.number = _Branch("").number
        if branch.value is None:
            branch.taken = None
        else:
            branch.taken = not branch.over and (branch.value in names or "*" in names)
            branch.over = branch.over or branch.taken
        return end + 1

    def _function(self, tokens: Sequence[_Token], at: int) -> int | None:
        """Keep the body of a function that is defined at a place; return the place after it, None if none is."""
        words = [str(t) for t in tokens[at : at + 3]]
        named = re.fullmatch(r"([\w-]+)\(\)\{?", words[0])
        if words[0] != "function" and named is None and words[1:2] not in (["()"], ["(){"]):
            return None
        name = (words[1] if words[0] == "function" else words[0]).partition("(")[0]
        start = at
        while start < len(tokens) and not str(tokens[start]).endswith("{"):
            start += 1
        end, deep = start + 1, 1
        while end < len(tokens):
            deep += (tokens[end] == "{") - (tokens[end] == "}")
            if deep == 0:
                break
            end += 1
        self.functions[name] = list(tokens[start + 1 : end])
        return end + 1

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

    # -- commands ------------------------------------------------------------------------------------------------------

    def _run(self, command: list[_Token]) -> None:
        """Follow a command: its assignments, a function of the script, or the words of any other."""
        command = _without_redirection(command)
        first = str(command[0]) if command else ""
        sets = [token for token in command if _sets(token)]
        if first in _SETS or (sets and len(sets) == len(command)):
            for token in sets:
                self._assign(token)
            return
        words = [word for token in command for word in self._words(token)]
        while words and _ASSIGNED.fullmatch(words[0].text):  # for this command alone
            self._export(words.pop(0).text)
        name = words[0].text.lstrip("(") if words else ""
        if name in self.functions and self.depth < _DEPTH:
            self._call(self.functions[name], words[1:])
        elif words:
            self._add(words)

    def _add(self, words: list[Word]) -> None:
        """Note a command; what a shell is given as one text is followed as commands of their own."""
        texts = [word.text for word in words if re.search(r"\s", word.text) and _has_flags(word.text)]
        shell = any(word.text.rpartition("/")[2] in _SHELLS for word in words)
        if not texts or not shell or self.depth >= _DEPTH:
            self.commands.append(tuple(words))
            return
        self.depth += 1
        before = [word for word in words if word.text not in texts]
        count = len(self.commands)
        for text in texts:
            self.read(text)
        # Slurm's numbers of nodes and processes stand before the shell
        self.commands[count:] = [(*before, *inner) for inner in self.commands[count:]]
        self.depth -= 1

    def _call(self, body: list[_Token], words: list[Word]) -> None:
        """Follow a function of the script with its arguments."""
        kept, args = dict(self.variables), self.lists.get("@")
        self.variables |= {str(k): word.text if "$" not in word.text else None for k, word in enumerate(words, 1)}
        self.lists["@"] = self.lists["*"] = words
        chained, self.chained = self.chained, None
        self.depth += 1
        self._follow(body)
        self.depth -= 1
        self.chained = chained
        for name in map(str, range(1, len(words) + 1)):
            self.variables[name] = kept.get(name)
            if name not in kept:
                del self.variables[name]
        for name in ("@", "*"):
            del self.lists[name]
            if args is not None:
                self.lists[name] = args

    def _words(self, token: _Token) -> Iterator[Word]:
        """Yield the words of a token: a list of arguments stands where it is used."""
        if isinstance(token, _Array):
            return
        held = _LIST.fullmatch(token)
        name = "" if held is None else held["name"] or held["plain"]
        if name in self.lists:
            yield from (replace(word, under=word.under - self._doubts) for word in self.lists[name])
            return
        text = self._expanded(token)
        if text.startswith("--") and re.search(r"\s", text):  # an item of an array that is used without quotes
            yield from map(Word, _split(text))
        elif text or not token:  # a variable that is empty is no word
            yield Word(text)

    def _assign(self, token: _Token) -> None:
        """Set a variable. Where it is not known whether this is run, neither is what differs from before."""
        if isinstance(token, _Array):
            name, more = token.name, token.more
            words = [word for each in token.words for word in self._words(each)]
        else:
            assigned = _ASSIGNED.fullmatch(token)
            if assigned is None:
                return
            name, more, value = assigned["name"], bool(assigned["more"]), assigned["value"]
            if not (_has_flags(value) or self._holds_list(value)):
                self._assign_text(name, value, more)
                return
            words = [word for each in _split(value) for word in self._words(each)]
        new = [*(self.lists.get(name, []) if more else []), *words]
        self.arguments += words
        self._set_list(name, new)

    def _assign_text(self, name: str, value: str, more: bool) -> None:
        text, doubts = self._expanded(value), self._doubts
        if more:
            before = self._known(name)
            text = f"{'' if before is None else before}{text}"
        if name in self.lists and not more:
            self._set_list(name, [])
        else:
            self.variables[name], self.under[name] = text, doubts
        if not doubts:
            self._export(f"{name}={text}")

    def _set_list(self, name: str, new: list[Word]) -> None:
        old, doubts = self.lists.get(name, []), self._doubts
        if doubts:
            same = 0
            while same < min(len(old), len(new)) and old[same].text == new[same].text:
                same += 1
            rest = [replace(word, under=word.under | doubts) for word in (*old[same:], *new[same:])]
            new = [*old[:same], *rest]
        self.lists[name] = new

    def _holds_list(self, value: str) -> bool:
        names = [found["name"] or found["plain"] for found in _LIST.finditer(value)]
        return any(self.lists.get(name) for name in names)

    def _export(self, text: str) -> None:
        name, _, value = text.partition("=")
        if re.fullmatch(r"[A-Z][A-Z0-9_]*", name) and value:
            self.exported[name] = value

    def _expanded(self, text: str) -> str:
        """Return a text with the values of the variables that are known."""

        def value(found: re.Match[str]) -> str:
            name, default = found["braced"] or found["plain"], found["default"]
            if name in self.lists:
                words = self.lists[name]
                sure = all(word.under <= self._doubts for word in words)
                return " ".join(word.text for word in words) if sure else f"${name}"
            known = self._known(name)
            if known is None and name not in self.variables and default is not None:
                return self._expanded(default.strip("\"'"))
            return f"${name}" if known is None else known

        out = _VARIABLE.sub(value, text)
        return _ARITHMETIC.sub(lambda found: _sum(found["sum"], found[0], self._known), out)


def _place(tokens: Sequence[_Token], at: int, word: str) -> int:
    """Return the place of the next such word, or the last place."""
    while at < len(tokens) - 1 and tokens[at] != word:
        at += 1
    return at


def _closing(tokens: Sequence[_Token], at: int, openers: Sequence[str], closer: str) -> int:
    """Return the place of the word that closes what a word opens."""
    deep = 0
    for place in range(at, len(tokens)):
        begins = place == 0 or tokens[place - 1] in (_BREAK, _AND, _OR, _CASE, "do", "then", "else")
        deep += (tokens[place] in openers and (begins or place == at)) - (tokens[place] == closer)
        if deep == 0:
            return place
    return len(tokens)


def _sets(token: _Token) -> bool:
    return isinstance(token, _Array) or (not token.startswith("-") and _ASSIGNED.fullmatch(token) is not None)


def _without_redirection(command: list[_Token]) -> list[_Token]:
    out: list[_Token] = []
    skip = False
    for token in command:
        found = None if isinstance(token, _Array) else _REDIRECTED.fullmatch(token)
        if found is None and not skip:
            out.append(token)
        skip = found is not None and not found["to"]
    return out


def _has_flags(text: str) -> bool:
    return re.search(r"(^|\s)--\w", text) is not None


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def _tokens(text: str) -> Iterator[_Token]:
    """Yield the words of a text, arrays as one; _BREAK for the ends of lines outside of quotes, and for `;`."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=";\n&|")
    lexer.whitespace, lexer.whitespace_split, lexer.commenters = " \t\r", True, "#"
    array: _Array | None = None
    shells = 0  # subshells that are open: `(cd x; torchrun --y 1)`
    for word in lexer:
        token = word.replace(_HASH, "#")
        if set(token) <= set(";\n&|"):
            if array is None:
                yield _CASE if ";;" in token else token if token in (_AND, _OR) else _BREAK
            continue
        begins = re.fullmatch(r"([A-Za-z_]\w*)(\+?)=\((.*)", token, re.DOTALL) if array is None else None
        if begins is not None:
            array, token = _Array(begins[1], bool(begins[2]), ()), begins[3]
        unclosed = token.endswith(")") and token.count(")") > token.count("(")
        if array is None:
            if token.startswith("(") and not token.startswith("(("):
                token, shells = token[1:], shells + 1
                unclosed = token.endswith(")") and token.count(")") > token.count("(")
            ends = unclosed and shells > 0
            shells -= ends
            yield from (part for part in (token[:-1], _BREAK) if part) if ends else [token] * bool(token)
            continue
        item = token.removesuffix(")") if unclosed else token
        array = replace(array, words=(*array.words, *([item] if item else [])))
        if unclosed:
            yield array
            array = None


def _sum(text: str, written: str, known: Callable[[str], str | None]) -> str:
    """Return the value of a sum of integers and variables, or the text as it is written if one is not known."""
    names = re.sub(r"\b[A-Za-z_]\w*\b", lambda found: known(found[0]) or "?", text)
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
