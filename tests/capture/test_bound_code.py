"""The key of a stored capture sees what is bound to the names that a forward reaches."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import masking_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma import modeling_gemma
from transformers.models.llama import modeling_llama
from transformers.utils import output_capturing

import autoplan
from autoplan.capture.export import capture
from autoplan.capture.frontend.bound_code import bound_code, code_digest, package_root
from autoplan.capture.frontend.cache import cached, capture_key
from tests import models

BATCH = models.token_batch(2, 16)
MODEL = models.make_llama(num_hidden_layers=1)
_LLAMA = modeling_llama.LlamaMLP


def key() -> str | None:
    return capture_key(MODEL, BATCH)


def mine(self: Any, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = self.down_proj(self.up_proj(x))
    return out


def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of the user that says that it is of transformers."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return call


def test_a_loss_function_of_the_user_has_no_key() -> None:
    """It may be defined beside names such as FunctionType, a class whose __globals__ is no mapping."""
    assert package_root(FunctionType) == "builtins"
    model = models.make_llama(num_hidden_layers=1)
    model.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert capture_key(model, BATCH) is None


# what a process may put where: the user's own functions, which nothing identifies
@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (_LLAMA, "forward", mine),
        (_LLAMA, "forward", wrapped(_LLAMA.forward)),
        (_LLAMA, "forward", functools.partialmethod(mine)),
        (_LLAMA, "__call__", mine),
        (nn.Linear, "forward", lambda self, x: x @ self.weight.T),
        (modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k)),
        (modeling_llama, "rotate_half", lambda x: x),
        (modeling_llama, "create_causal_mask", lambda *args, **kwargs: None),
        (masking_utils, "sdpa_mask", lambda *args, **kwargs: None),
        (torch.Tensor, "view", lambda self, *shape: self.reshape(*shape)),
        (F, "silu", lambda x, inplace=False: x),
        (transformers.PreTrainedModel, "loss_function", property(lambda self: models.gpt_loss)),
        (transformers.DynamicCache, "update", mine),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)  # fmt: skip
def test_a_model_with_a_function_of_the_user_is_captured_every_time(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    with monkeypatch.context() as patched:
        patched.setattr(where, name, value)
        assert before is not None and key() is None
    assert key() == before


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        (_LLAMA, "forward", modeling_gemma.GemmaMLP.forward),
        (modeling_llama.LlamaRMSNorm, "forward", modeling_gemma.GemmaRMSNorm.forward),
        (modeling_llama.LlamaRMSNorm, "forward", F.relu),
        (modeling_llama, "rotate_half", modeling_llama.repeat_kv),
        (masking_utils, "_is_torch_xpu_available", True),
    ],
    ids=lambda x: getattr(x, "__name__", type(x).__name__),
)
def test_another_function_or_value_of_a_package_is_another_key(
    where: Any, name: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    monkeypatch.setattr(where, name, value)
    assert None not in (before, key()) and key() != before


def test_code_that_was_edited_under_one_version_is_another_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that was installed from a folder, or a function whose code was replaced."""
    before = key()
    function = modeling_llama.rotate_half
    consts = tuple(3 if c == 2 else c for c in function.__code__.co_consts)
    assert consts != function.__code__.co_consts
    monkeypatch.setattr(function, "__code__", function.__code__.replace(co_consts=consts))
    assert None not in (before, key()) and key() != before


def test_an_attention_function_that_was_registered_is_seen() -> None:
    before = key()
    ALL_ATTENTION_FUNCTIONS["mine"] = mine
    try:
        assert before is not None and key() is None
    finally:
        del ALL_ATTENTION_FUNCTIONS["mine"]
    assert key() == before


def test_a_hook_on_all_modules_is_seen() -> None:
    before = key()
    handle = nn.modules.module.register_module_forward_hook(lambda module, given, out: out)
    assert before is not None and key() is None
    handle.remove()
    assert key() == before


def test_the_graph_of_a_patched_class_is_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def graph() -> Any:
        return cached(MODEL, BATCH, lambda: capture(MODEL, BATCH), tmp_path)

    def ops(graph: Any) -> list[str]:
        return [node.op for block in graph.blocks.values() for node in block.nodes]

    first = graph()
    monkeypatch.setattr(_LLAMA, "forward", mine)
    patched = graph()
    assert any("silu" in op for op in ops(first)) and not any("silu" in op for op in ops(patched))


def test_a_model_of_another_class_changes_no_key() -> None:
    """transformers keeps what each class can record, from when a model of it is first made."""
    before = key()
    cls = type("Another", (transformers.LlamaForCausalLM,), {})
    text = str(cls)
    cls(MODEL.config)
    assert text in output_capturing._CAN_RECORD_REGISTRY
    assert before is not None and key() == before


def test_no_address_and_no_order_of_a_process_is_in_a_key() -> None:
    root = Path(autoplan.__file__).parents[1]
    text = f"from tests.capture.{Path(__file__).stem} import key; print(key())"
    seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    other = subprocess.run(
        [sys.executable, "-c", text],
        cwd=root,
        env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == key()


def test_code_that_has_run_is_the_same_code() -> None:
    """Python specialises the bytecode of what runs often."""

    def add(values: list[int]) -> int:
        return sum(v + 1 for v in values if v in {1, 2, 3})

    before = code_digest(add.__code__)
    for _ in range(200):
        add([1, 2, 3])
    assert code_digest(add.__code__) == before != code_digest(mine.__code__)


def test_the_walk_is_of_classes() -> None:
    """Its length is of the classes, however many layers have them."""
    few, many = (models.make_llama(num_hidden_layers=n) for n in (1, 6))
    classes = [{type(m) for m in model.modules()} for model in (few, many)]
    assert classes[0] == classes[1] and bound_code(classes[0]) == bound_code(reversed(list(classes[1])))
