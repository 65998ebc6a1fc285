"""Lower one ATen op to IR ops, by the records of the ops.

An op that no record names is refused with its source line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autoplan.errors import FormError
from autoplan.ops.arguments import Alias, IrResult, Lowering
from autoplan.ops.record import Trait
from autoplan.ops.table import ATEN, op_has

OPS: dict[str, Lowering] = dict(ATEN)

# Arguments that show in the shape, dtype or place of the result, and are read from there.
_SHOWN = frozenset(
    "size shape sizes chunks split_size split_sizes start_dim end_dim memory_format device layout pin_memory "
    "non_blocking copy implicit enable_gqa cudnn_enable".split()
)
_SHAPE_OF = {
    "aten.view_as.default": "other",
    "aten.squeeze.dims": "dim",
    **{f"aten.{f}_like.default": "self" for f in ("full", "ones", "zeros")},
}


class Arguments(dict[str, Any]):
    """ATen arguments by schema name. Remembers which were read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the argument as `dict.get` does, and remember that it was read."""
        self.read.add(name)
        return super().get(name, default)


def lower(target: str, a: Arguments, defaults: Mapping[str, Any]) -> IrResult:
    """Return the IR of one ATen operation.

    Args:
        a: the arguments of the operation.
        defaults: the defaults of its arguments, by the schema.

    Raises:
        FormError: for an argument that the op's record does not read and that is not at its default.
    """
    result = OPS[target](a)
    if isinstance(result, Alias):
        return result
    made = result if isinstance(result, list) else [result]
    takes_dtype = any(op_has(item.op, Trait.TAKES_DTYPE) for item in made)
    for name in sorted(set(a) - a.read - _SHOWN):
        value = dict.__getitem__(a, name)
        if value is None or value == defaults.get(name) or (name == "dtype" and takes_dtype):
            continue
        if name == _SHAPE_OF.get(target):
            continue
        raise FormError(f"{target.split('.')[1]} with {name}={value} is not supported")
    if any(isinstance(value, complex) for item in made for value in item.attrs.values()):
        raise FormError(f"{target.split('.')[1]} with a complex number is not supported; use a complex tensor")
    return result


SKIP = frozenset({"aten._assert_tensor_metadata.default", "aten.sym_size.int", "aten._assert_scalar.default"})
