"""Load, initialise and export small models on several meshes; started by test_loading_on_ranks.py, which judges files.

One process imports everything and is forked into the ranks of each mesh, one mesh after the other: imports cost more
than all that is done here.
"""

import dataclasses
import json
import os
import resource
import shutil
import signal
import sys
import traceback
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rl_backends.errors import ModelError, RankError
from rl_backends.export import export_pretrained
from rl_backends.loading.skeleton import make_skeleton, materialize
from rl_backends.loading.source import open_model
from rl_backends.loading.weights import initialise
from rl_parallel_plans import named_shards, parallelize, plan_for

SMALL_FILES = 20_000


def reference(folder):
    """What one plain process makes of a folder, and of a seed."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    fresh = materialize(open_model(folder).skeleton(), "cpu")
    initialise(fresh, seed=3)
    return plain, fresh.state_dict()


def same(model, whole):
    """Every box of every shard bit for bit that of the whole."""
    for shard in named_shards(model):
        for box in shard.boxes():
            found, wanted = box.of_local(shard.local), box.of_whole(whole[shard.name])
            assert torch.equal(found, wanted), shard.name


def load(folder, mesh, plain, fresh, *, out):
    source = open_model(folder)
    model = source.skeleton()
    ties = [name for name, _ in model.named_parameters()]
    plan = plan_for(model, tp=mesh["tp"].size())
    parallelize(model, mesh, plan, src_data_rank=None)
    materialize(model, "cpu")
    assert [name for name, _ in model.named_parameters()] == ties
    report = source.load_into(model)
    whole = plain.state_dict()
    same(model, whole)
    assert report.tensors == len(dict(plain.named_parameters()))
    assert report.bytes_read == sum(2 * shard.local.numel() for shard in named_shards(model))
    for (name, buffer), (_, wanted) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert torch.equal(buffer, wanted), name
    ids = torch.arange(12).view(2, 6)
    logits = model(input_ids=ids).logits
    logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
    torch.testing.assert_close(logits, plain(input_ids=ids).logits, rtol=1e-5, atol=1e-5)
    with pytest.MonkeyPatch.context() as patched:
        written = []
        patched.setattr(safetensors.torch, "save_file", recorded(written, safetensors.torch.save_file))
        export_pretrained(model, f"{out}-bfloat16", dtype=torch.bfloat16, max_shard_bytes=SMALL_FILES)
    Path(f"{out}-files-of-rank{dist.get_rank()}.json").write_text(json.dumps(written))
    initialise(model, seed=3)
    same(model, fresh)
    return model


def recorded(written, save_file):
    def save(tensors, path, **options):
        written.append(Path(path).name)
        save_file(tensors, path, **options)

    return save


def failures(model, folder):
    """Every rank raises, whichever fails; nothing is left behind."""
    rank = dist.get_rank()
    existing = Path(folder) / "existing"
    existing.mkdir(exist_ok=True)
    raises(FileExistsError if rank == 0 else RankError, lambda: export_pretrained(model, existing))
    full = Path(folder) / "full"
    if rank == 0:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (SMALL_FILES // 2, before[1]))  # as if the disk were full
    raises(OSError if rank == 0 else RankError, lambda: export_pretrained(model, full, max_shard_bytes=SMALL_FILES))
    if rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not full.exists()
    assert not full.with_name(".full.unfinished").exists()
    dist.barrier()  # before rank 0 makes it again, every rank has looked
    export_pretrained(model, full)


def raises(kind, action):
    with pytest.raises(kind):
        action()


def missing_weights(folder, mesh):
    source = open_model(folder)
    model = parallelize(source.skeleton(), mesh, plan_for(source.skeleton(), tp=mesh["tp"].size()), src_data_rank=None)
    raises(ModelError, lambda: source.load_into(model))  # not materialised


BIG = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,  # large beside libraries and buffers, whose peak moves by 50 MB from run to run
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 4000,
}


def write_big(folder):
    """A folder of a model of 570 MB in float32, which no process has held."""
    import transformers

    model = make_skeleton(lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**BIG)))
    materialize(model, "cpu")
    export_pretrained(model, folder, dtype=torch.bfloat16, max_shard_bytes=32 * 2**20)


def peak_bytes():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def memory(folder, mesh):
    """The most that a rank ever held, measured by the kernel: far from a whole model."""
    source = open_model(folder)
    model = source.skeleton()
    parallelize(model, mesh, plan_for(model, tp=1), src_data_rank=None)
    whole = sum(parameter.numel() * 4 for parameter in model.parameters())
    before = peak_bytes()
    materialize(model, "cpu")
    report = source.load_into(model)
    assert report.bytes_read == whole // 4  # half of the rows, in bfloat16
    loaded = peak_bytes() - before
    export_pretrained(model, f"{folder}-again", dtype=torch.bfloat16, max_shard_bytes=32 * 2**20)
    exported = peak_bytes() - before
    Path(f"{folder}-rank{mesh.get_rank()}.json").write_text(
        json.dumps({"whole": whole, "loaded": loaded, "exported": exported})
    )


def rank_main(rank, task, shape, references):
    torch.set_num_threads(1)
    name = "x".join(map(str, shape))
    ranks = shape[0] * shape[1]
    rendezvous = f"file://{task['folder']}/rendezvous-{name}-{references is None}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks)
    mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("dp", "tp"))
    if references is None:
        memory(task["big"], mesh)
    for family, folder in task["families"].items() if references else ():
        model = load(folder, mesh, *references[family], out=f"{task['folder']}/{family}-{name}")
    if references and shape == task["shapes"][0]:
        missing_weights(folder, mesh)
        failures(model, task["folder"])
        one_commit(Path(task["families"]["Llama"]), Path(task["folder"]))
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


def one_commit(model, out):
    """A branch of the Hub means to all ranks what it means to rank 0, whatever their own caches say."""
    from huggingface_hub import constants

    commits = ["a" * 40, "b" * 40]
    repository = out / f"hub-{dist.get_rank()}" / "models--people--tiny"
    for commit in commits:
        shutil.copytree(model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[dist.get_rank()])
    constants.HF_HUB_CACHE, constants.HF_HUB_OFFLINE = str(repository.parent), True
    source = open_model("people/tiny")
    assert source.folder.name == commits[0], source.folder
    torn = dataclasses.replace(source, folder=source.folder.with_name(commits[dist.get_rank()]))
    assert "the ranks have opened 2 commits of people/tiny" in told(lambda: torn.load_into(source.skeleton()))
    assert "people/other is not a local folder" in told(lambda: open_model("people/other"))


def told(action):
    try:
        action()
    except ModelError as error:
        return str(error)
    return ""


def forked(rank, *args):
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        rank_main(rank, *args)
        status = 0
    except BaseException:  # noqa: BLE001 - the parent sees the status
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main(task):
    torch.set_num_threads(1)
    references = {family: reference(folder) for family, folder in task["families"].items()}
    write_big(task["big"])
    for shape, known in [([2, 1], None), *((shape, references) for shape in task["shapes"])]:
        children = [forked(rank, task, shape, known) for rank in range(shape[0] * shape[1])]
        codes, ended = [], set()
        for _ in children:
            child, status = os.wait()
            codes.append(status)
            ended.add(child)
            if status:  # the others wait for it
                for other in set(children) - ended:
                    os.kill(other, signal.SIGKILL)
        assert not any(codes), f"mesh {shape}: {codes}"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
