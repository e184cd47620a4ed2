"""The ranks of a distributed test: values, scores, entropies and words of rows, and gradients through them.

Started by test_heads.py, which imports the functions for one rank and for the plain model that all must equal.
"""

import functools
import importlib.util
import json
import multiprocessing
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

K = 5


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parent.with_name("conftest.py"))
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


def make_classifier(family, *, seed=0, **overrides):
    """Two layers and a head of one number, with random weights; two key/value heads for two ranks."""
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        pad_token_id=0,
        **{"num_labels": 1, **overrides},
    )
    torch.manual_seed(seed)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)
    return model


def value_loss(values, examples, *, num_tokens):
    """Squared distance to a target that differs from row to row and from token to token."""
    targets = examples.weight[:, None] + 0.1 * torch.arange(values.shape[1])
    total = torch.where(examples.trainable, (values - targets) ** 2, 0.0).sum()
    return total / num_tokens, {"loss": total.detach()}


def score_loss(scores, examples, *, num_tokens):
    total = ((scores - examples.weight) ** 2).sum()
    return total / num_tokens, {"loss": total.detach()}


LOSSES = {"value": value_loss, "score": score_loss}


WORDS_OUTPUTS = ("logp_and_entropy", "logp_of_token_ids")


def read_classifier(world, task):
    """Values, scores, and of both outputs the gradients and sums."""
    from rl_backends import DTensorBackend, DTensorConfig

    backend = DTensorBackend(make_classifier(task["family"]), DTensorConfig(**task["config"]))
    examples = world.make_examples(rows=task["rows"])
    result = {"values": backend.value(examples), "scores": backend.score(examples)}
    for output, loss in LOSSES.items():
        backend.model.zero_grad()
        of_all = functools.partial(loss, num_tokens=examples.trainable.sum())
        sums = backend.forward_backward(examples, of_all, output=output)
        result[output] = {"loss": sums["loss"], "gradients": gradients_of(backend.model)}
    return result


def read_language_model(world, task):
    """Entropies, top words, and the gradients through entropies and given words, from logits that nobody makes."""
    from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig

    backend = DTensorBackend(world.make_model(task["family"]), DTensorConfig(**task["config"]))
    backend.start_training(OptimizerConfig(lr=1.0), num_steps=1, temperature=task["temperature"])
    examples = world.asking(world.make_examples(rows=task["rows"]))
    top = backend.topk_logits(examples, K)
    result = {"entropy": backend.entropy(examples), "top_logp": top.logp, "top_ids": top.token_ids}
    of_all = functools.partial(world.words_loss, num_tokens=examples.trainable.sum())
    for output in WORDS_OUTPUTS:
        backend.model.zero_grad()
        sums = backend.forward_backward(examples, of_all, output=output)
        result[output] = {"loss": sums["loss"], "gradients": gradients_of(backend.model)}
    return result


def be_refused(_, task):
    from rl_backends import DTensorBackend, DTensorConfig

    try:
        DTensorBackend(make_classifier(task["family"]), DTensorConfig(**task["config"]))
    except ValueError as error:
        return str(error)
    return "nothing was refused"


def gradients_of(model):
    """Whole gradients under the model's own names; a parameter without one is named without one."""
    from torch.distributed.tensor import DTensor

    from rl_parallel_plans import named_shards

    found = {}
    for shard in named_shards(model):
        if isinstance(shard.tensor, torch.nn.Parameter):
            gradient = shard.tensor.grad
            found[shard.name] = (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).clone()
    return found


CLAIMS = {"classifier": read_classifier, "language model": read_language_model, "refused": be_refused}


def main(task):
    """Import once, then fork a process for each rank."""
    torch.set_num_threads(1)
    world = load_world()
    import_beforehand(task["cases"].values())
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run, args=(world, task, rank)) for rank in range(task["ranks"])]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    sys.exit(any(each.exitcode for each in ranks))


def import_beforehand(cases):
    import transformers

    for case in cases:
        getattr(transformers, f"{case['family']}ForCausalLM")


def run(world, task, rank):
    dist.init_process_group(
        "gloo",
        init_method=f"file://{task['folder']}/rendezvous",
        rank=rank,
        world_size=task["ranks"],
        timeout=timedelta(seconds=120),
    )
    results = {name: CLAIMS[case["claim"]](world, case) for name, case in task["cases"].items()}
    torch.save(results, Path(task["folder"]) / f"rank{rank}.pt")
    dist.barrier()  # a rank that leaves early tears connections that the other still reads
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
