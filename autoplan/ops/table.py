"""The rule table: op name -> how it can be split. An op that is not here is an error, never a silent guess.

Most ops are one line of the rule language. Ops whose labels depend on their arguments (views, slices, reductions, ...)
name a builder. `FLOPS_PER_POINT` gives the arithmetic of an op per element of its label space.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autoplan.errors import RuleError
from autoplan.ir.graph import Node, Value
from autoplan.ir.symbols import Expr, product
from autoplan.ops.language import Labels, OpRule, Role, bind, parse

Shape = tuple[Expr, ...]
Builder = Callable[[Node, list[Shape], list[Shape]], OpRule]


def align(left: Shape, right: Shape) -> tuple[list[Labels], list[Labels], dict[str, Expr]] | None:
    """Common refinement of two dim lists of equal product (a reshape): labels of every dim and their sizes, or None.

    `(b, s, h)` and `(b*s, h)` refine to labels b | s | h; `(6,)` and `(4, ...)` have no common refinement.
    """
    sizes: dict[str, Expr] = {}
    out: tuple[list[list[str]], list[list[str]]] = ([[] for _ in left], [[] for _ in right])
    shapes, position = (left, right), [0, 0]
    rest: list[Expr | None] = [None, None]
    while True:
        for side in (0, 1):
            while rest[side] is None and position[side] < len(shapes[side]):
                if shapes[side][position[side]].value == 1:
                    position[side] += 1
                else:
                    rest[side] = shapes[side][position[side]]
        a, b = rest
        if a is None or b is None:
            return ([tuple(x) for x in out[0]], [tuple(x) for x in out[1]], sizes) if a is None and b is None else None
        common = a if a == b else b if a.divide(b) is not None else a if b.divide(a) is not None else None
        if common is None:
            return None
        label = f"f{len(sizes)}"
        sizes[label] = common
        for side, size in ((0, a), (1, b)):
            out[side][position[side]].append(label)
            remaining = size.divide(common)
            rest[side] = None if remaining == Expr.of(1) else remaining
            if rest[side] is None:
                position[side] += 1


def _dims(shape: Shape, prefix: str = "a") -> list[Labels]:
    return [() if size.value == 1 else (f"{prefix}{i}",) for i, size in enumerate(shape)]


def _linear(inputs: list[Labels], outputs: list[Labels], whole: set[str] | None = None, **kw: Any) -> OpRule:
    return OpRule((tuple(inputs),), (tuple(outputs),), (Role.LINEAR,), frozenset(whole or ()), **kw)


def _view(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    found = align(ins[0], outs[0])
    if found is None:  # no common refinement: nothing of it can be split
        a, b = _dims(ins[0], "x"), _dims(outs[0], "y")
        return _linear(a, b, {label for dim in (*a, *b) for label in dim})
    return _linear(found[0], found[1], sizes=found[2])


def _transpose(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    out = list(labels)
    d0, d1 = (d % len(labels) for d in (node.attrs["dim0"], node.attrs["dim1"]))
    out[d0], out[d1] = out[d1], out[d0]
    return _linear(labels, out)


def _permute(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    return _linear(labels, [labels[d % len(labels)] for d in node.attrs["dims"]])


def _unsqueeze(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    out = list(labels)
    out.insert(node.attrs["dim"] % (len(labels) + 1), ())
    return _linear(labels, out)


def _squeeze(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    dim = node.attrs["dim"] % len(labels)
    if ins[0][dim].value != 1:  # torch leaves it as it is
        return _linear(labels, labels)
    return _linear(labels, labels[:dim] + labels[dim + 1 :])


def _expand(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    out = _dims(outs[0])
    skip = len(outs[0]) - len(ins[0])
    inside = [() if size.value == 1 else out[skip + i] for i, size in enumerate(ins[0])]
    return _linear(inside, out)


def _same_but(ins: list[Shape], outs: list[Shape], dim: int) -> OpRule:
    """Dims carry over, except `dim`, which changes size and so cannot be split."""
    labels = _dims(ins[0])
    out = list(labels)
    out[dim] = () if outs[0][dim].value == 1 else ("changed",)
    return _linear(labels, out, {"changed", *labels[dim]})


def _slice(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    return _same_but(ins, outs, node.attrs["dim"] % len(ins[0]))


def _select(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    dim = node.attrs["dim"] % len(labels)
    return _linear(labels, labels[:dim] + labels[dim + 1 :], set(labels[dim]))


def _pad(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    out, whole = list(labels), set()
    for i, (a, b) in enumerate(zip(ins[0], outs[0], strict=True)):
        if a != b:
            out[i] = (f"changed{i}",)
            whole |= {f"changed{i}", *labels[i]}
    return OpRule((tuple(labels),), (tuple(out),), (Role.OTHER,), frozenset(whole))


def _cat(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    dim = node.attrs["dim"] % len(outs[0])
    out = _dims(outs[0])
    operands, whole = [], {*out[dim]}
    for k, shape in enumerate(ins):
        labels = list(out)
        labels[dim] = () if shape[dim].value == 1 else (f"part{k}",)
        whole |= {*labels[dim]}
        operands.append(tuple(labels))
    return OpRule(tuple(operands), (tuple(out),), (Role.ADD,) * len(ins), frozenset(whole))


def _chunk(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Equal chunks: the dim is `count x rest`; the rest can be split, the count cannot (a fused q, k, v projection)."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = _dims(ins[0])
    out = list(labels)
    if all(o[dim] == outs[0][dim] for o in outs):
        labels[dim], out[dim] = ("count", "rest"), ("rest",)
        sizes = {"count": Expr.of(len(outs)), "rest": outs[0][dim]}
        return OpRule((tuple(labels),), (tuple(out),) * len(outs), (Role.LINEAR,), frozenset({"count"}), sizes=sizes)
    results, whole = [], {*labels[dim]}
    for k in range(len(outs)):
        part = list(labels)
        part[dim] = (f"part{k}",)
        whole.add(f"part{k}")
        results.append(tuple(part))
    return OpRule((tuple(labels),), tuple(results), (Role.LINEAR,), frozenset(whole))


def _reduce(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Sum or mean over dims: a split reduced dim makes the result P (the mean divides by the global size)."""
    labels = _dims(ins[0])
    dims = node.attrs.get("dims")
    over = {d % len(labels) for d in (dims if dims else range(len(labels)))}
    keep = bool(node.attrs.get("keepdim"))
    out = [() if i in over else label for i, label in enumerate(labels) if keep or i not in over]
    return _linear(labels, out)


