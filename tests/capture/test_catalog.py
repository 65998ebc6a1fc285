"""Models by name: shipped graphs are whole, right, current and torch-free; configs and factories are captured."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from autoplan import catalog
from autoplan.cost_models.costs import Costs
from autoplan.cost_models.hardware.cluster import Cluster
from autoplan.errors import AutoplanError, CaptureError, GraphError
from autoplan.ir.graph import ModelGraph
from autoplan.ir.layout import Axis
from autoplan.program.facts import Facts
from autoplan.program.problem import IntraSettings, build_problem
from autoplan.search.intra import solve

OBLIGATORY = (
    "llama-3.1-8b llama-3.1-70b llama-3.1-405b gpt3-175b mixtral-8x7b mixtral-8x22b qwen3-235b-a22b deepseek-v3 "
    "qwen3-30b-a3b llama-2-70b gpt2"
).split()
CONFIGS = catalog.configs()
SMALL = ("gpt2", "llama-3.2-1b", "deepseek-v3")  # by what they take to capture; the last one with experts


def file_of(name: str) -> bytes:
    return (resources.files("autoplan.profiles") / "models" / f"{name}.json.gz").read_bytes()


def test_every_config_has_a_graph() -> None:
    assert set(catalog.names()) == set(CONFIGS) >= set(OBLIGATORY)
    assert list(catalog.names()) == sorted(catalog.names())
    assert all(c["source"].startswith(("https://", "arXiv ")) for c in CONFIGS.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_shipped_graphs_are_whole_and_have_the_published_size(name: str) -> None:
    stored = catalog.read_file(file_of(name), name)
    graph = ModelGraph.from_json(stored["graph"])  # checks the graph
    assert graph.name == name and graph.content_hash == stored["content_hash"]
    config, about = CONFIGS[name], catalog.describe_model(name)
    assert about.source == stored["source"] == config["source"]
    assert about.num_params == pytest.approx(config["published_params"], rel=5e-3)
    active = config.get("published_active_params")
    assert (active is not None) == (about.num_experts > 0)
    if active is not None:  # published in billions
        assert about.num_active_params == pytest.approx(active, rel=0.02)
    assert {p.dtype for p in graph.params.values()} == {"bfloat16"}
    assert graph.loss_count == "tokens"


@pytest.mark.parametrize("name", CONFIGS)
def test_descriptions_are_those_of_the_config(name: str) -> None:
    config, about = CONFIGS[name]["config"], catalog.describe_model(name)

    def field(*names: str) -> Any:
        return next((config[n] for n in names if n in config), 0)

    both = field("num_layers", "encoder_layers") + field("num_decoder_layers", "decoder_layers")
    assert about.num_layers == field("num_hidden_layers", "n_layer") or both
    assert about.hidden_size == field("hidden_size", "n_embd", "d_model")
    heads = field("num_attention_heads", "n_head", "num_heads", "encoder_attention_heads")
    one = config.get("multi_query") and not config["new_decoder_architecture"]
    kv = 1 if one else field("num_key_value_heads", "num_kv_heads") or heads
    assert (about.num_heads, about.num_kv_heads) == (heads, kv)
    assert about.vocab_size == field("vocab_size")
    assert about.num_experts == field("num_local_experts", "num_experts", "n_routed_experts")
    assert about.num_experts_per_token == field("num_experts_per_tok")


# transformers makes tables of positions in the order of a set of names
IN_ANY_ORDER = ("gemma-3-12b", "gemma-3-1b", "gemma-3-27b", "gemma-3-4b")


def plain(graph: ModelGraph) -> ModelGraph:
    """Without the lines of transformers' files, which move with every release of it."""
    blocks = {
        name: replace(b, nodes=tuple(replace(n, source="", attrs=dict(n.attrs)) for n in b.nodes))
        for name, b in graph.blocks.items()
    }
    return replace(graph, blocks=blocks)


def _one_of_each_family() -> Iterator[Any]:
    """The first model of every class of transformers in make test-all, the others of it in make exhaustive."""
    seen = {CONFIGS[name]["config"]["model_type"] for name in SMALL}
    for name, about in CONFIGS.items():
        kind = about["config"]["model_type"]
        marks = () if name in SMALL else pytest.mark.exhaustive if kind in seen else pytest.mark.slow
        seen.add(kind)
        yield pytest.param(name, marks=marks)


@pytest.mark.parametrize("name", list(_one_of_each_family()))
def test_shipped_graphs_are_what_capture_gives_now(name: str) -> None:
    shipped, now = plain(catalog.load_model(name)), plain(catalog.capture_catalog_model(name))
    if name in IN_ANY_ORDER:
        code = f"from autoplan import catalog; print(catalog.capture_catalog_model({name!r}).to_json())"
        environment = {**os.environ, "PYTHONHASHSEED": catalog._HASH_SEED}
        done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert now.num_params == shipped.num_params and len(now.calls) == len(shipped.calls)
        now = plain(ModelGraph.from_json(done.stdout))
    assert shipped == now, f"{name} has drifted; run python -m autoplan.catalog {name}"


