"""Python files are followed statement by statement: what decides a value counts, what nobody can know is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from configurations import CLUSTER, graph_of

from autoplan.errors import PinError
from autoplan.exporters import python_file
from autoplan.exporters.door import ConfigFile, read_config
from autoplan.exporters.python_file import read_python
from autoplan.exporters.python_values import BY_FUNCTION


def body(text: str, head: str = "") -> dict[str, object]:
    """Return what a function with this body, which changes `c`, sets."""
    lines = "".join(f"    {line}\n" for line in text.splitlines())
    return read_python(f"{head}def f(c):\n{lines}", "recipes.py")


def test_a_function_that_is_imported_is_named_with_its_module() -> None:
    text = "from a.b import f_of_h100 as f\n"
    with pytest.raises(PinError, match=r"has no function 'f'; it imports f_of_h100 from a\.b; give the file of that"):
        read_python(text, "recipes.py:f")


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("def f(lr):\n    lr = 2 * lr\n    c.train.lr = lr", {"?train.lr": "2 * lr (line 2)"}),
        ("a = 2 * b\nb = a\ndef f():\n    c.train.lr = a", {"?train.lr": "2 * b (line 1)"}),
        (
            "def f(m):\n    m = wrap(inner=m)\n    c.model = m",
            {"model": "wrap", "?model": "wrap(inner=m) (line 2)", "?model.inner": "m (line 1)"},
        ),
        ("a = 3\nb = a + a\ndef f():\n    c.train.lr = a * b", {"train.lr": 18}),
    ],
)
def test_a_name_that_is_made_of_itself_is_not_known(text: str, found: dict[str, object]) -> None:
    assert read_python(text, "recipes.py") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("c.tp = 4\nif c.tp > 8:\n    c.tp = 16\nelse:\n    c.pp = c.tp // 2", {"tp": 4, "pp": 2}),
        ("big = False\nif big:\n    c.tp = 16", {}),
        ("n = 2\nn *= 3\nc.tp = n\nc.tp += 2\nc.tp -= 1", {"tp": 7}),
        ("for k in range(3):\n    c.tp = 2 ** k", {"tp": 4}),
        ("for name, n in (('tp', 2), ('pp', 4)):\n    setattr(c.model, name, n)", {"model.tp": 2, "model.pp": 4}),
        ("for s in [c.a, c.b]:\n    s.x = 1", {"a.x": 1, "b.x": 1}),
        ("n = 1\nwhile n < 9:\n    n *= 2\n    if n == 4:\n        break\nc.tp = n", {"tp": 4}),
        (
            "c.name = f'{3 * 2:02d}-{True}'\nc.sizes = [2 * k for k in range(4) if k]",
            {"name": "06-True", "sizes": [2, 4, 6]},
        ),
        (
            "d = {'tp': 2}\ne = d\ne['tp'] = 4\nd |= {'pp': 2}\nc.m.update(d)\nc.q = e['tp']",
            {"m.tp": 4, "m.pp": 2, "q": 4},
        ),
        ("table = {(8, 4): [['a'] * 2] + [['b']]}\nc.layout = table[(8, 4)]", {"layout": [["a", "a"], ["b"]]}),
        ("m = c.model\nm.tp = 8\nc.model.pp = m.tp // 4", {"model.tp": 8, "model.pp": 2}),
        ("c.tp = 8 if True else 4\nc.pp = min(2, 4) or 1\nc.cp = int('2')", {"tp": 8, "pp": 2, "cp": 2}),
        (
            "match 'b':\n    case 'a' | 'c':\n        c.a = 1\n    case 'b':\n        c.tp = 2\n    case _:\n        1",
            {"tp": 2},
        ),
        ("with open('x') as file:\n    c.tp = 2", {"tp": 2}),
        ("c.tp = 2\nreturn c\nc.tp = 4", {"tp": 2}),
        ("import os\nc.tp = int(os.environ.get('TP', 4))", {"tp": 4}),
        ("x = []\nx.append(2)\nx.extend([3])\nc.x = x\nc.n = len(x)", {"x": [2, 3], "n": 2}),
    ],
)
def test_what_a_file_decides_is_followed(text: str, found: dict[str, object]) -> None:
    assert body(text) == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("c.tp = 2\nif c.big:\n    c.tp = 8", {"?tp": "8 if c.big else 2 (line 3)"}),
        ("if big:\n    c.tp = 8\nelse:\n    c.tp = 8", {"tp": 8}),
        ("if big:\n    c.tp = 8", {"?tp": "8 if big (line 2)"}),
        ("if not big:\n    raise ValueError\nc.tp = 8", {"tp": 8}),
        ("c.tp = 4\nif big:\n    return c\nc.tp = 8\nreturn c", {"?tp": "4 if big else 8 (line 3)"}),
        (
            "for k in range(4):\n    if big(k):\n        break\n    c.tp = k",
            {"?tp": "set in the loop `for range(4)` (line 2)"},
        ),
        ("c.tp = 1\nfor k in sizes:\n    c.tp = c.tp * 2", {"?tp": "set in the loop `for sizes` (line 3)"}),
        ("n = 1\nwhile big(n):\n    n *= 2\nc.tp = n", {"?tp": "set in the loop `while big(n)` (line 3)"}),
        ("a = b = 1\nfor k in sizes:\n    a = b\n    b = 2\nc.tp = a", {"?tp": "set in the loop `for sizes` (line 3)"}),
        ("c.tp *= 2", {"?tp": "c.tp *= 2 (line 2)"}),
        ("try:\n    c.tp = 8\nexcept ImportError:\n    c.tp = 4", {"?tp": "8, or 4 after ImportError (line 4)"}),
        ("c.p = Parallel(tp=8 if big else 4, pp=2)", {"p": "Parallel", "?p.tp": "8 if big else 4 (line 2)", "p.pp": 2}),
        ("c.p = Parallel(tp=2, **more)", {"p": "Parallel", "?p": "more (line 2)", "p.tp": 2}),
        ("c.p = make(2)", {"p": "make(2)", "?p": "make(2) (line 2)"}),
        ("c.tp = sizes[0]", {"?tp": "sizes[0] (line 2)"}),
        ("c.tp = {2: 4}[k]", {"?tp": "{2: 4}[k] (line 2)"}),
        ("c.tp = [n for n in sizes][0]", {"?tp": "[n for n in sizes][0] (line 2)"}),
        ("c.tp = 2\nchange(c)", {"tp": 2, "?change(c)": BY_FUNCTION}),
        ("c.tp = 2\nc = change(c)", {"tp": 2, "?change(c)": BY_FUNCTION}),
        ("c.model.tp = 2\nsetattr(c.model, name, 4)", {"model.tp": 2, "?model": "setattr(c.model, name, 4) (line 3)"}),
        (
            "match kind:\n    case 'a':\n        c.tp = 1\n    case _:\n        c.tp = 2",
            {"?tp": "1 if kind in ('a',) else 2 (line 3)"},
        ),
        ("m = c.a or c.b\nm.tp = 2\nc.pp = 1\nreturn c", {"pp": 1, "?c.a or c.b (line 2)": BY_FUNCTION}),
        (
            "c.tp = 10 ** 10 ** 10\nc.pp = 'a' * 10 ** 9",
            {"?tp": "10 ** 10 ** 10 (line 2)", "?pp": "'a' * 10 ** 9 (line 3)"},
        ),
    ],
)
def test_what_nobody_can_know_is_named_with_its_line(text: str, found: dict[str, object]) -> None:
    assert body(text) == found


def test_functions_of_the_file_are_followed_with_their_arguments() -> None:
    head = "def _common(c, tp=1, *, pp):\n    c.model.tp = tp\n    c.model.pp = pp\n    return c.model.tp\n"
    assert body("n = _common(c, 4, pp=2)\nc.cp = n", head) == {"model.tp": 4, "model.pp": 2, "cp": 4}
    made = "def _base(tp):\n    if tp > 2:\n        return Config(tp=tp)\n    return Config(tp=1)\n"
    assert body("d = _base(4)\nd.pp = 2\nreturn d", made) == {"tp": 4, "pp": 2}
    assert body("d = _base(c.k)\nreturn d", made) == {"?tp": "c.k (line 6) if tp > 2 else 1 (line 2)"}
    loop = "def _again(c):\n    c.tp = 2\n    _again(c)\n"
    assert body("_again(c)", loop) == {"tp": 2, "?_again(c)": BY_FUNCTION}


def test_a_script_is_read_as_it_is_run() -> None:
    text = "cfg = recipe()\nTP = 4\nif __name__ == '__main__':\n    cfg.model.tp = TP\n    cfg.model.tp //= 2\n"
    assert read_python(text, "train.py") == {"model.tp": 2}
    assert read_python("t = Trainer(devices=8)\nt.fit(m)\n", "train.py", made=("Trainer",)) == {"devices": 8}


RECIPE = """
from torchtitan.trainer import Trainer