def _whole_dim(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    dim = node.attrs["dim"] % len(labels)
    return OpRule((tuple(labels),), (tuple(labels),), (Role.OTHER,), frozenset(labels[dim]))


def _matmul(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    a, b, out = ins[0], ins[1], outs[0]
    if len(a) < 2 or len(b) < 2:
        raise RuleError(f"{node.name}: matmul of a vector has no rule; unsqueeze it to a matrix")
    batch = _dims(out[:-2], "n")

    def lead(shape: Shape) -> list[Labels]:
        skip = len(batch) - (len(shape) - 2)
        return [() if size.value == 1 else batch[skip + i] for i, size in enumerate(shape[:-2])]

    def one(size: Expr, label: str) -> Labels:
        return () if size.value == 1 else (label,)

    m, k, n = one(a[-2], "m"), one(a[-1], "k"), one(b[-1], "n")
    return OpRule(
        ((*lead(a), m, k), (*lead(b), one(b[-2], "k"), n)), ((*batch, m, n),), (Role.MUL, Role.MUL), passes_partial=True
    )


def _factory(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    labels = _dims(outs[0])
    return OpRule((), (tuple(labels),), (), frozenset(label for dim in labels for label in dim))


_ATTENTION = parse("[b,kv g,s!,d!], [b,kv,t!,d!], [b,kv,t!,e!] -> [b,kv g,s!,e!]")


def _attention(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    heads, kv = ins[0][1], ins[1][1]
    group = heads.divide(kv)
    if group is None:
        raise RuleError(f"{node.name}: {heads} query heads are not a multiple of {kv} key-value heads")
    sizes = {"kv": kv, "g": group}
    rule = bind(_ATTENTION, ins[:3], outs, sizes)

    def tidy(dims: tuple[Labels, ...]) -> tuple[Labels, ...]:
        return tuple(tuple(x for x in dim if x not in sizes or sizes[x].value != 1) for dim in dims)

    inputs = [tidy(dims) for dims in rule.inputs]
    roles = list(rule.roles)
    if node.attrs.get("documents"):  # to which every token belongs
        inputs.append((("b",), ("s",)))
        roles.append(Role.OTHER)
    elif len(ins) > 3:  # additive or boolean mask, broadcast against [b, heads, s, t]
        names: list[Labels] = [("b",), tuple(x for x in ("kv", "g") if sizes[x].value != 1), ("s",), ("t",)]
        skip = 4 - len(ins[3])
        inputs.append(tuple(() if size.value == 1 else names[skip + i] for i, size in enumerate(ins[3])))
        roles.append(Role.OTHER)
    return OpRule(tuple(inputs), tuple(tidy(d) for d in rule.outputs), tuple(roles), rule.whole, sizes=sizes)


def _topk(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Values and indices of the largest along a dim."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = _dims(ins[0])
    out = list(labels)
    out[dim] = () if outs[0][dim].value == 1 else ("top",)
    return OpRule((tuple(labels),), (tuple(out),) * 2, (Role.OTHER,), frozenset({"top", *labels[dim]}))


def _extreme(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """The largest along a dim (and its place), or its place alone."""
    dim = node.attrs["dim"] % len(ins[0])
    labels = _dims(ins[0])
    out = labels[:dim] + ([()] if node.attrs["keepdim"] else []) + labels[dim + 1 :]
    return OpRule((tuple(labels),), (tuple(out),) * len(outs), (Role.OTHER,), frozenset(labels[dim]))


def _indexed(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """gather and scatter: the index selects along one dim; along the others everything has the same size."""
    dim = node.attrs["dim"] % len(ins[0])
    if any(a != b for i, (a, b) in enumerate(zip(ins[0], ins[1], strict=True)) if i != dim):
        raise RuleError(f"{node.name}: the index must have the input's size in every dim but {dim}")
    source, index = _dims(ins[0]), _dims(ins[0])
    index[dim] = () if ins[1][dim].value == 1 else ("picked",)
    out = source if node.op == "scatter" else index
    whole = frozenset({"picked", *source[dim]})
    return OpRule((tuple(source), tuple(index)), (tuple(out),), (Role.OTHER, Role.INDEX), whole)


_EXPERTS = parse("[t,i!], #[t,k!], [t,k!] * [e@expert_parallel,f,i!] * [e@expert_parallel,o!,f] -> [t,o!]")


def _experts(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Experts of a mixture: tokens split with whole weights; experts and their inner size into a pending sum.

    Rows of a gated first projection are `gate, up`: as for a fused projection, each is split by itself. The outer size
    is not split: only the last of the products would shrink.
    """
    sizes = {"count": Expr.of(2), "f": ins[4][2]}
    rule = bind(_EXPERTS, ins, outs)
    if not node.attrs["gated"]:
        return rule
    first = (rule.inputs[3][0], ("count", *rule.inputs[3][1]), *rule.inputs[3][2:])
    inputs = (*rule.inputs[:3], first, rule.inputs[4])
    return OpRule(inputs, rule.outputs, rule.roles, rule.whole | {"count"}, rule.special, sizes)


def _repeat_interleave(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
    """Every element of a dim several times: the dim becomes `it x repeats`."""
    labels = _dims(ins[0])
    if node.attrs["dim"] is None and len(labels) != 1:
        raise RuleError(f"{node.name}: repeat_interleave without a dim flattens; reshape its input first")
    dim = (node.attrs["dim"] or 0) % len(labels)
    out = list(labels)
    out[dim] = (*labels[dim], "repeats")
    sizes = {"repeats": Expr.of(node.attrs["repeats"]), **{x: ins[0][dim] for x in labels[dim]}}
    return _linear(labels, out, {"repeats"}, sizes=sizes)


def _line(text: str) -> Builder:
    template = parse(text)

    def build(node: Node, ins: list[Shape], outs: list[Shape]) -> OpRule:
        return bind(template, ins, outs)

    return build


UNARY = "[*a] -> [*a]"
UNARY_LINEAR = "~[*a] -> [*a]"
BINARY = "[*a], [*a] -> [*a]"

_UNARY_OPS = (
    "silu gelu relu tanh sigmoid exp log cos sin rsqrt sqrt abs erf pow_scalar add_scalar rsub_scalar softplus square "
    "bitwise_not logical_not ne_scalar eq_scalar lt_scalar gt_scalar le_scalar ge_scalar clamp to dropout"
)
_LINEAR_OPS = "neg mul_scalar div_scalar detach clone"
_BINARY_OPS = "pow maximum minimum eq ne lt gt le ge logical_and logical_or bitwise_and bitwise_or"

LINES: dict[str, str] = {
    **dict.fromkeys(_UNARY_OPS.split(), UNARY),
    **dict.fromkeys(_LINEAR_OPS.split(), UNARY_LINEAR),
    **dict.fromkeys(_BINARY_OPS.split(), BINARY),
    "add": "[*a] + [*a] -> [*a]",
    "sub": "[*a] + [*a] -> [*a]",
    "mul": "[*a] * [*a] -> [*a]",
    "div": "[*a] * [*a] -> [*a]",
    "where": "#[*a], [*a], [*a] -> [*a]",
    "masked_fill": "[*a], #[*a] -> [*a]",
    "linear": "[*b,i] * [o,i] -> [*b,o]",
    "layer_norm": "[*b,n!], [n!], [n!] -> [*b,n!]",
    "rms_norm": "[*b,n!], [n!] -> [*b,n!]",
    "embedding": "[v@vocab_embedding,h] * #[*b] -> [*b,h]",
    "one_hot": "#[*a] -> [*a,c!]",
    "histc": "#[*a] -> [c!]",
    "weighted_count": "#[*a] * [*a] -> [c!]",
    "batch_sum": UNARY_LINEAR,
    "batch_part": UNARY_LINEAR,
    "cross_entropy_sum": "~[t,v@vocab_cross_entropy], #[t] -> []",
}

BUILDERS: dict[str, Builder] = {
    **{op: _line(line) for op, line in LINES.items()},
    "reshape": _view,
    "transpose": _transpose,
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    "expand": _expand,
    "slice": _slice,
    "select": _select,
    "pad": _pad,
    "cat": _cat,
    "chunk": _chunk,
    "sum": _reduce,
    "mean": _reduce,
    "softmax": _whole_dim,
    "log_softmax": _whole_dim,
    "cumsum": _whole_dim,
    "tril": lambda node, ins, outs: _keep_last_two(ins),
    "triu": lambda node, ins, outs: _keep_last_two(ins),
    "matmul": _matmul,
    "attention": _attention,
    "topk": _topk,
    "argmax": _extreme,
    "max": _extreme,
    "gather": _indexed,
    "scatter": _indexed,
    "experts": _experts,
    "repeat_interleave": _repeat_interleave,
    "arange": _factory,
    "full": _factory,
}


def _keep_last_two(ins: list[Shape]) -> OpRule:
    labels = _dims(ins[0])
    return _linear(labels, list(labels), {label for dim in labels[-2:] for label in dim})


# P only through these: what spmd_types, which checks the emitted program, also knows to be linear
_PASSING_OPS = (
    "add sub neg mul div mul_scalar div_scalar reshape transpose permute unsqueeze squeeze expand cat sum mean"
)
PASSES_PARTIAL = frozenset(_PASSING_OPS.split())

# arithmetic per point of the label space (product of all label sizes); everything else is 1 per output element
FLOPS_PER_POINT: dict[str, int] = {"linear": 2, "matmul": 2}


def rule_for(node: Node, values: Mapping[str, Value]) -> OpRule:
    """The bound rule of a node. RuleError names the op, the source line, and the line to write."""
    if node.op not in BUILDERS:
        raise RuleError(
            f"op {node.op!r} at {node.source or node.name} has no sharding rule; add one line to "
            f"autoplan.ops.table.LINES, e.g. {node.op!r}: '{UNARY}' if it is element-wise"
        )
    ins = [values[name].shape for name in node.tensor_inputs]
    outs = [values[name].shape for name in node.outputs]
    try:
        return BUILDERS[node.op](node, ins, outs)
    except RuleError as exc:
        raise RuleError(f"{node.op} at {node.source or node.name}: {exc}") from exc


def flops(node: Node, values: Mapping[str, Value], rule: OpRule) -> Expr:
    """Forward arithmetic of one node, whole (not sharded), in floating point operations."""
    ins = [values[name] for name in node.tensor_inputs]
    out = values[node.outputs[0]]
    if node.op == "attention":  # q k^T and p v, 2 flops per multiply-add; half under a causal mask
        q, k, v = ins[:3]
        points = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2] * (q.shape[3] + v.shape[3]) * 2
        return points.scale(_HALF) if node.attrs.get("causal") else points
    if node.op == "experts":  # every token through top_k experts of three (gate, up, down) or two products
        tokens, hidden = ins[0].shape
        products = 3 if node.attrs["gated"] else 2
        per_point = int(node.attrs["intermediate_size"]) * int(node.attrs["top_k"]) * 2 * products
        return tokens * hidden * per_point
    if node.op in FLOPS_PER_POINT:
        contracted = product(
            [s for s, dim in zip(ins[0].shape, rule.inputs[0], strict=True) if any(rule.contracted(x) for x in dim)]
        )
        return out.num_elements * contracted * FLOPS_PER_POINT[node.op]
    return out.num_elements


def window_share(node: Node, num_keys: float) -> float:
    """Of the arithmetic that `flops` gives causal attention, the part that a sliding window leaves.

    Query i sees keys i - window + 1 to i: of the half s^2 / 2 of all points, s w - w^2 / 2.
    """
    window = node.attrs.get("window")
    if window is None or window >= num_keys:
        return 1.0
    return 1.0 - (1.0 - float(window) / num_keys) ** 2


_HALF = Expr.of(1).terms[0][1] / 2
