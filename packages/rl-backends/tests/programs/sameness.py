"""One rank of the tests of sameness: ranks are given other models, other batches, or what no model can read."""

import dataclasses
import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def attempt(action):
    """What was raised."""
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what it was is the result
        return f"{type(error).__name__}: {error}"
    return "nothing"


def models(world, rank):
    """By name, a model that is another one on rank 1."""
    with_buffer, scaled, on_meta = (world.make_model("Llama") for _ in range(3))
    with_buffer.model.rotary_emb.inv_freq += 1e-7 * rank
    scaled.register_forward_hook(lambda _, __, out: dataclasses.replace(out, logits=out.logits * (1 + 4 * rank)))
    one_number = world.make_model("Llama")
    one_number.model.norm.weight.data[3] += 1e-3 * rank
    return {
        "seed": world.make_model("Llama", seed=rank),
        "one number": one_number,
        "buffer": with_buffer,
        "layers": world.make_model("Llama", num_hidden_layers=1 + rank),
        "meta": on_meta.to("meta") if rank else on_meta,
        "logits": scaled,
    }


def batches(examples, rank):
    """By name, a batch that is another one on rank 1, or that no model can read."""
    change = {name: getattr(examples, name).clone() for name in ("tokens", "lengths", "trainable")}
    change["tokens"][2, 3] += rank
    change["lengths"][1] -= rank
    change["trainable"][0, 4] ^= bool(rank)
    too_large, negative = examples.tokens.clone(), examples.tokens.clone()
    too_large[3, 4], negative[5, 0] = 67, -1
    half = {f.name: getattr(examples, f.name)[rank::2] for f in dataclasses.fields(examples)}
    none = {f.name: getattr(examples, f.name)[:0] for f in dataclasses.fields(examples)}
    return {
        "half": dataclasses.replace(examples, **half),
        **{name: dataclasses.replace(examples, **{name: value}) for name, value in change.items()},
        "too large": dataclasses.replace(examples, tokens=too_large),
        "negative": dataclasses.replace(examples, tokens=negative),
        "no rows": dataclasses.replace(examples, **none),
    }


def words(asking, examples, rank):
    """By name, words to ask about that are others on rank 1, or are missing there."""
    others = asking.token_ids.clone()
    others[asking.trainable.nonzero(as_tuple=True)] += rank - 1
    return {
        "same": asking,
        "others": dataclasses.replace(asking, token_ids=others.clamp(min=0)),
        "none": examples if rank else asking,
    }


def main(task):
    from rl_backends import DTensorBackend, DTensorConfig

    torch.set_num_threads(1)
    rank = task["rank"]
    rendezvous = f"file://{task['folder']}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2)
    world = load_world()
    meshes = {"FSDP2": {}, "HSDP": {"data_parallel_replicate_size": 2}, "TP2": {"tensor_parallel_size": 2}}
    examples, results = world.make_examples(rows=6), {}

    def loss(logp, _):
        return logp.sum(), {}

    for mesh, sizes in meshes.items():
        config = DTensorConfig(micro_batch_size=2, **sizes)
        for name, model in models(world, rank).items():
            raised = attempt(
                lambda model=model, config=config: DTensorBackend(model, config, fill=torch.nn.Module.eval)
            )
            results[f"{mesh}, model, {name}"] = raised
        backend = DTensorBackend(world.make_model("Llama"), config)
        for name, batch in batches(examples, rank).items():
            results[f"{mesh}, logp, {name}"] = attempt(functools.partial(backend.logp, batch))
            accumulate = functools.partial(backend.forward_backward, batch, loss)
            results[f"{mesh}, forward_backward, {name}"] = attempt(accumulate)
        for name, batch in words(world.asking(examples), examples, rank).items():
            accumulate = functools.partial(backend.forward_backward, batch, loss, output="logp_of_token_ids")
            results[f"{mesh}, words, {name}"] = attempt(accumulate)
        results[f"{mesh}, logp"] = backend.logp(examples)
    torch.save(results, Path(task["folder"]) / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
