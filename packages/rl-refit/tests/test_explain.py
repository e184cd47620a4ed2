"""What `explain` says of a plan, from a checkpoint's headers or a saved manifest; and what it refuses."""

from __future__ import annotations

import json
import math

import pytest
from refit_explainer.checkpoint import read_checkpoint
from refit_explainer.command import busiest_link
from refit_explainer.layouts import manifest_of_side, parse_axes
from refit_tools import main

from rl_refit.explain import describe_layout, explain_plan, human_size
from rl_refit.layout import Layout, Region
from rl_refit.manifest import Manifest, TensorMeta
from rl_refit.plan import Topology, plan_refit


def meta(name, shape, layout, **changes):
    return TensorMeta(**{"name": name, "shape": shape, "dtype": "bfloat16", "layout": layout, **changes})


def small_plan():
    """Two trainers on one node, four engines on another: a matrix cut over both, a vector and its tie everywhere."""
    halves, four = Layout.from_placements((2,), (0,)), Layout.from_placements((2, 2), (None, 1))
    whole = Layout.from_placements((4,), (None,))
    source = Manifest((meta("layers.0.w", (4, 6), halves), meta("layers.1.w", (4, 6), halves), meta("v", (8,), halves)))
    sink = Manifest(
        (
            meta("layers.0.w", (4, 6), four),
            meta("layers.1.w", (4, 6), four),
            meta("v", (8,), whole),
            meta("head", (8,), whole, tied_to="v"),
            meta("cos", (3,), whole, feeding="derived"),
            meta("one", (1,), whole, feeding="constant"),
        )
    )
    return plan_refit(source, sink, Topology(source_nodes=("a", "a"), sink_nodes=("b",) * 4))


def test_explain_shows_every_tensor_once_and_the_ranks_beside_their_bound():
    assert small_plan().explain().splitlines() == [
        "3 tensors fed, 1 tied, 1 derived, 1 constant, 0 unmatched",
        "112 B from 2 ranks to 4: 10 routes in 10 buckets of at most 4 MiB",
        "",
        "        tensor      shape             dtype     source → sink",
        "     2  layers.*.w  [4, 6]            bfloat16  dim 0 / 2 → dim 1 / 2, 2 copies",
        "     1  v           [8]               bfloat16  dim 0 / 2 → whole, 4 copies",
        "     1  head        [8]               bfloat16  tied to v",
        "     1  cos         [3]               bfloat16  derived",
        "     1  one         [1]               bfloat16  constant",
        "",
        "bytes                                least    median      most    in all  busiest",
        "a sink rank receives                  64 B      64 B      64 B     256 B  rank 0",
        "  its lower bound                     64 B      64 B      64 B     256 B  rank 0",
        "a source rank sends                   56 B      56 B      56 B     112 B  rank 0",
        "a sink rank relays                    24 B      36 B      48 B     144 B  rank 0",
        "enter a node of the sink             112 B     112 B     112 B     112 B  b",
        "  if each rank pulled its own        256 B     256 B     256 B     256 B  b",
        "no rank receives more than its bound; the busiest source sends 1.00 × the mean",
        "",
        "extra memory: 2 slots of 4 MiB on every rank; a staged sink holds its new weights too, 64 B at most",
    ]


def test_explain_is_given_the_size_of_a_bucket():
    assert "in 10 buckets of at most 0.5 KiB" in explain_plan(small_plan(), bucket_bytes=512)
    with pytest.raises(ValueError, match="got bucket_bytes=100"):
        explain_plan(small_plan(), bucket_bytes=100)


def test_a_plan_of_nothing_is_explained_too():
    empty = plan_refit(Manifest(()), Manifest(()))
    assert "0 B from 0 ranks to 0: 0 routes in 0 buckets" in empty.explain()


def test_many_patterns_and_long_names_stay_on_one_screen():
    metas = tuple(meta(f"{'block.' * 30}kind_{i}.{j}", (2,), Layout.whole()) for i in range(60) for j in range(3))
    lines = explain_plan(plan_refit(Manifest(metas), Manifest(metas))).splitlines()
    assert len(lines) < 40
    assert max(map(len, lines)) < 140
    assert "   120  … in 40 more patterns" in lines


def test_the_busiest_link_by_hand():
    """Each half of all (56 bytes) leaves one trainer once for the node, where without relays it would leave it for each
    of two or four engines; an engine takes 64 bytes, some from a relay."""
    assert busiest_link(small_plan(), relays=True) == 56
    assert busiest_link(small_plan(), relays=False) == 128
    without = plan_refit(small_plan().source, small_plan().sink)
    assert busiest_link(without, relays=True) == busiest_link(without, relays=False) == 128