def test_the_generator_writes_what_is_shipped(tmp_path: Path) -> None:
    path = catalog._write("gpt2", tmp_path)
    assert path.name == "gpt2.json.gz" and [p.name for p in tmp_path.iterdir()] == ["gpt2.json.gz"]
    made, shipped = (catalog.read_file(data, "gpt2") for data in (path.read_bytes(), file_of("gpt2")))
    assert plain(ModelGraph.from_json(made["graph"])) == plain(ModelGraph.from_json(shipped["graph"]))


def test_a_shipped_model_loads_no_torch() -> None:
    code = (
        "import sys\n"
        "from autoplan import catalog\n"
        "graph = catalog.load_model('llama-3.1-405b')\n"
        "catalog.describe_model('mixtral-8x7b')\n"
        "assert graph.num_params == 405853388800\n"
        "print(sorted({'torch', 'transformers', 'numpy', 'pandas', 'networkx', 'pulp'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr


def test_damaged_files_are_named() -> None:
    data = json.loads(gzip.decompress(file_of("gpt2")))
    changed = gzip.compress(json.dumps({**data, "graph": data["graph"].replace("768", "769")}).encode())
    with pytest.raises(GraphError, match="graph of gpt2 does not have the hash"):
        catalog.read_file(changed, "gpt2")
    for broken in (b"", b"{}", file_of("gpt2")[:100], gzip.compress(b"{}"), gzip.compress(b"[1]")):
        with pytest.raises(GraphError, match="graph of gpt2 cannot be read"):
            catalog.read_file(broken, "gpt2")


@pytest.mark.parametrize(("name", "degree"), [("gpt3-175b", 8), ("mixtral-8x7b", 8), ("deepseek-v3", 8), ("phi-4", 2)])
def test_layouts_are_found(name: str, degree: int) -> None:
    """Attention and experts are split, on the graph as it is shipped."""
    graph = catalog.load_model(name)
    settings = IntraSettings((Axis("tp", degree),), Costs(Cluster.local(degree, "cuda")), {"b": 1, "s": 2048})
    solution = solve(build_problem(graph, settings))
    assert solution.status == "optimal"
    found = {}
    for block in graph.blocks.values():
        for node in block.nodes:
            found.setdefault(node.op, set()).add(solution.selection[f"{block.name}/{node.name}"].name)
    assert all(option.startswith("S(kv") for option in found["attention"])
    assert all(option == "S(experts)" for option in found.get("experts", ()))


@pytest.mark.slow
@pytest.mark.parametrize("degree", [pytest.param(1, marks=pytest.mark.exhaustive), 2, 8])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_model_has_a_layout(name: str, degree: int) -> None:
    about, graph = catalog.describe_model(name), catalog.load_model(name)
    if about.num_heads % degree:
        pytest.skip(f"{about.num_heads} heads")
    major = degree if about.num_kv_heads % degree == 0 else about.num_kv_heads % degree or 1
    sizes = [n for n in (major, degree // major) if n > 1]
    axes = tuple(Axis(f"tp{i}", n) for i, n in enumerate(sizes))
    settings = IntraSettings(axes, Costs(Cluster.local(8, "cuda")), {"b": 1, "s": 2048, "t": 2048})
    assert solve(build_problem(graph, settings)).status == "optimal"


# -- what is not shipped -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("meta-llama/Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B", "llama-3.1-8b"),
        ("Llama-2-7b-chat-hf", "llama-2-7b"),
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("mistralai/Mistral-7B-v0.3", "mistral-7b"),
        ("Qwen/Qwen3-235B-A22B-Instruct-2507", "qwen3-235b-a22b"),
        ("QWEN3_8B", "qwen3-8b"),
        ("gpt2", "gpt2"),
        ("llama-3.1-405", "llama-3.1-405b"),
        ("llama3-8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama-3.1-70b"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-v3"),
        ("Qwen2.5-Coder-7B", "qwen2.5-7b"),
        ("gpt3", "gpt3-175b"),
        ("qwen3:8b", "qwen3-8b"),
        ("llama3.1:70b", "llama-3.1-70b"),
        ("llama3:8b", "llama-3.1-8b"),
        ("gpt-oss:120b", "gpt-oss-120b"),
        ("gemma3:27b-it-qat", "gemma-3-27b"),
        ("llama3.1:8b-instruct-q4_K_M", "llama-3.1-8b"),
        ("hf.co/bartowski/Llama-3.2-3B-Instruct-GGUF:Q4_K_M", "llama-3.2-3b"),
        ("unsloth/Qwen3-8B-bnb-4bit", "qwen3-8b"),
        ("phi3:mini", "phi-3-mini"),
        ("phi3:14b", "phi-3-medium"),
        ("phi4:latest", "phi-4"),
        ("deepseek-r1:671b", "deepseek-v3"),
        ("deepseek-r1:32b", "qwen2.5-32b"),
        ("kimi-k2:1t", "kimi-k2"),
        ("smollm2:135m", "smollm2-135m"),
    ],
)
def test_names_as_people_write_them(text: str, name: str) -> None:
    assert catalog.shipped_name(text) == name
    assert catalog.load_model(text).name == catalog.describe_model(text).name == name


def test_names_that_fit_several_models_or_another_one() -> None:
    several = "model 'Llama-3.1' may be llama-3.1-405b, llama-3.1-70b or llama-3.1-8b; write one of them"
    with pytest.raises(AutoplanError, match=several):
        catalog.load_model("Llama-3.1")
    with pytest.raises(AutoplanError, match=r"'deepseek-r1:8b' may be llama-3\.1-8b, qwen2\.5-7b or qwen3-8b"):
        catalog.load_model("deepseek-r1:8b")
    for other in (
        "mistralai/Mistral-7B-v0.1",
        "Qwen2.5-VL-7B",
        "t5-base",
        "llama-3.1-4",
        "-it",
        "",
        "/",
        "llama3:18b",
        "qwen3:9b",
        ":8b",
    ):  # other shapes
        with pytest.raises(AutoplanError, match="unknown model"):
            catalog.shipped_name(other)


def test_unknown_names() -> None:
    with pytest.raises(AutoplanError, match=r"unknown model 'lama-3\.1-8b'; did you mean llama-3\.1-8b"):
        catalog.load_model("lama-3.1-8b")
    with pytest.raises(AutoplanError, match=r"unknown model 'qwen3:turbo'; did you mean qwen3-8b"):
        catalog.load_model("qwen3:turbo")
    with pytest.raises(AutoplanError, match=r"gpt9:make: cannot import 'gpt9'"):
        catalog.load_model("gpt9:make")
    with pytest.raises(AutoplanError, match=r"config\.json, or package\.module:factory"):
        catalog.describe_model("xyz")
    with pytest.raises(AutoplanError, match="no config named 'xyz'"):
        catalog.capture_catalog_model("xyz")


LLAMA = dict(
    model_type="llama", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip


def test_a_hugging_face_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    graph = catalog.load_model(str(path))
    assert graph.num_params == 2 * 96 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 48 + 2 * 32) + 32
    assert {p.dtype for p in graph.params.values()} == {"bfloat16"}
    assert catalog.load_model(str(tmp_path)) == graph  # its folder
    assert len(list((tmp_path / "cache" / "graphs").glob("*.json"))) == 1
    about = catalog.description(graph)
    assert (about.num_layers, about.num_heads, about.num_kv_heads, about.num_experts) == (2, 4, 2, 0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        ("{", "not JSON"),
        ("[1]", "holds a value of type list"),
        ("{}", "model_type None is not an architecture"),
        (json.dumps({**LLAMA, "model_type": "vit"}), "cannot build a causal language model"),
        (json.dumps({**LLAMA, "num_attention_heads": "many"}), "config.json: transformers cannot read it"),
    ],
)
def test_configs_that_do_not_work(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "config.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(CaptureError, match=message):
        catalog.load_model(str(path))


@pytest.mark.parametrize("name", ["gpt", "llama", "needs_values"])
def test_factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("AUTOPLAN_CACHE", str(tmp_path))
    graph = catalog.load_model(f"catalog_models:{name}")
    assert catalog.description(graph).num_layers == 4
    assert {p.dtype for p in graph.params.values()} == {"float32"}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("catalog_models:missing", "has no 'missing'"),
        ("no_such_package.models:make", "cannot import 'no_such_package.models'"),
        ("catalog_models:not_a_function", "is of type int, not a function"),
        ("catalog_models:without_inputs", r"return \(model, example_inputs\)"),
        ("catalog_models:fails", "the factory failed with OSError: no checkpoint here"),
        ("catalog_models:number", "returned something of type int"),
        ("catalog_models:list_of_inputs", "list_of_inputs: example_inputs is of type list; it must map names"),
        ("catalog_models:unsupported", r"catalog_models\.py:\d+: aten\.poisson\.default cannot be captured: it draws"),
    ],
)
def test_factories_that_do_not_work(name: str, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        catalog.load_model(name)


def test_a_model_knows_the_positions_of_its_config() -> None:
    """They are told where sequences are longer, and are no part of what identifies a graph."""
    graph = catalog.load_model("llama-2-7b")
    assert graph.positions == 4096 and "positions" not in graph.to_json()
    assert replace(graph, positions=None) == graph and replace(graph, positions=None).content_hash == graph.content_hash
    assert catalog.load_model("gpt2").positions is None  # learned: longer sequences are refused
    for length, told in ((4096, False), (8192, True)):
        notes = Facts.of(graph, Cluster.parse("8xh100"), 64, length).notes
        assert any(f"4,096 positions, and sequences have {length:,} tokens" in note for note in notes) is told


@pytest.mark.parametrize("name", [name for name, config in CONFIGS.items() if "usual" in config])
def test_a_usual_run_is_within_the_positions(name: str) -> None:
    usual, most = catalog.usual_run(name), CONFIGS[name]["config"].get("max_position_embeddings")
    assert usual is not None and (most is None or usual.seq_len <= most)
