"""One rank: predict the memory of steps, then take those steps for real and measure. Started by test_dry_run.py.

python dry_run.py TASK      (JSON: folder, rank, ranks, cases)
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import transformers
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_backends import DTensorBackend, DTensorConfig
from rl_backends.config import LoraConfig
from rl_backends.dry_run.explanation import StepRequest, predict
from rl_backends.dry_run.fake import rows_of, run_step
from rl_backends.optimizers.config import OptimizerConfig
from rl_parallel_plans.forecast import Ledger

SIZES = {
    "vocab_size": 4000,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


class LargestTensor(TorchDispatchMode):
    """Bytes of the largest tensor that any operator makes."""

    num_bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(issubclass(kind, torch.distributed.tensor.DTensor) for kind in types):
            return NotImplemented
        result = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.num_bytes = max(self.num_bytes, leaf.nbytes)
        return result


def model_of(case):
    torch.manual_seed(0)
    family, sizes = case["family"], {**SIZES, **case.get("model", {})}
    torch.manual_seed(0)  # the same weights on every rank
    return getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, f"{family}Config")(**sizes))


def config_of(case):
    lora = LoraConfig(**case["lora"]) if "lora" in case else None
    return DTensorConfig(**case["config"], lora_cfg=lora)


def asked(case):
    optimizer = OptimizerConfig(lr=1e-3, **case.get("optimizer", {}))
    return {
        "optimizer": optimizer,
        **{key: case[key] for key in ("reference",) if key in case},
    }


def predicted(case, ranks):
    config = config_of(case)
    return predict(model_of(case), config, world_size=ranks, lengths=case["lengths"], **asked(case)).as_dict()


def measured(case, ranks):
    """The peak of every phase. Of several ranks the lower of two runs: a thread of gloo that is late to let go of what
    it has sent, on a busy machine, only adds to a peak."""
    step = StepRequest(lengths=tuple(case["lengths"]), **asked(case))
    runs = []
    for _ in range(min(ranks, 2)):
        ledger = Ledger()
        run_step(lambda: DTensorBackend(model_of(case), config_of(case)), step, ledger=ledger)
        runs.append({name: {"num_bytes": peak.total, **peak.by_category} for name, peak in ledger.peaks().items()})
    return {name: min((run[name] for run in runs), key=lambda peak: peak["num_bytes"]) for name in runs[0]}


def largest(case):
    """Of logp and forward_backward, with the bytes of the largest parameter."""
    backend = DTensorBackend(model_of(case), config_of(case))
    rows = rows_of(case["lengths"], backend)
    found = {"weight": max(world_local(p).nbytes for p in backend.model.parameters())}
    with LargestTensor() as mode:
        backend.logp(rows)
    found["logp"] = mode.num_bytes
    with LargestTensor() as mode:
        backend.forward_backward(rows, lambda logp, _: (-logp.sum(), {}))
    found["forward_backward"] = mode.num_bytes
    return found


def world_local(parameter):
    return parameter.to_local() if hasattr(parameter, "to_local") else parameter


def main(task):
    torch.set_num_threads(1)
    rank, ranks, folder = task["rank"], task["ranks"], Path(task["folder"])
    names = {name: case for name, case in task["cases"].items() if "largest" not in case}
    found = {name: {"predicted": predicted(case, ranks)} for name, case in names.items()} if rank == 0 else {}
    assert not dist.is_initialized()
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{ranks}", rank=rank, world_size=ranks)
    for name, case in task["cases"].items():
        made = largest(case) if "largest" in case else measured(case, ranks)
        found.setdefault(name, {})["measured"] = made
    (folder / f"{ranks}-{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