def config(large: bool) -> Trainer.Config:
    tp = 2
    {test}
        tp *= 4
    return Trainer.Config(
        training=TrainingConfig(num_tokens_per_microbatch_per_dp_rank=8192, max_context_length=4096),
        parallelism=ParallelismConfig(tensor_parallel_degree=tp),
    )
"""


def test_a_degree_that_a_branch_decides_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "config_registry.py"

    def read(test: str, **given: object) -> ConfigFile:
        path.write_text(RECIPE.replace("{test}", test))
        return read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER, given=given)

    assert read("if False:").says["tp"] == 2 and read("if tp == 2:").says["tp"] == 8
    with pytest.raises(
        PinError, match=r"does not decide parallelism\.tensor_parallel_degree=8 if large else 2 \(line 6\); give --tp$"
    ):
        read("if large:")
    assert read("if large:", tp=4).says["dp"] == 4
    text = RECIPE.replace("{test}", "if large:").replace("ParallelismConfig(tensor_parallel_degree=tp)", "degrees(tp)")
    path.write_text(text)
    with pytest.raises(PinError, match=r"tensor_parallel_degree=degrees\(tp\) \(line 10\); .*give .*--tp "):
        read_config(path, graph=graph_of("llama-3.1-8b"), cluster=CLUSTER)


def test_an_object_within_a_list_is_shown_by_its_expression() -> None:
    found = body("c.train.devices = 1 if d.cuda is None else [d.cuda]", "def g(d):\n    pass\n")
    assert "ConfigObject" not in str(found) and "d.cuda" in str(found["?train.devices"])


def test_loops_within_called_loops_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is followed several times: 4 to the power of 15 without a limit."""
    monkeypatch.setattr(python_file, "_STATEMENTS", 500)
    calls = "".join(f"def f{k}(c):\n    for x in given():\n        f{k + 1}(c)\n" for k in range(15))
    text = f"{calls}def f15(c):\n    c.train.lr = 1\ndef g(c):\n    c.train.seed = 3\n    f0(c)\n"
    assert read_python(text, "deep.py:g")["train.seed"] == 3
