"""The one-line rule language: which factors of an op can be split, and which types the split gives.

    linear:      [*b,i] * [o,i] -> [*b,o]
    layer_norm:  [*b,n!], [n!], [n!] -> [*b,n!]
    embedding:   [v@vocab_embedding,h] * #[*b] -> [*b,h]
    attention:   [b,kv g,s!,d!], [b,kv,t!,d!], [b,kv,t!,e!] -> [b,kv g,s!,e!]

A bracket lists the dims of one tensor; a dim is one label or several (a product, major to minor); `*b` stands for any
number of leading dims, broadcast as usual. `!` marks a label that cannot be split. `@name` marks a label whose split
needs its own code. `#` marks an integer operand (no gradient). Operands joined by `*` are multiplied, by `+` added; the
op is not linear in operands after `,`; `~` marks a single operand in which the op is linear. The line implies the legal
splits:

* a label in an operand and in the output splits both; operands without it are R;
* a label only in multiplied operands (or in a `~` operand: a sum) makes the output P;
* P passes through if everything added is P, or exactly one multiplied operand is.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from autoplan.errors import RuleError
from autoplan.ir.symbols import Expr

Labels = tuple[str, ...]  # labels of one dim


class Role(Enum):
    """The way in which an operand enters the op."""

    MUL = "*"
    ADD = "+"
    LINEAR = "~"
    OTHER = ","
    INDEX = "#"


@dataclass(frozen=True)
class OpRule:
    """A rule bound to one node: labels of every dim of every operand and output."""

    inputs: tuple[tuple[Labels, ...], ...]
    outputs: tuple[tuple[Labels, ...], ...]
    roles: tuple[Role, ...]
    whole: frozenset[str] = frozenset()
    special: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, Expr] = field(default_factory=dict)  # sizes of labels that share a dim

    @property
    def labels(self) -> tuple[str, ...]:
        """All labels, in order of appearance."""
        seen: dict[str, None] = {}
        for operand in (*self.inputs, *self.outputs):
            for dim in operand:
                for label in dim:
                    seen[label] = None
        return tuple(seen)

    def contracted(self, label: str) -> bool:
        """Return True if the label occurs in an operand but in no output."""
        inside = any(label in dim for operand in self.inputs for dim in operand)
        return inside and not any(label in dim for operand in self.outputs for dim in operand)


@dataclass(frozen=True)
class _Operand:
    dims: tuple[Labels, ...]
    role: Role


@dataclass(frozen=True)
class RuleTemplate:
    """A parsed rule line."""

    line: str
    inputs: tuple[_Operand, ...]
    outputs: tuple[_Operand, ...]
    whole: frozenset[str]
    special: Mapping[str, str]


_OPERAND = re.compile(r"\s*([*+,])?\s*([~#]?)\s*\[([^\[\]]*)\]")
_LABEL = re.compile(r"(\*?[a-z]\w*)(!?)(?:@([a-z]\w*))?")


def _dims(body: str, line: str, whole: set[str], special: dict[str, str]) -> tuple[Labels, ...]:
    """Return the dims between two brackets; marks go to `whole` and `special`."""
    dims: list[Labels] = []
    for part in body.split(",") if body.strip() else []:
        labels = []
        for word in part.split():
            match = _LABEL.fullmatch(word)
            if match is None:
                raise RuleError(f"rule {line!r}: cannot read the label {word!r}")
            name, mark, code = match.groups()
            if mark:
                whole.add(name)
            if code:
                special[name] = code
            labels.append(name)
        if not labels:
            raise RuleError(f"rule {line!r}: [{body}] has an empty dim; a dim of size 1 gets a label like any other")
        if len(labels) > 1 and any(name.startswith("*") for name in labels):
            raise RuleError(f"rule {line!r}: {part.strip()!r} puts any number of dims into one")
        dims.append(tuple(labels))
    if sum(dim[0].startswith("*") for dim in dims) > 1:
        raise RuleError(f"rule {line!r}: [{body}] has two labels for any number of dims")
    return tuple(dims)


def _side(text: str, line: str, whole: set[str], special: dict[str, str]) -> tuple[_Operand, ...]:
    operands: list[_Operand] = []
    separators: list[str | None] = []
    position = 0
    for match in _OPERAND.finditer(text):
        separator, mark, body = match.groups()
        if match.start() != position or (separator is None) != (not operands):
            raise RuleError(f"rule {line!r}: cannot read {text[position : match.end()]!r}")
        position = match.end()
        separators.append(separator)
        role = {"~": Role.LINEAR, "#": Role.INDEX}.get(mark, Role.OTHER)
        operands.append(_Operand(_dims(body, line, whole, special), role))
    if text[position:].strip():
        raise RuleError(f"rule {line!r}: cannot read {text[position:]!r}")
    for i, separator in enumerate(separators):
        if separator in ("*", "+"):
            for j in (i - 1, i):
                if operands[j].role is Role.OTHER:
                    operands[j] = _Operand(operands[j].dims, Role(separator))
    return tuple(operands)


@functools.cache
def parse(line: str) -> RuleTemplate:
    """Parse a rule line. RuleError names what cannot be read."""
    left, arrow, right = line.partition("->")
    if not arrow:
        raise RuleError(f"rule {line!r} has no '->'")
    whole: set[str] = set()
    special: dict[str, str] = {}
    inputs = _side(left, line, whole, special)
    outputs = _side(right, line, whole, special)
    if not outputs or any(o.role is not Role.OTHER for o in outputs):
        raise RuleError(f"rule {line!r}: after '->' stand the outputs, separated by ',' and without marks")
    return RuleTemplate(line, inputs, outputs, frozenset(whole), special)


def _bind_dims(
    operand: _Operand, shape: tuple[Expr, ...], stars: dict[str, tuple[Expr, ...]], line: str
) -> tuple[Labels, ...]:
    star = [i for i, dim in enumerate(operand.dims) if dim and dim[0].startswith("*")]
    if not star:
        if len(shape) != len(operand.dims):
            raise RuleError(f"rule {line!r} names {len(operand.dims)} dims of an operand that has {len(shape)}")
        return tuple(() if s.value == 1 and len(d) == 1 else d for d, s in zip(operand.dims, shape, strict=True))
    at, num_fixed = star[0], len(operand.dims) - 1
    if len(shape) < num_fixed:
        raise RuleError(f"rule {line!r} names {num_fixed} dims of an operand that has {len(shape)}")
    name = operand.dims[at][0][1:]
    count = len(shape) - num_fixed
    full = stars[name]
    expanded: list[Labels] = []
    for i in range(count):
        size = shape[at + i]
        expanded.append(() if size.value == 1 else (f"{name}{len(full) - count + i}",))
    before = [() if shape[i].value == 1 else operand.dims[i] for i in range(at)]
    after = [() if shape[at + count + k].value == 1 else d for k, d in enumerate(operand.dims[at + 1 :])]
    return (*before, *expanded, *after)


def bind(
    template: RuleTemplate,
    input_shapes: list[tuple[Expr, ...]],
    output_shapes: list[tuple[Expr, ...]],
    sizes: Mapping[str, Expr] | None = None,
) -> OpRule:
    """Bind a parsed rule to the shapes of one node. RuleError if the ranks do not fit."""
    if len(input_shapes) > len(template.inputs) or len(output_shapes) != len(template.outputs):
        raise RuleError(f"rule {template.line!r} does not fit {len(input_shapes)} inputs, {len(output_shapes)} outputs")
    operands = [*template.inputs[: len(input_shapes)], *template.outputs]
    shapes = [*input_shapes, *output_shapes]
    stars: dict[str, tuple[Expr, ...]] = {}
    for operand, shape in zip(operands, shapes, strict=True):
        for dim in operand.dims:
            if dim and dim[0].startswith("*"):
                name, rank = dim[0][1:], len(shape) - (len(operand.dims) - 1)
                if rank > len(stars.get(name, ())) or name not in stars:
                    stars[name] = tuple(shape[:rank])
    bound = [_bind_dims(o, s, stars, template.line) for o, s in zip(operands, shapes, strict=True)]
    whole = set(template.whole)
    for name, full in stars.items():
        if f"*{name}" in template.whole:
            whole |= {f"{name}{i}" for i in range(len(full))}
    count = len(input_shapes)
    return OpRule(
        inputs=tuple(bound[:count]),
        outputs=tuple(bound[count:]),
        roles=tuple(o.role for o in template.inputs[:count]),
        whole=frozenset(whole),
        special=template.special,
        sizes=dict(sizes or {}),
    )
