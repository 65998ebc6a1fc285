"""The key `fabric` of a cluster file: devices, switches and links as a graph (`fabric_graph`).

    fabric:
      switches: {nvswitch: 16, leaf: 8, spine: 4}     # kind: how many, named nvswitch0 ... spine3
      links:                                          # full duplex; gb_s and latency_us per link and direction
        - {for: {i: 128}, between: ["device{i}", "nvswitch{i // 8}"], gb_s: 450, latency_us: 0.375, kind: nvlink4}
        - {for: {i: 128}, between: ["device{i}", "leaf{i % 8}"], gb_s: 50, latency_us: 6.25}
        - {for: {i: 8, k: 4}, between: ["leaf{i}", "spine{k}"], gb_s: 100, latency_us: 6.25}
      units: [8]                                      # sizes of the units of levels, inner to outer; optional

Devices are device0, device1, ... node by node. An entry of `links` stands for one link per value of its variables in
`for` (0 to n - 1, all combinations). `{}` holds an integer expression of the variables with + - * // % and parentheses.
`kind` is a row of nccl.FABRICS (default network). The latency between two devices is the sum over the links of the
path.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Callable, Iterator, Mapping

from autoplan.config.keys import as_mapping, as_number
from autoplan.cost_models.hardware.fabric_graph import FabricGraph, FabricLink
from autoplan.cost_models.hardware.parts import COUNT, GB_S, MICROSECONDS
from autoplan.errors import PinError
from autoplan.units import GB, MICRO

_KEYS = ("switches", "links", "units")
_LINK_KEYS = ("for", "between", "gb_s", "latency_us", "kind")
_NEEDED = ("between", "gb_s", "latency_us")
_OPERATORS: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def fabric_of_mapping(data: object, num_devices: int, where: str) -> FabricGraph:
    """Return the fabric of a mapping in a cluster file. Raises PinError that names the wrong key, link or device."""
    given = as_mapping(data, where, _KEYS)
    kinds = given.get("switches", {})
    if not isinstance(kinds, Mapping):
        raise PinError(
            f"{where}, switches must map kinds of switches to how many there are, as {{leaf: 8}}; got {kinds!r}"
        )
    counts = {str(kind): int(COUNT.check(n, f"{where}, switches: {kind}")) for kind, n in kinds.items()}
    for kind in counts:
        if kind == "device" or not re.fullmatch(r"[A-Za-z_]+", kind):
            raise PinError(f"{where}, switches: {kind!r} cannot name switches; use letters, but not the word device")
    entries, units = given.get("links"), given.get("units")
    if not isinstance(entries, list) or not entries:
        raise PinError(f"{where}: links is missing; a fabric needs a list of links")
    if units is not None and not (isinstance(units, list) and all(isinstance(n, int) for n in units)):
        raise PinError(f"{where}: units={units!r} must be a list of whole numbers, inner to outer")
    links = [link for i, entry in enumerate(entries) for link in _links(entry, f"{where}, links[{i}]")]
    try:
        return FabricGraph(
            num_devices,
            tuple(f"{kind}{i}" for kind, n in counts.items() for i in range(n)),
            tuple(links),
            None if units is None else tuple(units),
        )
    except PinError as error:
        raise PinError(f"{where}: {error}") from None


def _links(data: object, where: str) -> Iterator[FabricLink]:
    """Yield the links that an entry stands for."""
    given = as_mapping(data, where, _LINK_KEYS)
    for key in _NEEDED:
        if key not in given:
            raise PinError(f"{where}: {key} is missing; needed are {', '.join(_NEEDED)}")
    between, ranges = given["between"], given.get("for", {})
    if not isinstance(between, list) or len(between) != 2 or not all(isinstance(end, str) for end in between):
        raise PinError(f"{where}: between={between!r} must be two names, as [device0, leaf0]")
    if not isinstance(ranges, Mapping):
        raise PinError(f"{where}: for={ranges!r} must map variables to how many values they have, as {{i: 8}}")
    counts = {str(name): int(COUNT.check(n, f"{where}, for: {name}")) for name, n in ranges.items()}
    speed = as_number(given, "gb_s", where, GB_S) * GB
    latency_s = as_number(given, "latency_us", where, MICROSECONDS) * MICRO
    ends = [_name(end, tuple(counts), where) for end in between]
    for values in itertools.product(*(range(n) for n in counts.values())):
        a, b = (end(dict(zip(counts, values, strict=True))) for end in ends)
        try:
            yield FabricLink(a, b, speed, latency_s, str(given.get("kind", "network")))
        except PinError as error:
            raise PinError(f"{where}: {error}") from None


def _name(text: str, variables: tuple[str, ...], where: str) -> Callable[[Mapping[str, int]], str]:
    """Return a function from the values of the variables to a name, for a text such as `leaf{i % 8}`."""
    pieces = re.split(r"\{([^{}]*)\}", text)
    numbers = [_number(piece, variables, f"{where}: {text!r}") for piece in pieces[1::2]]

    def name(values: Mapping[str, int]) -> str:
        found = [str(number(values)) for number in numbers]
        return "".join(piece for pair in itertools.zip_longest(pieces[::2], found, fillvalue="") for piece in pair)

    return name


def _number(text: str, variables: tuple[str, ...], where: str) -> Callable[[Mapping[str, int]], int]:
    """Return a function from the values of the variables to a whole number, for a text such as `i // 8`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        raise PinError(f"{where}: {{{text}}} must compute a whole number from variables with + - * // %") from None

    def value(node: ast.expr, values: Mapping[str, int]) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.Name) and node.id in values:
            return values[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
            left, right = value(node.left, values), value(node.right, values)
            if right == 0 and isinstance(node.op, (ast.FloorDiv, ast.Mod)):
                raise PinError(f"{where}: {{{text}}} divides by 0")
            return _OPERATORS[type(node.op)](left, right)
        if isinstance(node, ast.Name):
            known = ", ".join(variables) or "none; give them in `for`"
            raise PinError(f"{where}: {{{text}}} has an unknown variable {node.id}; known: {known}")
        raise PinError(f"{where}: {{{text}}} must compute a whole number from variables with + - * // %")

    return lambda values: value(tree, values)
