"""The attention function that Hugging Face models call during a capture.

Attention that the ops of `autoplan.ops.attention` can say is one of them. Any other is computed by plain ops: behind
'eager' by the function of the model's own file, behind 'sdpa' as `sdpa_attention_forward` of transformers does. Both
need the mask as a tensor, so the model is traced once more with it (`PendingMask.refuse`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from autoplan.capture.frontend import windows  # noqa: F401  registers the ops
from autoplan.capture.frontend.masks import Asked, Ledger, PendingMask, taken, untraced, values_unseen
from autoplan.errors import CaptureError

# Arguments of attention functions that change no number of 'eager'.
_NO_NUMBERS = frozenset(
    "position_ids cache_position use_cache output_attentions output_hidden_states output_router_logits return_dict "
    "cu_seq_lens_q cu_seq_lens_k max_length_q max_length_k deterministic labels logits_to_keep".split()
)
_READ = frozenset("scaling dropout is_causal position_bias sliding_window".split())
_SINKS = ("s_aux", "sinks")  # arguments that 'sdpa' of transformers ignores, and other kernels read

_Function = Callable[..., Any]


@dataclass(frozen=True)
class AttentionCall:
    """The attention function of one implementation.

    Attributes:
        implementation: 'eager' or 'sdpa'.
        ledger: which masks are tensors in this trace; gets the notes on what is ignored.
        kernels: id of a config -> its implementation, where that is a kernel that is captured as 'sdpa'.
        own: the function that the model computes 'eager' with; None: `eager_attention_forward` of its file.
    """

    implementation: str
    ledger: Ledger
    kernels: Mapping[int, str]
    own: _Function | None = None

    def __call__(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | PendingMask | None,
        *more: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Compute attention.

        The mask decides which keys a query sees. Without a mask `is_causal` decides, if the implementation uses it.
        """
        function = self._function(module)
        given = dict(zip(list(inspect.signature(function).parameters)[5:], more, strict=False)) | kwargs
        call = _Call(module, query, key, value, attention_mask, given)
        if self.implementation == "eager":
            special = call.special(function)
            if call.may_see_nothing and (special is None or special.sinks is None):
                self.ledger.notes.add(
                    f"{type(module).__name__}: attention 'eager' with a padding mask holds all scores and cannot be "
                    "cut over cp; attn_implementation='sdpa' gives the same, except where a query sees no token"
                )
            if special is None and call.is_plain_for_eager(function):
                found: tuple[torch.Tensor, Any] = _call_own(function, call)
                return found
            given["dropout"] = call.dropped
        else:
            special = None
            self._check_sdpa(call)
        return _sdpa(call, self.implementation == "sdpa", special), None

    def _function(self, module: nn.Module) -> _Function:
        """Return the function that the module computes its attention with.

        Raises:
            CaptureError: if there is none.
        """
        if self.implementation == "sdpa":
            from transformers.integrations import sdpa_attention

            transformers_own: _Function = sdpa_attention.sdpa_attention_forward
            return transformers_own
        name = type(module).__module__
        found: _Function | None = self.own or getattr(sys.modules.get(name), "eager_attention_forward", None)
        if found is None:
            raise CaptureError(
                f"{type(module).__name__}: attention 'eager' is the function of the model's own file, but {name} has "
                "no eager_attention_forward; use attn_implementation='sdpa'"
            )
        return found

    def _check_sdpa(self, call: _Call) -> None:
        """Note the arguments that `sdpa_attention_forward` ignores.

        Raises:
            CaptureError: for soft-capping, which it refuses, and for what the kernel of the config does not ignore.
        """
        name = type(call.module).__name__
        kernel = self.kernels.get(id(getattr(call.module, "config", None)))
        ignored = [n for n in _SINKS if call.given.get(n) is not None]
        if call.given.get("softcap") is not None or (ignored and kernel is not None):
            what = "soft-capping" if call.given.get("softcap") is not None else "sinks"
            raise CaptureError(
                f"{name}: attn_implementation={kernel or 'sdpa'!r} with {what} is not supported; use "
                "attn_implementation='eager'"
            )
        for argument in ignored:
            self.ledger.notes.add(
                f"{name}: attention 'sdpa' of transformers ignores {argument}, and so does the program"
            )