def test_what_stays_on_its_node_crosses_no_link():
    one_node = Topology(source_nodes=("a", "a"), sink_nodes=("a",) * 4)
    plan = plan_refit(small_plan().source, small_plan().sink, one_node)
    assert busiest_link(plan, relays=True) == busiest_link(plan, relays=False) == 0
    assert "enter a node of the sink               0 B" in plan.explain()


def test_layouts_in_words():
    assert describe_layout(Layout.whole(), 2) == "whole"
    assert describe_layout(Layout.from_placements((2, 4), (0, 0)), 2) == "dim 0 / 8"
    assert describe_layout(Layout.from_placements((2, 4, 3), (1, 0, None)), 2) == "dim 0 / 4, dim 1 / 2, 3 copies"
    assert describe_layout(Layout.from_boxes({0: [Region("", (0,), (1,))], 3: []}), 1) == "boxes of 2 ranks"


def test_boxes_of_fused_storage_are_counted():
    fused = Layout.from_boxes({0: [Region("", (0,), (2,)), Region("", (4,), (2,))], 1: [Region("", (2,), (2,))]})
    plan = plan_refit(Manifest((meta("w", (6,), Layout.whole()),)), Manifest((meta("w", (6,), fused),)))
    assert plan.explain().startswith("1 tensors fed (1 in several boxes a rank: fused, stacked or permuted), 0 tied")


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1234, "1.23 kB"),
        (99_950, "100 kB"),
        (999_600, "1 MB"),
        (5e12, "5 TB"),
    ],
)
def test_sizes_in_words(nbytes, text):
    assert human_size(nbytes) == text


# -- Checkpoints -----------------------------------------------------------------------------------

SIZES = {"BF16": 2, "F32": 4, "F8_E4M3": 1}


