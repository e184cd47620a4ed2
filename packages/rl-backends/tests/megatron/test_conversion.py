"""Conversions of Hugging Face models: the same numbers in any layout, made once, and never used when in doubt."""

import json
import os
import pickle
import resource
import shutil
import signal
import warnings
from pathlib import Path

import conversions
import pytest
import torch
from forked import RanksFailedError

from rl_backends.checkpoint_directory import explain_megatron_checkpoint_dir, megatron_checkpoint_dir
from rl_backends.errors import CheckpointError


def test_the_directory_is_nemo_rls_and_says_why(monkeypatch):
    home = Path("~/.cache/huggingface").expanduser()
    given = {"NRL_MEGATRON_CHECKPOINT_DIR": "/a", "HF_HOME": "/b"}
    assert megatron_checkpoint_dir(given) == Path("/a")
    assert megatron_checkpoint_dir({**given, "NRL_MEGATRON_CHECKPOINT_DIR": ""}) == Path("/b/nemo_rl")
    assert megatron_checkpoint_dir({}) == home / "nemo_rl"
    assert "NRL_MEGATRON_CHECKPOINT_DIR says so" in explain_megatron_checkpoint_dir(given)
    assert "HF_HOME is /b" in explain_megatron_checkpoint_dir({"HF_HOME": "/b"})
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "/c")
    assert megatron_checkpoint_dir() == Path("/c")


# -- The same numbers ----------------------------------------------------------------------------

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    "dp2": {},
}
OF_FAMILY = {"Llama": ("tp2", "dp2"), "Qwen2": ("tp2", "pp2"), "Qwen3Moe": ("ep2", "tp2 ep2")}


