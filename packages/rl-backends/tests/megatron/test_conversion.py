"""Conversions of Hugging Face models: the same numbers in any layout, made once, and never used when in doubt."""

import json
import os
import resource
import shutil
import signal
import warnings
from pathlib import Path

import conversions
import pytest
import torch
from forked import RanksFailedError
from torch.distributed.checkpoint.metadata import TensorProperties

from rl_backends.errors import CheckpointError
from rl_backends.megatron.config import explain_megatron_checkpoint_dir, megatron_checkpoint_dir


def test_the_directory_is_nemo_rls_and_says_why(monkeypatch):
    home = Path("~/.cache/huggingface").expanduser()
    monkeypatch.setenv("HF_HOME", "/b")
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "/a")
    assert megatron_checkpoint_dir() == Path("/a")
    assert "NRL_MEGATRON_CHECKPOINT_DIR says so" in explain_megatron_checkpoint_dir()
    monkeypatch.setenv("NRL_MEGATRON_CHECKPOINT_DIR", "")
    assert megatron_checkpoint_dir() == Path("/b/nemo_rl")
    assert "HF_HOME is /b" in explain_megatron_checkpoint_dir()
    monkeypatch.delenv("HF_HOME")
    assert megatron_checkpoint_dir() == home / "nemo_rl"


# -- The same numbers ----------------------------------------------------------------------------

LAYOUTS = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "pp2 in chunks": {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "tp2 ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2},
    "dp2": {},
}
OF_FAMILY = {"Llama": ("tp2", "dp2", "pp2 in chunks"), "Qwen2": ("tp2", "pp2"), "Qwen3Moe": ("ep2", "tp2 ep2")}


@pytest.mark.parametrize(
    "family", ["Qwen3Moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("Llama", "Qwen2"))]
)
def test_any_layout_reads_what_one_process_wrote(world, tmp_path, on_ranks, family):
    model = conversions.save(world, tmp_path / "model", family)
    layouts = [LAYOUTS[name] for name in OF_FAMILY[family]]

    def one_rank(rank):
        conversion = conversions.convert(model, tmp_path / "conversions")
        filled = conversions.from_conversion(conversion)
        return conversions.held(model, filled), conversions.held(model, conversions.from_files)

    def two_ranks(rank):
        from rl_backends.megatron.conversion import read_conversion

        compared, conversion = 0, read_conversion(conversions.only(tmp_path / "conversions"))
        for sizes in layouts:
            expected = conversions.held(model, conversions.from_files, **sizes)
            found = conversions.held(model, conversions.from_conversion(conversion), **sizes)
            torch.testing.assert_close(found, expected, rtol=0, atol=0)
            compared += len(found)
        return compared

    ((found, expected),) = on_ranks(one_rank, ranks=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert all(compared > 20 for compared in on_ranks(two_ranks, ranks=2))


def test_bfloat16_stays_what_it_is_on_disk_and_becomes_what_the_model_is(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model", dtype=torch.bfloat16)

    def rank_0(rank):
        conversion = conversions.convert(model, tmp_path / "conversions")
        filled = conversions.from_conversion(conversion)
        wide, narrow = (conversions.held(model, filled, precision) for precision in ("float32", "bfloat16"))
        return conversion.about["dtype"], conversion.num_bytes, wide, narrow

    ((dtype, num_bytes, wide, narrow),) = on_ranks(rank_0, ranks=1)
    numbers = sum(part.numel() for part in narrow.values())
    assert dtype == "bfloat16"
    assert 2 * numbers < num_bytes < 4 * numbers
    assert {part.dtype for part in narrow.values()} == {torch.bfloat16}
    torch.testing.assert_close(wide, {name: part.float() for name, part in narrow.items()}, rtol=0, atol=0)


@pytest.mark.skipif(
    "strides" in TensorProperties.__dataclass_fields__,
    reason="megatron-core 0.16 reads no plain tensors, not even its own, with torch 2.15: empty() has no strides",
)
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
                tensors = dist_checkpointing.load_plain_tensors(str(conversion.folder / "release"))
        finally:
            groups.leave()
        return tensors

    (tensors,) = on_ranks(rank_0, ranks=1)
    expected = world.make_model("Llama", **conversions.KINDS["Llama"]).state_dict()
    torch.testing.assert_close(
        tensors["embedding.word_embeddings.weight"], expected["model.embed_tokens.weight"], rtol=0, atol=0
    )
    assert tensors["decoder.layers.self_attention.linear_qkv.weight"].shape == (4, 64, 32)  # layers, rows, hidden
    tracker = conversions.only(tmp_path / "conversions") / "latest_checkpointed_iteration.txt"
    assert tracker.read_text() == "release"


# -- Found, changed, damaged ---------------------------------------------------------------------


def test_a_second_run_checks_it_and_says_where_it_is_and_how_large(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")

    def rank_0(rank):
        lines = []
        first = conversions.convert(model, tmp_path / "conversions", progress=lines.append)
        second = conversions.convert(model, tmp_path / "conversions", progress=lines.append)
        return first.found, second.found, second.explain(), lines

    ((first, second, explained, lines),) = on_ranks(rank_0, ranks=1)
    folder = conversions.only(tmp_path / "conversions")
    assert (first, second) == (False, True)
    for text in (str(folder), "MiB", "LlamaForCausalLM", "every byte checked"):
        assert text in explained
    assert lines == [f"converting {model} to {folder}"]


def test_a_model_of_which_one_bit_changed_gets_a_conversion_of_its_own(world, tmp_path, on_ranks):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"
    weights = model / "model.safetensors"

    def rank_0(rank):
        names = [conversions.convert(model, directory).folder.name]
        about, data = weights.stat(), bytearray(weights.read_bytes())
        data[-1] ^= 1
        weights.write_bytes(data)
        os.utime(weights, ns=(about.st_atime_ns, about.st_mtime_ns))
        conversion = conversions.convert(model, directory)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        names.append(conversion.folder.name)
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-3}))
        return [*names, conversions.convert(model, directory).folder.name]

    (names,) = on_ranks(rank_0, ranks=1)
    assert len(set(names)) == 3


def _cut(path):
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path):
    """One bit in the middle, where samples at fixed places would not look."""
    data = bytearray(path.read_bytes())
    data[len(data) * 3 // 7] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("name", "damage", "why"),
    [
        ("release/__0_0.distcp", _cut, "were written: truncated"),
        ("release/__0_0.distcp", _flip, "damaged: its SHA-256 is"),
        ("release/.metadata", _flip, "damaged: its SHA-256 is"),
        ("release/common.pt", Path.unlink, "missing, though its folder was complete"),
        ("conversion.json", _flip, "is damaged"),
    ],
)
def test_a_damaged_conversion_is_refused_by_the_name_of_the_file(converted, tmp_path, on_ranks, name, damage, why):
    from rl_backends.megatron.conversion import read_conversion

    model, directory = converted
    folder = shutil.copytree(conversions.only(directory), tmp_path / directory.name / conversions.only(directory).name)
    damage(folder / name)
    with pytest.raises(CheckpointError, match=f"{name}.*{why}"):
        read_conversion(folder)

    def one_rank(rank):
        with pytest.raises(CheckpointError, match=f"{name}.*{why}"):
            conversions.convert(model, folder.parent)

    on_ranks(one_rank, ranks=1)


