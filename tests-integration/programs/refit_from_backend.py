"""One process of the test of refits from sharded backends: a rank of the trainer, or the engine.

The trainer takes a step, sends its weights, and rank 0 saves what it has; the engine keeps what it received.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
import transformers

from rl_backends import DTensorBackend, DTensorConfig, LoraConfig, OptimizerConfig
from rl_backends.lora.inject import add_lora
from rl_backends.lora.layers import adapter_tensors
from rl_launcher.build.engines import weight_source
from rl_refit import AdapterSink, ModuleSink, Refit, Rendezvous, SlotStream, StateDictSource


@dataclasses.dataclass(frozen=True)
class Examples:
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


def make_model(family):
    config = {
        "vocab_size": 67,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": family == "Qwen2",
    }
    torch.manual_seed(0)
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**config))


def make_examples():
    tokens = torch.randint(3, 67, (4, 10), generator=torch.Generator().manual_seed(0))
    return Examples(tokens=tokens, lengths=torch.full((4,), 10), trainable=(torch.arange(10) > 2).expand(4, 10))


def train(task, meeting):
    rank, folder = task["rank"], Path(task["folder"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/trainer", rank=rank, world_size=2)
    lora = LoraConfig(rank=4) if task["lora"] else None
    backend = DTensorBackend(make_model(task["family"]), DTensorConfig(**task["config"], lora_cfg=lora))
    backend.start_training(OptimizerConfig(lr=1e-2), num_steps=2)
    source = StateDictSource(adapter_tensors(backend.model)) if task["alone"] else weight_source(backend)
    refit = Refit(source, transport=SlotStream(), rendezvous=meeting)
    examples = make_examples()
    for version in (1, 2):
        backend.forward_backward(examples, lambda logp, rows: (-(logp * rows.trainable).sum() / 28, {}))
        backend.optim_step()
        backend.shards()
        refit(version=version)
    if task["alone"]:
        backend.save_adapter(folder / "saved", base_model_name="tiny")
    else:
        backend.save_pretrained(folder / "saved")
    dist.barrier()
    dist.destroy_process_group()


def receive(task, meeting):
    engine = make_model(task["family"])
    for parameter in engine.parameters():
        torch.nn.init.zeros_(parameter)
    if task["alone"]:  # an engine that keeps adapters by number
        like = adapter_tensors(add_lora(engine, LoraConfig(rank=4)))
        copy = lambda number, tensors: {name: tensor.clone() for name, tensor in tensors.items()}  # noqa: E731
        sink = AdapterSink({name: tensor.detach() for name, tensor in like.items()}, load=copy, unload=lambda *_: None)
    else:
        sink = ModuleSink(engine)
    refit = Refit(sink=sink, transport=SlotStream(), rendezvous=meeting)
    for _ in range(2):
        refit.receive()
    received = sink.current if task["alone"] else dict(engine.named_parameters())
    torch.save(received, Path(task["folder"]) / "received.pt")


def main(task):
    torch.set_num_threads(1)
    role = {"sink_rank": 0} if task["rank"] is None else {"source_rank": task["rank"]}
    meeting = Rendezvous(f"file://{task['folder']}/refit", num_sources=2, num_sinks=1, **role)
    (receive if task["rank"] is None else train)(task, meeting)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
