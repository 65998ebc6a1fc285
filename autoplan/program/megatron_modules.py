"""Modules that Megatron's `--recompute-modules` recomputes as a whole, in programs of hand-written kernels.

They are priced in `Mode.FUSED`, not executed: the programs emitted here recompute regions (`program.regions`), which
hold no products and no collectives between ranks. A module is rerun as it is, with its products and collectives
(Megatron-LM, core/transformer/transformer_config.py, recompute_modules; transformer_layer.py, mlp.py, moe/moe_layer.py,
moe/experts.py, multi_latent_attention.py):

- core_attn      attention between its projections
- layernorm      norms before attention and before experts or the MLP, if they are kernels of their own. Transformer
                 Engine puts a norm in the product after it (LayerNormLinear) if one product alone reads it; then
                 nothing is recomputed. Latent attention and experts read it in several places
- mla_up_proj    latent attention from the compressed queries, keys and values to the core: products, rotary embedding
- mlp            the dense MLP, with a norm that is in its first product
- moe            a layer of experts: router, dispatch, experts, combine, shared experts
- shared_experts the shared experts alone
- moe_act        the activation function of the experts, between their products

The outputs of layernorm, mla_up_proj and moe_act are dropped and recomputed when the product that takes them needs them
(CheckpointWithoutOutput); that product then keeps no 8-bit copy of its own (set_save_original_input). The other modules
are checkpoints of their inputs: operations that keep their outputs still do so.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from autoplan.ops.record import Linear, OpKind, Trait
from autoplan.program.regions import CONVERSION, PRODUCTS, Flow, Region, is_view_or_cast, region_of

DISCARDING = frozenset(("layernorm", "mla_up_proj", "moe_act"))  # modules whose output is dropped as well


def modules(flow: Flow, outputs: Sequence[str]) -> dict[str, tuple[Region, ...]]:
    """Return the modules of a block, by name; an empty tuple if a module exists but has nothing to recompute.

    The statements of `moe_act` are the experts, of which only the activation function is rerun.

    Args:
        outputs: variables that the block hands out.
    """
    return _Modules(flow, outputs).found()


class _Modules:
    def __init__(self, flow: Flow, outputs: Sequence[str]) -> None:
        self.flow, self.outputs = flow, outputs
        self.variables, self.ops = flow.variables, flow.ops
        self.experts = [k for k, op in enumerate(self.ops) if op.kind is OpKind.EXPERTS]
        self.core = flow.attention_core()

    def found(self) -> dict[str, tuple[Region, ...]]:
        out: dict[str, tuple[Region, ...]] = {}
        if self.core:
            out["core_attn"] = (self._module("core_attn", self.core),)
        norms = self.flow.parts(self.flow.norms())
        up = self._up_projections()
        if norms and (self.core or self.experts):
            of_layer = [part for part in norms if self._from_residual(part)]
            out["layernorm"] = tuple(self._module("layernorm", part) for part in of_layer if not self._in_product(part))
        if up:
            out["mla_up_proj"] = (self._module("mla_up_proj", up),)
        mlp = self._mlp(norms)
        if self.experts:
            out["moe"] = (self._module("moe", self._from_norm(self.experts[0], norms)),)
            out["moe_act"] = tuple(Region("moe_act", (k,), (), ()) for k in self.experts)
            if mlp:
                out["shared_experts"] = (self._module("shared_experts", mlp),)
        elif mlp:
            out["mlp"] = (self._module("mlp", mlp),)
        return out

    def _module(self, name: str, chosen: Iterable[int]) -> Region:
        return region_of(name, set(chosen), self.flow, self.outputs)

    # -- norms ---------------------------------------------------------------------------------------------------------

    def _from_residual(self, part: Sequence[int]) -> bool:
        """Return True for a norm of the residual stream: no product made its input."""
        inside = set(part)
        before = [k for i in part for k in self.flow.before[i] if k not in inside]
        return not any(self.ops[k].kind in PRODUCTS for k in self._through_views(before, self.flow.before))

    def _in_product(self, part: Sequence[int]) -> bool:
        """Return True if Transformer Engine puts the norm in the product that reads it."""
        if self._feeds_latent(part):
            return False
        inside = set(part)
        readers = [k for i in part for k in self.flow.after[i] if k not in inside]
        return all(self.ops[k].kind is OpKind.PRODUCT for k in self._through_views(readers, self.flow.after))

    def _through_views(self, found: Iterable[int], way: Sequence[Sequence[int]]) -> list[int]:
        """Return `found` with every view and conversion replaced by the statements behind it."""
        out = []
        for k in found:
            out += self._through_views(way[k], way) if self._is_view(k) else [k]
        return out

    def _is_view(self, k: int) -> bool:
        return self.ops[k] is CONVERSION or is_view_or_cast(self.ops[k])

    def _views_before(self, found: Iterable[int]) -> set[int]:
        """Return the views and conversions that lead to these statements."""
        return self.flow.leading_to(found, self._is_view)

    def _feeds_latent(self, part: Sequence[int]) -> bool:
        up = self._up_projections()
        return bool(up) and bool(self.flow.leading_to(up) & set(part))

    # -- latent attention ----------------------------------------------------------------------------------------------

    def _nearest_products(self, start: Collection[int]) -> tuple[set[int], set[int]]:
        """Return the products before `start`, and the statements between."""
        between = self.flow.leading_to(start, lambda k: self.ops[k].kind not in PRODUCTS)
        products = {b for k in {*start, *between} for b in self.flow.before[k] if self.ops[b].kind in PRODUCTS}
        return products, between

    def _up_projections(self) -> set[int]:
        """Return the statements between the products that compress queries, keys and values, and the attention core.

        Empty without such products.
        """
        last, between = self._nearest_products(self.core)
        down = {k for k in last if any(k in self.flow.leading_to((other,)) for other in last - {k})}
        further: dict[int, tuple[set[int], set[int]]] = {k: self._nearest_products((k,)) for k in last - down}
        for found, inner in further.values():  # a compressed value is normed; the one of an adapter is not
            if any(self.ops[k].kind is OpKind.NORM or Trait.ROOT in self.ops[k].traits for k in inner):
                down |= found
        if not down:
            return set()
        out = (last | between) - down - self.core
        for products, inner in further.values():
            out |= inner if products else set()
        below = self.flow.following(down) | (last - down) | self.flow.following(last - down)
        return {k for k in out if k in below}  # excludes the tables of the rotary embedding

    # -- MLPs and experts ----------------------------------------------------------------------------------------------

    def _mlp(self, norms: Sequence[Sequence[int]]) -> set[int]:
        """Return the products around an activation function, with the statements between and beside them.

        Their conversions are included, and a norm that the first product contains.
        """
        pointwise = self.flow.activation_functions(megatron=True)
        if not pointwise:
            return set()
        first, between = self._nearest_products(pointwise)
        gathered = self._views_before(first)
        found = first | {k for k in between if k in self.flow.following(first)} | pointwise
        last = {k for p in pointwise for k in self.flow.after[p] if self.ops[k].kind in PRODUCTS}
        found |= last | {k for p in last for k in self.flow.after[p] if self.ops[k] is CONVERSION}
        if self.experts:
            return found  # the experts use the gather of the layer's input, too
        found |= gathered
        for part in norms:
            after = self.flow.following(part)
            if self._in_product(part) and after & first and not after & self.core:
                found |= set(part)
        return found

    def _from_norm(self, experts: int, norms: Sequence[Sequence[int]]) -> set[int]:
        """Return the statements from the norm before the experts to the point where their result joins the residual."""
        before = self.flow.leading_to((experts,))
        part = max((p for p in norms if before.intersection(p)), key=lambda p: p[-1])
        root = set(part)
        out: set[int] = set()
        for k in range(part[-1] + 1, len(self.ops)):
            feeds = [b for b in self.flow.before[k] if b in root or b in out]
            if not feeds:
                continue
            given = [v for v in self.variables[k][0] if not v.startswith("self.")]
            others = any(self.flow.makes.get(v, -1) not in root | out for v in given)
            if self.ops[k].linear is Linear.ALL and k > experts and others:
                break
            out.add(k)
        constants = {k for k in self.flow.leading_to(out) if not self.flow.before[k] and not self.variables[k][0]}
        return out | constants