def test_a_conversion_without_its_manifest_is_not_complete(converted, tmp_path):
    from rl_backends.megatron.conversion import read_conversion

    folder = shutil.copytree(conversions.only(converted[1]), tmp_path / "copy")
    (folder / "conversion.json").unlink()
    with pytest.raises(CheckpointError, match=r"is incomplete: it has no conversion\.json"):
        read_conversion(folder)


@pytest.fixture(scope="module")
def converted(world, tmp_path_factory, on_ranks_once):
    """A model, and the directory of its one conversion."""
    folder = tmp_path_factory.mktemp("converted")
    model = conversions.save(world, folder / "model")
    on_ranks_once(lambda rank: conversions.convert(model, folder / "conversions") and None, ranks=1)
    return model, folder / "conversions"


def test_a_kill_leaves_a_complete_conversion_or_none(world, tmp_path, on_ranks):
    """Killed while it is written, and converted again."""
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"

    def killed(rank):
        from rl_backends.megatron import conversion

        def kill(*_, **__):
            os.kill(os.getpid(), signal.SIGKILL)

        conversion.write_marker = kill  # all tensors are written, the manifest is not
        conversions.convert(model, directory)

    with pytest.raises(RanksFailedError):
        on_ranks(killed, ranks=1)
    (left,) = directory.iterdir()
    assert left.name.startswith(".")

    def again(rank):
        conversion = conversions.convert(model, directory)
        expected = conversions.held(model, conversions.from_files)
        found = conversions.held(model, conversions.from_conversion(conversion))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        return conversion.found

    assert on_ranks(again, ranks=1) == [False]
    assert not left.exists()


# -- Disks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("room", [1024, 60_000])  # of a file: neither common.pt fits, or the weights do not
def test_a_disk_that_is_full_all_the_same_leaves_nothing(world, tmp_path, on_ranks, room):
    model, directory = conversions.save(world, tmp_path / "model"), tmp_path / "conversions"

    def one_rank(rank):
        was = resource.getrlimit(resource.RLIMIT_FSIZE)

        def fill_the_disk(line):
            if line.startswith("converting"):
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, was[1]))

        with pytest.raises(CheckpointError) as raised:
            conversions.convert(model, directory, progress=fill_the_disk)
        resource.setrlimit(resource.RLIMIT_FSIZE, was)
        return str(raised.value)

    (said,) = on_ranks(one_rank, ranks=1)
    assert "cannot be written" in said
    assert "NRL_MEGATRON_CHECKPOINT_DIR" in said
    assert not [path for path in directory.iterdir() if path.is_dir()]


def test_a_file_in_place_of_the_directory_is_an_error(world, tmp_path, on_ranks):
    model = conversions.save(world, tmp_path / "model")
    (tmp_path / "taken").touch()
    with pytest.raises(RanksFailedError, match=r"CheckpointError: conversions cannot lie in .*taken"):
        on_ranks(lambda rank: conversions.convert(model, tmp_path / "taken"), ranks=1)