def write_tensors(path, tensors, **changes):
    """A safetensors file: the header's length, the header, and as many bytes as it promises, without any content."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape) in tensors.items():
        nbytes = SIZES[dtype] * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + nbytes], **changes}
        end += nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def tensors_of(num_layers=2, hidden=16, kv_rows=8, vocabulary=50, experts=0):
    tensors = {"model.embed_tokens.weight": ("BF16", (vocabulary, hidden))}
    for layer in range(num_layers):
        at = f"model.layers.{layer}"
        for name, rows in (("q_proj", hidden), ("k_proj", kv_rows), ("v_proj", kv_rows), ("o_proj", hidden)):
            tensors[f"{at}.self_attn.{name}.weight"] = ("BF16", (rows, hidden))
        tensors[f"{at}.self_attn.q_proj.bias"] = ("BF16", (hidden,))
        tensors[f"{at}.input_layernorm.weight"] = ("F32", (hidden,))
        for place in [f"mlp.experts.{expert}" for expert in range(experts)] or ["mlp"]:
            tensors[f"{at}.{place}.gate_proj.weight"] = ("BF16", (32, hidden))
            tensors[f"{at}.{place}.up_proj.weight"] = ("BF16", (32, hidden))
            tensors[f"{at}.{place}.down_proj.weight"] = ("BF16", (hidden, 32))
    return {**tensors, "model.norm.weight": ("BF16", (hidden,)), "lm_head.weight": ("BF16", (vocabulary, hidden))}


@pytest.fixture
def folder(tmp_path):
    write_tensors(tmp_path / "model.safetensors", tensors_of())
    return tmp_path


def test_a_folder_is_read_by_its_headers(folder):
    read = read_checkpoint(folder)
    assert {tensor.name: (tensor.dtype, tensor.shape) for tensor in read.manifest.tensors} == {
        name: ({"BF16": "bfloat16", "F32": "float32"}[dtype], shape) for name, (dtype, shape) in tensors_of().items()
    }
    assert read.num_kv_heads is None
    assert {tensor.tied_to for tensor in read.manifest.tensors} == {None}


def test_the_files_of_an_index_are_read_together(tmp_path):
    tensors = tensors_of()
    first = dict(list(tensors.items())[:5])
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    write_tensors(tmp_path / "a.safetensors", first)
    write_tensors(tmp_path / "b.safetensors", rest)
    write_tensors(tmp_path / "not-in-the-index.safetensors", {"other": ("F32", (1,))})
    weight_map = {name: "a.safetensors" if name in first else "b.safetensors" for name in tensors}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert [tensor.name for tensor in read_checkpoint(tmp_path).manifest.tensors] == list(tensors)

    index.write_text(json.dumps({"weight_map": {**weight_map, "lost": "a.safetensors"}}))
    with pytest.raises(ValueError, match=r"a\.safetensors does not hold lost, which the index places there"):
        read_checkpoint(tmp_path)
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"misses 1 of 2 files of its index, b\.safetensors among them"):
        read_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("config", "has_head", "tied_to"),
    [
        ({}, False, "model.embed_tokens.weight"),
        ({"tie_word_embeddings": True}, True, "model.embed_tokens.weight"),
        ({"text_config": {"tie_word_embeddings": True}}, True, "model.embed_tokens.weight"),
        ({"tie_word_embeddings": False}, True, None),
        ({}, True, None),
    ],
)
def test_a_head_is_tied_where_the_config_says_so_or_none_is_saved(tmp_path, config, has_head, tied_to):
    tensors = tensors_of()
    if not has_head:
        del tensors["lm_head.weight"]
    write_tensors(tmp_path / "model.safetensors", tensors)
    (tmp_path / "config.json").write_text(json.dumps(config))
    (head,) = [tensor for tensor in read_checkpoint(tmp_path).manifest.tensors if tensor.name == "lm_head.weight"]
    assert head.tied_to == tied_to
    assert head.shape == (50, 16)


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has neither model\.safetensors\.index\.json nor any \*\.safetensors"):
        read_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError, match="is neither a folder of safetensors files nor a saved manifest"):
        read_checkpoint(tmp_path / "nothing")


def header_file(text, tail=0):
    return len(text).to_bytes(8, "little") + text + b"\0" * tail


def one(entry, tail=4):
    return header_file(json.dumps({"w": entry}).encode(), tail)


GOOD = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "0 bytes, of which the first 8 promise a header of 0"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is no safetensors file: 43 bytes"),
        ((200_000_000).to_bytes(8, "little"), "promise a header of 200000000"),
        (header_file(b"{"), "no JSON"),
        (header_file(b"[]"), "expected a JSON object, got list"),
        (one([]), r"'w' is \[\], and not a shape, data_offsets and a dtype of BOOL, U8"),
        (one({"dtype": "F32"}), "'w' is {'dtype': 'F32'}, and not a shape"),
        (one({**GOOD, "dtype": "F4"}), "'w' is {'dtype': 'F4', .* and not a shape"),
        (one({**GOOD, "shape": [-1]}), r"'w' is .*'shape': \[-1\]"),
        (one({**GOOD, "shape": [1.0]}), r"'w' is .*'shape': \[1\.0\]"),
        (one({**GOOD, "shape": "1"}), "'w' is .*'shape': '1'"),
        (one({**GOOD, "data_offsets": [0, 8]}), "takes 4 bytes, not"),
        (one({**GOOD, "data_offsets": [4]}), r"'w' is .*'data_offsets': \[4\]"),
        (one({**GOOD, "data_offsets": [4, 8]}, 8), "its header describes 4 bytes of tensors, and 8 follow it"),
        (one(GOOD, 3), "its header describes 4 bytes of tensors, and 3 follow it"),
        (one(GOOD, 5), "its header describes 4 bytes of tensors, and 5 follow it"),
    ],
)
def test_a_file_that_is_not_what_it_should_be_is_refused(tmp_path, content, complaint):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match=complaint):
        read_checkpoint(tmp_path)


def test_a_name_in_two_files_is_refused(folder):
    write_tensors(folder / "consolidated.safetensors", {"model.norm.weight": ("BF16", (16,))})
    with pytest.raises(
        ValueError, match=r"more than one file has model\.norm\.weight; keep one set of files in the folder"
    ):
        read_checkpoint(folder)


# -- Layouts of a side -----------------------------------------------------------------------------


def side(folder, axes, **options):
    return manifest_of_side(read_checkpoint(folder), parse_axes(axes), **options).by_name


def boxes(metas, name, rank):
    ((offsets, shape),) = [(box.offsets, box.shape) for box in metas[name].regions_on(rank)]
    return offsets, shape


def test_tensor_parallelism_cuts_by_the_usual_rules(folder):
    metas = side(folder, "tp=2")
    assert boxes(metas, "model.layers.0.self_attn.q_proj.weight", 1) == ((8, 0), (8, 16))
    assert boxes(metas, "model.layers.0.self_attn.q_proj.bias", 1) == ((8,), (8,))
    assert boxes(metas, "model.layers.1.mlp.up_proj.weight", 1) == ((16, 0), (16, 16))
    assert boxes(metas, "model.layers.1.mlp.down_proj.weight", 1) == ((0, 16), (16, 16))
    assert boxes(metas, "model.layers.1.input_layernorm.weight", 1) == ((0,), (16,))
    assert boxes(metas, "lm_head.weight", 1) == ((25, 0), (25, 16))


def test_fsdp_cuts_what_tensor_parallelism_left_whichever_comes_first(folder):
    outer, inner = side(folder, "fsdp=2,tp=2"), side(folder, "tp=2,fsdp=2")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert [boxes(outer, name, rank)[0][0] for rank in range(4)] == [0, 8, 4, 12]
    assert [boxes(inner, name, rank)[0][0] for rank in range(4)] == [0, 4, 8, 12]
    assert boxes(outer, "model.layers.0.mlp.down_proj.weight", 3) == ((8, 16), (8, 16))


def test_replicas_pipeline_stages_and_experts(tmp_path):
    write_tensors(tmp_path / "model.safetensors", tensors_of(num_layers=4, experts=4))
    metas = side(tmp_path, "dp=2,pp=2,ep=2")
    assert metas["model.embed_tokens.weight"].layout.ranks == (0, 1, 4, 5)
    assert metas["model.norm.weight"].layout.ranks == metas["lm_head.weight"].layout.ranks == (2, 3, 6, 7)
    assert metas["model.layers.1.self_attn.o_proj.weight"].layout.ranks == (0, 1, 4, 5)
    assert metas["model.layers.2.mlp.experts.1.up_proj.weight"].layout.ranks == (2, 6)
    assert metas["model.layers.2.mlp.experts.2.up_proj.weight"].layout.ranks == (3, 7)


def test_an_engine_with_more_ranks_than_key_and_value_heads_replicates_them(folder):
    (folder / "config.json").write_text(json.dumps({"num_key_value_heads": 2}))
    metas = side(folder, "dp=2,tp=4", replicate_kv_heads=True)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert [boxes(metas, name, rank)[0][0] for rank in range(8)] == [0, 0, 4, 4] * 2
    assert [boxes(side(folder, "tp=4"), name, rank)[0][0] for rank in range(4)] == [0, 2, 4, 6]
    plan = plan_refit(Manifest(tuple(side(folder, "fsdp=4,tp=2").values())), Manifest(tuple(metas.values())))
    assert all(plan.bytes_received(rank) == plan.lower_bound(rank) > 0 for rank in range(8))
    (folder / "config.json").write_text(json.dumps({"num_key_value_heads": 3}))
    with pytest.raises(ValueError, match="tp=4 is no multiple of the 3 key and value heads"):
        side(folder, "tp=4", replicate_kv_heads=True)


@pytest.mark.parametrize(
    ("axes", "complaint"),
    [
        ("fdsp=2", "no axis 'fdsp' in 'fdsp=2'; there are dp, fsdp, tp, pp, ep, as in fsdp=4,tp=2"),
        ("tp=2,tp=2", "axis 'tp' comes twice"),
        ("tp=", "axis 'tp' in 'tp=' needs a number of ranks, such as tp=2"),
        ("tp=0", "needs a number of ranks"),
        ("tp=-1", "needs a number of ranks"),
        ("tp=2,", "no axis ''"),
        ("tp=3", r"tp=3 does not divide dim 0 of model\.layers\.0\.self_attn\.q_proj\.weight, \[16, 16\]; choose a tp"),
        ("pp=3", "pp=3 does not divide 2 layers; choose a size that does"),
        ("ep=2", "ep=2 needs a model with experts; no name of the checkpoint numbers any"),
    ],
)
def test_axes_that_do_not_fit_are_refused(folder, axes, complaint):
    with pytest.raises(ValueError, match=complaint):
        side(folder, axes)


# -- The command -----------------------------------------------------------------------------------


def explain(capsys, *arguments):
    code = main(["explain", *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_explains_a_folder_on_one_screen(capsys, folder):
    code, out, err = explain(capsys, folder, "--source", "fsdp=4,tp=2", "--sink", "tp=2,dp=2", "--nodes", "2,1")
    lines = out.splitlines()
    assert (code, err) == (0, "")
    assert lines[:2] == ["source  fsdp=4, tp=2: 8 ranks", "sink    tp=2, dp=2: 4 ranks"]
    assert any(line.startswith("tp cuts dim 0 of q_proj, k_proj, v_proj") for line in lines)
    assert any("model.layers.*.mlp.gate_proj.weight" in line for line in lines)
    assert "no rank receives more than its bound" in out
    assert "engine-node-0" in out
    assert len(lines) <= 40


def test_json_is_the_last_line_and_holds_the_figures(capsys, folder):
    given = ["--source", "fsdp=2", "--sink", "dp=2", "--bucket-mb", "0.5", "--bandwidth-gbps", "8"]
    code, out, _ = explain(capsys, folder, *given, "--json")
    figures = json.loads(out.splitlines()[-1])
    total = sum(SIZES[dtype] * math.prod(shape) for dtype, shape in tensors_of().values())
    assert code == 0
    assert figures["holds"] is True
    assert figures["bytes"] == 2 * total
    assert figures["seconds"] == figures["link"] / 1e9 == total / 1e9  # each engine takes all of it at 1 GB/s
    plan = plan_refit(Manifest(tuple(side(folder, "fsdp=2").values())), Manifest(tuple(side(folder, "dp=2").values())))
    assert figures["plan_hash"] == plan.hash()


def test_nodes_that_both_sides_share_take_bytes_from_their_own(capsys, folder):
    code, out, _ = explain(capsys, folder, "--source", "dp=2", "--sink", "dp=2", "--nodes", "2", "--json")
    figures = json.loads(out.splitlines()[-1])
    assert code == 0
    assert figures["link"] == 0
    assert figures["seconds"] == 0


def test_saved_manifests_take_the_place_of_axes(capsys, tmp_path, folder):
    for name, axes in (("source", "fsdp=2"), ("sink", "tp=2")):
        text = Manifest(tuple(side(folder, axes).values())).to_json()
        (tmp_path / f"{name}.json").write_text(text)
    source, sink = tmp_path / "source.json", tmp_path / "sink.json"
    outputs = [
        explain(capsys, folder, "--source", "fsdp=2", "--sink", "tp=2", "--json"),
        explain(capsys, folder, "--source", source, "--sink", sink, "--json"),
        explain(capsys, source, "--sink", sink, "--json"),
        explain(capsys, source, "--sink", "tp=2", "--json"),
    ]
    assert {code for code, _, _ in outputs} == {0}
    assert len({out.splitlines()[-1].split("plan_hash")[1] for _, out, _ in outputs}) == 1


def test_what_is_not_covered_is_listed_and_the_code_is_1(capsys, tmp_path, folder):
    engine = Manifest((*side(folder, "tp=2").values(), meta("model.normalizer", (1,), Layout.whole())))
    (tmp_path / "engine.json").write_text(engine.to_json())
    code, out, _ = explain(capsys, folder, "--sink", tmp_path / "engine.json", "--json")
    assert code == 1
    assert "1 sink tensors that the source does not feed:\n  model.normalizer\n" in out
    assert json.loads(out.splitlines()[-1]) == {
        "holds": False,
        "unfed": ["model.normalizer"],
        "unmapped": [],
        "mismatched": [],
    }


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--sink", "xp=2"], "no axis 'xp' in 'xp=2'; there are dp"),
        (["--sink", "tp=3"], "tp=3 does not divide"),
        (
            ["--sink", "engine.json"],
            "'engine.json' is neither axes, such as fsdp=4,tp=2, nor a file with a saved manifest",
        ),
        (["--sink", "tp=2", "--nodes", "1,3"], "--nodes: 2 ranks of the sink do not fit 3 nodes evenly"),
        (["--sink", "tp=2", "--nodes", "1,1,1"], "--nodes is one number of nodes, or two with a comma; got '1,1,1'"),
        (["--sink", "tp=2", "--nodes", "0"], "--nodes is one number of nodes"),
        (["--sink", "tp=2", "--bucket-mb", "0"], "--bucket-mb must be positive; got 0"),
        (["--sink", "tp=2", "--bucket-mb", "0.0001"], "positive multiple of 512 bytes; got bucket_bytes=105"),
        (["--sink", "tp=2", "--bandwidth-gbps", "nan"], "--bandwidth-gbps must be positive; got nan"),
    ],
)
def test_misuse_says_what_to_do_and_the_code_is_2(capsys, folder, arguments, complaint):
    code, _, err = explain(capsys, folder, *arguments)
    assert code == 2
    assert err.startswith("explain: ")
    assert complaint in err


def test_a_checkpoint_that_is_not_there_is_misuse(capsys, tmp_path):
    code, _, err = explain(capsys, tmp_path / "nothing", "--sink", "tp=2")
    assert code == 2
    assert "is neither a folder of safetensors files nor a saved manifest" in err
    (tmp_path / "other.json").write_text('{"a": 1}')
    code, _, err = explain(capsys, tmp_path / "other.json", "--sink", "tp=2")
    assert code == 2
    assert "give a folder of safetensors files or what Manifest.to_json wrote" in err