class _Special(NamedTuple):
    """What the kernels of torch have not: one more term in the softmax of every head, [h], and a cap of the scores."""

    sinks: torch.Tensor | None
    softcap: float | None


@dataclass(frozen=True)
class _Call:
    """The arguments of one call of an attention function; `given`: those after the mask, by name."""

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | PendingMask | None
    given: dict[str, Any]

    @property
    def bias(self) -> torch.Tensor | None:
        """The bias by position that is added to the scores; None if there is none, or if it changes nothing.

        One of zeros does where a query may see nothing. It is alike for all heads and tokens, so one number says it.
        """
        bias: torch.Tensor | None = self.given.get("position_bias")
        if bias is None or not _adds_zeros(self.module):
            return bias
        matters = self.may_see_nothing or isinstance(self.mask, torch.Tensor)
        return torch.zeros((), dtype=bias.dtype, device=bias.device) if matters else None

    @property
    def is_causal(self) -> bool:
        """Return True if attention without a mask is causal."""
        flag = self.given.get("is_causal")
        return bool(getattr(self.module, "is_causal", True) if flag is None else flag)

    @property
    def dropped(self) -> float:
        """Return the rate of the dropout of probabilities, as 'eager' reads it."""
        return float(self.given.get("dropout") or 0.0) if self.module.training else 0.0

    @property
    def may_see_nothing(self) -> bool:
        """Return True if padding may hide all keys from a query: the first ones of a causal model, or a whole sample.

        There 'eager' attends to all tokens alike, later ones too, because its mask is the least number. So does 'sdpa'
        with a bias by position, which has such a mask in it; by the same number, the kernels of torch have the values
        of 'eager' and other gradients. All other kernels give zero.
        """
        return isinstance(self.mask, PendingMask) and self.mask.asked.padded

    def special(self, function: _Function) -> _Special | None:
        """Return the sinks of the module and its cap, if `function` computes attention with them and nothing else.

        With sinks a query that sees no token gives zero, in 'eager' as in all kernels.
        """
        sinks: torch.Tensor | None = getattr(self.module, "sinks", None)
        softcap: float | None = self.given.get("softcap")
        given = {n for n in _SINKS if self.given.get(n) is not None and self.given[n] is sinks}
        if (sinks is None and softcap is None) or self.bias is not None:
            return None
        if self._unknown() - given - {"softcap"} or (self.may_see_nothing and sinks is None):
            return None
        if self.query.shape[2] != self.key.shape[2] or isinstance(self.mask, torch.Tensor):
            return None
        if sinks is not None and tuple(sinks.shape) != (self.query.shape[1],):
            return None
        sinks_by = None if sinks is None else tuple(sorted(given))
        same = is_standard(function, **self._has(), sinks=sinks_by, capped=softcap is not None)
        return _Special(sinks, softcap) if same else None

    def _has(self) -> dict[str, bool]:
        """Return the arguments of `is_standard` that the shapes, the mask and the mode of the module say."""
        grouped, masked = self.query.shape[1] != self.key.shape[1], self.mask is not None
        return {"grouped": grouped, "masked": masked, "dropped": self.dropped > 0}

    def _unknown(self) -> set[str]:
        """Return the arguments that change what is computed, and that no op of attention has."""
        return {n for n, x in self.given.items() if x is not None and x is not False} - _NO_NUMBERS - _READ

    def is_plain_for_eager(self, function: _Function) -> bool:
        """Return True if the ops of attention cannot say what `function` computes."""
        if self._unknown():
            return True
        if self.bias is not None and isinstance(self.mask, PendingMask) and self.mask.asked.local is not None:
            return True
        if isinstance(self.mask, torch.Tensor) or self.may_see_nothing:
            return True
        return not is_standard(function, **self._has(), biased=self.bias is not None)


