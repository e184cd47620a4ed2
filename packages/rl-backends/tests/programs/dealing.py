"""One rank of the tests of dealing: the same steps, where ranks are given the whole batch and where only their rows."""

import functools
import importlib.util
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True}


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def backend_of(world, kind, sizes):
    from rl_backends import DTensorBackend, DTensorConfig, MegatronBackend, MegatronConfig, OptimizerConfig

    family, other = ("Qwen3Moe", MIXTURE) if "router_aux_loss_coef" in sizes else ("Qwen3", {})
    make = functools.partial(world.make_model, family, tie_word_embeddings=True, pad_token_id=None, **other)
    if kind == "megatron":
        backend = MegatronBackend(make(), MegatronConfig(micro_batch_size=2, **sizes))
    else:
        backend = DTensorBackend(make(), DTensorConfig(micro_batch_size=2, **sizes))
    backend.start_training(OptimizerConfig(lr=1e-2, eps=1e-4), num_steps=4)
    return backend


def steps(world, backend, examples, give):
    """What a driver sees of two steps; `give(examples)` is what this rank is given."""
    from rl_backends.batching.dealing import DealtRows, in_order

    loss = functools.partial(world.token_loss, num_tokens=examples.trainable.sum())
    asking, words = world.asking(examples), functools.partial(world.words_loss, num_tokens=examples.trainable.sum())
    reference, seen = backend.freeze_reference(), {}

    def read(name, method, *arguments):
        given = give(examples)
        value = method(given, *arguments)
        if isinstance(given, DealtRows):
            told = [None] * dist.get_world_size()
            dist.all_gather_object(told, (given, value))
            first = {each.rank: (each, found) for each, found in reversed(told)}
            value = in_order(*zip(*(first[rank] for rank in sorted(first)), strict=True))
        if name == "topk":
            seen["topk logp"], seen["topk ids"] = value.logp, value.token_ids
        else:
            seen[name] = value

    for step in range(2):
        read(f"logp {step}", backend.logp)
        sums = backend.forward_backward(give(examples), loss)
        seen |= {f"sums {step} {name}": each for name, each in sums.items()}
        sums = backend.forward_backward(give(asking), words, output="logp_of_token_ids")
        seen |= {f"words {step} {name}": each for name, each in sums.items()}
        seen[f"norm {step}"] = torch.tensor(backend.optim_step())
        measured = backend.metrics()
        seen[f"measured {step}"] = torch.tensor(
            [measured.tokens, measured.tokens_read, measured.asked_tokens, measured.load_balance]
        )
    read("entropy", backend.entropy)
    read("topk", backend.topk_logits, 3)
    read("reference", reference.logp)
    none = type(examples)(**{**vars(examples), "trainable": torch.zeros_like(examples.trainable)})
    backend.forward_backward(give(none), loss)
    backend.optim_step()
    seen["skipped"] = torch.tensor(backend.metrics().skipped)
    shards = [(each.name, each.local if hasattr(each, "local") else each.tensor) for each in backend.shards()]
    return seen | {f"weight {name}": each.detach().clone() for name, each in shards}


def attempt(action):
    try:
        action()
    except Exception as error:  # noqa: BLE001 - what it was is the result
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(task):
    torch.set_num_threads(1)
    rank, folder = task["rank"], Path(task["folder"])
    rendezvous = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=task["ranks"])
    world = load_world()
    results = {}
    for name, (kind, sizes, rows) in task["meshes"].items():
        examples = world.make_examples(rows=rows)
        backend = backend_of(world, kind, sizes)
        whole = steps(world, backend, examples, lambda each: each)
        backend.close()
        backend = backend_of(world, kind, sizes)
        dealing = backend.row_dealing()

        def own(each, dealing=dealing):
            return dealing.deal(each, with_token_ids=hasattr(each, "token_ids"))[dealing.rank]

        dealt = steps(world, backend, examples, own)
        refused = {}
        if dealing.num_ranks > 1:
            other = dealing.deal(examples)[(dealing.rank + 1) % dealing.num_ranks]
            refused["another's"] = attempt(functools.partial(backend.logp, other))
            apart = own(world.make_examples(rows=rows, seed=rank))
            refused["of other batches"] = attempt(functools.partial(backend.logp, apart))
        backend.close()
        given = own(examples)
        results[name] = {
            "whole": whole,
            "dealt": dealt,
            "rows": given.rows,
            "held": given.examples.tokens.shape[0],
            "rank": dealing.rank,
            "num_ranks": dealing.num_ranks,
            "refused": refused,
        }
    torch.save(results, folder / f"rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