@pytest.mark.parametrize("family", list(conversions.KINDS))
def test_any_layout_reads_what_any_other_wrote(world, tmp_path, on_ranks, family):
    model = conversions.save(world, tmp_path / "model", family)
    layouts = {name: LAYOUTS[name] for name in OF_FAMILY[family]}

    def one_rank(rank):
        conversion = conversions.convert(model, tmp_path / "by one")
        filled = conversions.from_conversion(conversion)
        return conversions.held(model, filled), conversions.held(model, conversions.from_files)

    def two_ranks(rank):
        compared = 0
        for name, sizes in layouts.items():
            by_two = conversions.convert(model, tmp_path / f"by {name}", **sizes)
            by_one = conversions.convert(model, tmp_path / "by one", **sizes)
            assert by_one.why == "found"
            expected = conversions.held(model, conversions.from_files, **sizes)
            for conversion in (by_two, by_one):
                found = conversions.held(model, conversions.from_conversion(conversion), **sizes)
                torch.testing.assert_close(found, expected, rtol=0, atol=0)
                compared += len(found)
        return compared

    def one_rank_again(rank):
        expected = conversions.held(model, conversions.from_files)
        for name in layouts:
            conversion = conversions.convert(model, tmp_path / f"by {name}")
            assert conversion.why == "found"
            assert conversion.marker.ranks == 2
            found = conversions.held(model, conversions.from_conversion(conversion))
            torch.testing.assert_close(found, expected, rtol=0, atol=0)

    ((found, expected),) = on_ranks(one_rank, ranks=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(compared > 20 for compared in on_ranks(two_ranks, ranks=2))
    on_ranks(one_rank_again, ranks=1)


def test_bfloat16_stays_what_it_is_on_disk_and_becomes_what_the_model_is(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model", dtype=torch.bfloat16)

    def rank_0(rank):
        conversion = conversions.convert(model, tmp_path / "conversions")
        filled = conversions.from_conversion(conversion)
        wide, narrow = (conversions.held(model, filled, precision) for precision in ("float32", "bfloat16"))
        return str(conversion.dtype), conversion.bytes, wide, narrow

    ((dtype, num_bytes, wide, narrow),) = on_ranks(rank_0, ranks=1)
    numbers = sum(part.numel() for part in narrow.values())
    assert dtype == "torch.bfloat16"
    assert 2 * numbers < num_bytes < 4 * numbers
    assert {part.dtype for part in narrow.values()} == {torch.bfloat16}
    torch.testing.assert_close(wide, {name: part.float() for name, part in narrow.items()}, rtol=0, atol=0)


def test_megatron_core_reads_it_by_itself(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")

    def rank_0(rank):
        from megatron.core import dist_checkpointing

        from rl_backends.megatron.config import MegatronConfig
        from rl_backends.megatron.groups import ParallelGroups

        conversion = conversions.convert(model, tmp_path / "conversions")
        groups = ParallelGroups.join(MegatronConfig())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of torch, on how it loads
                tensors = dist_checkpointing.load_plain_tensors(str(conversion.weights))
        finally:
            groups.leave()
        return tensors

    (tensors,) = on_ranks(rank_0, ranks=1)
    expected = world.make_model("Llama").state_dict()
    torch.testing.assert_close(
        tensors["embedding.word_embeddings.weight"], expected["model.embed_tokens.weight"], rtol=0, atol=0
    )
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (2, 64, 32)  # layers, rows, hidden
    tracker = conversions.only(tmp_path / "conversions") / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "release"


def test_a_conversion_of_another_model_is_not_loaded(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")
    others = {
        "Global shape mismatch": conversions.save(world, tmp_path / "wider", intermediate_size=64),
        "q_layernorm": tmp_path / "with more",
        "output_layer": conversions.save(world, tmp_path / "with less", tie_word_embeddings=True),
    }
    world.make_model("Qwen3").save_pretrained(others["q_layernorm"])

    def rank_0(rank):
        conversion = conversions.convert(model, tmp_path / "conversions")
        for told, other in others.items():
            with pytest.raises(CheckpointError, match=f"(?s)does not hold this model.*{told}"):
                conversions.held(other, conversions.from_conversion(conversion))

    on_ranks(rank_0, ranks=1)


# -- Found, outdated, damaged --------------------------------------------------------------------


def test_a_second_run_finds_it_and_says_where_it_is_and_how_big(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")

    def rank_0(rank):
        told = []
        first = conversions.convert(model, tmp_path / "conversions", progress=told.append)
        second = conversions.convert(model, tmp_path / "conversions", progress=told.append)
        return first.why, second.why, second.explain(), "\n".join(told)

    ((first, second, explained, told),) = on_ranks(rank_0, ranks=1)
    folder = conversions.only(tmp_path / "conversions")
    assert (first, second) == ("there was none", "found")
    assert str(folder) in explained
    assert "MiB" in explained
    assert "LlamaForCausalLM" in explained
    assert told.count("converting") == 1
    assert f"{folder}: " in told


def test_files_that_changed_are_converted_again_and_the_reason_is_told(world, tmp_path, on_ranks):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    weights = model / "model.safetensors"
    (first,) = on_ranks(lambda rank: conversions.convert(model, directory).folder.name, ranks=1)
    about, data = weights.stat(), bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))  # one bit in one weight, and nothing else

    def rank_0(rank):
        conversion = conversions.convert(model, directory)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return conversion.folder.name, conversion.why

    ((second, why),) = on_ranks(rank_0, ranks=1)
    assert second != first
    assert why.startswith(f"the files have changed since {first} (")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
    ((third, why),) = on_ranks(rank_0, ranks=1)
    assert third not in {first, second}


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = [
    ("release/__0_0.distcp", _cut, "bytes of"),
    ("release/__0_0.distcp", _flip, "holds other bytes than were written"),
    ("release/.metadata", _flip, "holds other bytes than were written"),
    ("release/common.pt", Path.unlink, "is missing"),
    ("conversion.json", _flip, "conversion.json"),
    ("conversion.json", Path.unlink, "no complete conversion"),
]


def test_what_is_damaged_or_partial_is_made_again(world, tmp_path, on_ranks):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"

    def rank_0(rank):
        reasons = [conversions.convert(model, directory).why]
        for name, damage, _ in DAMAGES:
            damage(conversions.only(directory) / name)
            conversion = conversions.convert(model, directory)
            reasons.append(conversion.why)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return reasons

    ((first, *reasons),) = on_ranks(rank_0, ranks=1)
    assert first == "there was none"
    for why, (_, _, told) in zip(reasons, DAMAGES, strict=True):
        assert why.startswith("the one there could not be used")
        assert told in why
    conversions.only(directory)


class _Harmful:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


def test_metadata_that_would_run_code_is_refused(world, tmp_path, on_ranks, monkeypatch):
    from rl_backends.megatron.conversion.tensors import stored_dtypes

    monkeypatch.chdir(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(_Harmful()))
    with pytest.raises(CheckpointError, match=r"posix\.mkdir, which no metadata of tensors has"):
        stored_dtypes(tmp_path)
    assert not (tmp_path / "harmed").exists()


def test_a_file_of_the_hubs_cache_is_known_by_its_blob(world, tmp_path):
    from rl_backends.loading import open_model
    from rl_backends.megatron.conversion.content import source_content

    model = conversions.save(world, tmp_path / "model")
    weights, blob = model / "model.safetensors", tmp_path / "blobs" / ("ab" * 32)
    blob.parent.mkdir()
    as_file = source_content(open_model(str(model)))
    weights.rename(blob)
    weights.symlink_to(blob)
    as_blob = source_content(open_model(str(model)))
    os.utime(blob)
    assert source_content(open_model(str(model))).key == as_blob.key != as_file.key
    other = blob.with_name("cd" * 32)
    blob.rename(other)
    weights.unlink()
    weights.symlink_to(other)
    assert source_content(open_model(str(model))).key != as_blob.key


# -- Disks ---------------------------------------------------------------------------------------


def test_too_small_a_disk_is_an_error_before_anything_is_written(world, tmp_path, on_ranks, monkeypatch):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2**20))

    def two_ranks(rank):
        from rl_backends.errors import RankError

        with pytest.raises(RankError if rank else CheckpointError) as raised:
            conversions.convert(model, directory)
        return str(raised.value)

    for told in on_ranks(two_ranks, ranks=2):
        assert f"{directory} has 1.00 MiB free" in told
        assert "would take 16.08 MiB" in told
        assert "NRL_MEGATRON_CHECKPOINT_DIR" in told
    assert not [path for path in directory.iterdir() if path.is_dir()]


@pytest.mark.parametrize("room", [1024, 60_000])  # of a file: neither common.pt fits, or the weights do not
def test_a_disk_that_is_full_all_the_same_leaves_nothing(world, tmp_path, on_ranks, room):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"

    def two_ranks(rank):
        from rl_backends.errors import RankError

        was = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill_the_disk(line):
            if line.startswith("writing"):
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, was[1]))

        with pytest.raises((RankError, CheckpointError)) as raised:
            conversions.convert(model, directory, progress=fill_the_disk)
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        return str(raised.value)

    first, _ = on_ranks(two_ranks, ranks=2)
    assert "cannot be written" in first
    assert "NRL_MEGATRON_CHECKPOINT_DIR" in first
    assert not [path for path in directory.iterdir() if path.is_dir()]


def test_a_file_in_place_of_the_directory_is_an_error(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")
    (tmp_path / "taken").touch()
    with pytest.raises(RanksFailedError, match=r"CheckpointError: conversions cannot lie in .*taken"):
        on_ranks(lambda rank: conversions.convert(model, tmp_path / "taken"), ranks=1)
