"""One rank of a GRPO run on the quickstart's task: each trains its part of the policy and has an engine of its own.

argv[1]: JSON of {"folder": of the model, "out": folder, "dtensor": options, "megatron": options or null, "steps": int}.
Under torchrun over its ranks, otherwise alone. Rank 0 writes what was logged, and its engine's weights after the first
step and after the last; each rank writes the digest of the latter and what its refits have moved.
"""

import copy
import hashlib
import itertools
import json
import os
import sys
import types
from pathlib import Path

import torch
import torch.distributed as dist

from rl_algorithms import grpo
from rl_algorithms.chat import Chat
from rl_algorithms.data import batches
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_backends import (
    DTensorConfig,
    MegatronConfig,
    OptimizerConfig,
    load_causal_lm,
    load_tokenizer,
    select_backend,
)
from rl_generation import Sampling, TransformersEngine
from rl_launcher.build.engines import weight_source
from rl_launcher.quickstart.sort_digits import dataset, reward
from rl_refit import ModuleSink, Refit, Rendezvous, SlotStream

CONFIG = grpo.GRPOConfig(max_num_steps=4, num_prompts=8, num_generations_per_prompt=8)
# eps as large as this makes a step of AdamW nearly the gradient itself, which the weights then tell element by element.
OPTIMIZER = OptimizerConfig(lr=0.5, eps=10.0, max_grad_norm=1.0, schedule="constant")


class Sync:
    """The refit, and what it moved. The engine's first weights are zeros, so that nothing but a refit can fill it."""

    def __init__(self, policy, engine, folder):
        rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.engine = engine
        self.sent = {}
        sink = ModuleSink(engine.model, on_commit=engine.commit_version)
        if ranks == 1:
            self.refit = Refit(weight_source(policy), sink)
        else:
            meeting = Rendezvous(
                f"file://{folder}/refit", num_sources=ranks, num_sinks=ranks, source_rank=rank, sink_rank=rank
            )
            self.refit = Refit(weight_source(policy), sink, transport=SlotStream(), rendezvous=meeting)
        self.rank, self.folder = rank, folder

    def __call__(self, *, version):
        report = self.refit(version)
        plan = self.refit.plan
        assert plan.bytes_received(self.rank) == plan.lower_bound(self.rank) > 0
        self.sent[version] = {
            "received": plan.bytes_received(self.rank),
            "sent": plan.bytes_sent(self.rank),
            "verified": report.verified,
        }
        if version == 1 and self.rank == 0:
            torch.save(self.engine.model.state_dict(), self.folder / "after_one_step.pt")
        return report


def make_engine(model, chat):
    own = copy.deepcopy(model)
    for parameter in own.parameters():
        torch.nn.init.zeros_(parameter)
    return TransformersEngine(own, stop_token_ids=chat.stop_token_ids, pad_token_id=0, max_batch_size=64, seed=0)


def run(task):
    folder = Path(task["out"])
    tokenizer, model = load_tokenizer(task["folder"]), load_causal_lm(task["folder"])
    chat = Chat(tokenizer, prompt_format="chat", stop_token_ids=(tokenizer.eos_token_id,))
    engine = make_engine(model, chat)
    configs = types.SimpleNamespace(
        dtensor_cfg=DTensorConfig(**task["dtensor"]),
        megatron_cfg=MegatronConfig(enabled=task["megatron"] is not None, **(task["megatron"] or {})),
    )
    policy = select_backend(configs).make(model)
    policy.start_training(OPTIMIZER, num_steps=CONFIG.max_num_steps, temperature=1.0)
    sync = Sync(policy, engine, folder)
    sync(version=0)
    logged = list(
        itertools.islice(
            grpo.train(
                policy=policy,
                engine=engine,
                weight_sync=sync,
                environment=RewardFunctionEnvironment(reward=reward),
                prompts=batches([chat.prompt(row) for row in dataset().train], size=CONFIG.num_prompts, seed=0),
                chat=chat,
                sampling=Sampling(max_new_tokens=9, temperature=1.0),
                config=CONFIG,
            ),
            task["steps"],
        )
    )
    policy.save_pretrained(folder / "saved")
    if sync.rank == 0:
        (folder / "logged.json").write_text(json.dumps(logged))
        torch.save(engine.model.state_dict(), folder / "engine.pt")
    weights = b"".join(tensor.numpy().tobytes() for tensor in engine.model.state_dict().values())
    digest = hashlib.sha256(weights).hexdigest()
    (folder / f"engine_{sync.rank}.json").write_text(json.dumps({"digest": digest, "refits": sync.sent}))
    sync.refit.close()
    policy.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    os.environ["HF_HUB_OFFLINE"] = "1"
    run(json.loads(sys.argv[1]))