def _call_own(function: _Function, call: _Call) -> Any:
    """Call the attention function of a model's file. It needs masks as tensors; a PendingMask ends the trace."""
    for value in (call.mask, *call.given.values()):
        if isinstance(value, PendingMask):
            value.refuse(function.__name__)
    return function(call.module, call.query, call.key, call.value, call.mask, **call.given)


@functools.cache
def is_standard(
    function: _Function,
    *,
    grouped: bool,
    masked: bool,
    biased: bool = False,
    sinks: tuple[str, ...] | None = None,
    capped: bool = False,
    dropped: bool = False,
) -> bool:
    """Return True if an attention function computes softmax(q k^T scale + bias + mask) v, and nothing more.

    It is run on small random tensors, with a module that has what this formula needs. So attention that reads sinks
    from its module, or does anything else, is found without its arguments naming it.

    Args:
        grouped: there are fewer key-value heads than heads.
        masked: it is given a mask, which it adds.
        biased: it is given `position_bias`.
        sinks: the softmax has one more term, the module's `sinks`; the arguments by which it is given them, too.
        capped: it is given a `softcap`.
        dropped: the module is trained with a `dropout`, which is that of the probabilities.
    """
    generator = torch.Generator().manual_seed(0)
    num_groups = 2 if grouped else 1
    module = types.SimpleNamespace(num_key_value_groups=num_groups, training=dropped, head_dim=6)
    rate = 0.5 if dropped else 0.0

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def same() -> bool:
        q, k, v = random(2, 4, 3, 6), random(2, 4 // num_groups, 5, 6), random(2, 4 // num_groups, 5, 6)
        mask = random(2, 1, 3, 5).masked_fill(torch.eye(3, 5).bool(), -1e9)
        bias = random(1, 4, 3, 5)
        added = (mask if masked else 0) + (bias if biased else torch.zeros(3, 5))
        keys, values = (x.repeat_interleave(num_groups, 1) for x in (k, v))
        more: dict[str, Any] = {"position_bias": bias} if biased else {}
        scores = q @ keys.transpose(2, 3) * 0.3
        if capped:
            more["softcap"] = 0.7
            scores = 0.7 * (scores / 0.7).tanh()
        scores = scores + added
        if sinks is not None:
            module.sinks = random(4)
            more |= dict.fromkeys(sinks, module.sinks)
            scores = torch.cat((scores, module.sinks[:, None, None].expand(2, 4, 3, 1)), -1)
        factors = torch.rand((2, 4, 3, 5), generator=generator) if dropped else torch.ones(())
        want = ((scores.softmax(-1)[..., :5] * factors) @ values).transpose(1, 2)
        with _Multiplying(rate, factors) if dropped else contextlib.nullcontext():
            got = function(module, q, k, v, mask if masked else None, scaling=0.3, dropout=rate, **more)[0]
        return isinstance(got, torch.Tensor) and got.shape == want.shape and torch.allclose(got, want, atol=1e-5)

    try:
        return untraced(same)
    except Exception:  # it needs more than that
        return False


class _Multiplying(TorchFunctionMode):
    """A mode in which dropout at a rate multiplies with these factors, which must have the shape of its input."""

    def __init__(self, rate: float, factors: torch.Tensor) -> None:
        super().__init__()
        self.rate, self.factors = rate, factors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not F.dropout:
            return func(*args, **kwargs or {})
        given = inspect.signature(F.dropout).bind(*args, **kwargs or {})
        given.apply_defaults()
        x, p, training, _ = given.args
        if p != self.rate or not training or x.shape != self.factors.shape:
            raise ValueError(f"another dropout than of {self.rate}")
        return x * self.factors


def _sdpa(call: _Call, decides: bool, special: _Special | None = None) -> torch.Tensor:
    """Compute attention by ops of attention, as `sdpa_attention_forward` of transformers does.

    Args:
        decides: attention without a mask goes by `is_causal`.
        special: sinks and capped scores.
    """
    q, k, v, mask = call.query, call.key, call.value, call.mask
    bias, scaling, dropout = call.bias, call.given.get("scaling"), call.given.get("dropout") or 0.0
    causal, documents, local, padded = call.is_causal and decides and mask is None, None, None, False
    if isinstance(mask, PendingMask):
        asked, documents = taken(mask, q, k)
        _check(call, asked)
        _check_beside(mask, documents, bias)
        mask, causal, local, padded = None, asked.causal, asked.local, asked.padded
    sinks, softcap = (None, None) if special is None else special
    if documents is not None and (bias is not None or q.shape[2] != k.shape[2]):  # the valid tokens
        mask, documents = (documents > 0)[:, None, None, :], None
    if bias is not None:
        if mask is None:
            biased: torch.Tensor = torch.ops.autoplan.biased_attention(q, k, v, bias, causal, scaling, dropout)
            return biased.transpose(1, 2).contiguous()
        mask, causal = _with_bias(bias, mask, causal, (q.shape[2], k.shape[2])), False
    if documents is not None or local is not None or special is not None:
        v = values_unseen(v, documents if padded else None)
        how = documents, sinks, None, causal, scaling, *(local or (None, None, None)), softcap, dropout
        masked: torch.Tensor = torch.ops.autoplan.masked_attention(q, k, v, *how)
        return masked.transpose(1, 2).contiguous()
    out = F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=causal,
        scale=scaling,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out.transpose(1, 2).contiguous()


def _check_beside(mask: PendingMask, documents: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    """End the trace where no op of attention has both this mask and what stands beside it."""
    windowed = mask.asked.local is not None
    if mask.asked.window == 0:  # no token sees any
        mask.refuse("a window of 0")
    packed = documents is not None and not mask.asked.padded
    if bias is not None and (windowed or packed):
        mask.refuse("a bias by position")


def _with_bias(bias: torch.Tensor, mask: torch.Tensor | None, causal: bool, lengths: tuple[Any, Any]) -> torch.Tensor:
    """Return bias and mask as one, as `create_position_bias_mask` of transformers does: hidden tokens have the least
    number instead of a bias. `causal` is a part of the mask that is not in `mask`."""
    if causal:
        rows, columns = (torch.arange(n, device=bias.device) for n in lengths)
        mask = rows[:, None] >= columns if mask is None else mask & (rows[:, None] >= columns)
    if mask is None:
        return bias
    if mask.dtype != torch.bool:
        return bias + mask
    return torch.where(mask, bias, torch.full((), torch.finfo(bias.dtype).min, dtype=bias.dtype))


def _check(call: _Call, asked: Asked) -> None:
    """Raise CaptureError where the arguments of attention contradict its mask."""
    name, window = type(call.module).__name__, call.given.get("sliding_window")
    if asked.replaced and not call.is_causal:
        raise CaptureError(
            f"{name} is given a causal mask but its is_causal is False: with its attention, 'sdpa', transformers makes "
            "it causal or not by whether there is padding; set is_causal to True, or use attn_implementation='eager'"
        )
    if window is not None and window != asked.window and asked.ahead is None:
        raise CaptureError(
            f"{name} has a sliding window of {window} but its mask has one of {asked.window}: kernels of transformers "
            "differ in which of the two they use"
        )


def _adds_zeros(module: nn.Module) -> bool:
    """Return True for cross-attention as in T5, where the position bias it is given is all zeros."""
    learned = getattr(module, "has_relative_attention_bias", True)
    return not learned and bool(getattr(module, "is_decoder", False)) and getattr(module, "is_causal", True) is False
