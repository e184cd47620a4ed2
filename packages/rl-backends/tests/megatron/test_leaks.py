"""Claims about what is left: no process, no open pipe, and an interpreter that ends by itself."""

import subprocess
import sys

import forked
import pytest

PROGRAM = """
import dataclasses, sys, typing
import torch, torch.distributed as dist
from rl_backends import OptimizerConfig
from rl_backends.megatron.backend import MegatronBackend
from rl_backends.megatron.config import MegatronConfig

rank, ranks, folder, ends = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
torch.set_num_threads(1)
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
config = MegatronConfig(tensor_model_parallel_size=ranks)
backend = MegatronBackend.from_pretrained(f"{folder}/model", config)
backend.start_training(OptimizerConfig(lr=1e-3), num_steps=2)

@dataclasses.dataclass(frozen=True)
class Examples:
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor
    rows_per_unit: typing.ClassVar[int] = 1

lengths = torch.tensor([6, 5])
places = torch.arange(6)
examples = Examples(torch.arange(12).view(2, 6), lengths, (places > 0) & (places < lengths[:, None]))
reference = backend.freeze_reference()
print(tuple(reference.logp(examples).shape), flush=True)
backend.save_checkpoint(f"{folder}/first", asynchronous=True)
backend.save_checkpoint(f"{folder}/second")
if ends == "closed":
    backend.close()
if ends == "by an error":
    raise SystemExit(3)
print("end of the program", flush=True)
"""


@pytest.mark.parametrize(
    ("ranks", "ends", "code"),
    [(1, "by an error", 3), pytest.param(2, "closed", 0, marks=pytest.mark.slow)],
    ids=["one rank that fails", "two ranks"],
)
def test_a_program_that_has_used_a_backend_ends_and_leaves_nothing_behind(world, tmp_path, ranks, ends, code):
    world.make_model("Qwen3").save_pretrained(tmp_path / "model")
    with forked.adopted_orphans() as before:
        programs = [
            subprocess.Popen(
                [sys.executable, "-c", PROGRAM, str(rank), str(ranks), str(tmp_path), ends],
                stdout=subprocess.PIPE,  # whose end is only seen when nobody holds it open
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        try:
            said = [program.communicate(timeout=600)[0] for program in programs]
        finally:
            for program in programs:
                program.kill()
        left = forked.end_all(forked.started_since(before))
    assert [program.returncode for program in programs] == [code] * ranks, said
    assert all(("end of the program" in text) == (code == 0) for text in said), said
    assert left == []
