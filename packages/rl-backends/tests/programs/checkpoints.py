"""Checkpoints over real ranks. Started once by test_checkpoint_ranks.py; forks the ranks of each phase.

    python checkpoints.py FOLDER PHASE...

A phase is a list of acts on as many ranks; what an act finds goes to FOLDER/<phase>.<act>.json, written by each rank.
"""

import contextlib
import importlib.util
import json
import os
import resource
import signal
import sys
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import register_fsdp_forward_method

import rl_parallel_plans as plans
from rl_backends.checkpoints.loading import load_checkpoint
from rl_backends.checkpoints.saving import find_latest, prune, save_checkpoint
from rl_backends.errors import CheckpointError, RankError
from rl_backends.rank_agreement import gather_text, host_group, on_every_rank, on_rank_0


def load_world():
    spec = importlib.util.spec_from_file_location("world", Path(__file__).parents[1] / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["world"] = module
    spec.loader.exec_module(module)
    return module


world = load_world()


SIZES = {"Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}}


class Optimizers:
    """AdamW and a schedule of one number: what the checkpoints ask of a package of optimizers."""

    def __init__(self, parameters, kind=torch.optim.AdamW, **options):
        self.each = (kind(parameters, lr=1e-2, **options),)
        self.steps = 0

    def step(self):
        self.steps += 1
        self.each[0].param_groups[0]["lr"] = 1e-2 / self.steps
        self.each[0].step()
        self.each[0].zero_grad()

    def schedule_state(self):
        return {"steps": self.steps}

    def load_schedule_state(self, state):
        self.steps = state["steps"]


@dataclass
class Run:
    """A model on a mesh, in training."""

    model: object
    mesh: object
    optimizers: Optimizers

    @classmethod
    def start(cls, family, *, seed, tp=1, replicate=1, ep=1):
        model = world.make_model(family, seed=seed, **SIZES.get(family, {}))
        ranks = dist.get_world_size()
        mesh = init_device_mesh(
            "cpu",
            (replicate, ranks // replicate // ep // tp, ep, tp),
            mesh_dim_names=("dp_replicate", "dp", "ep", "tp"),
        )
        model.row_logp = row_logp.__get__(model)
        if ranks > 1:
            plans.parallelize(
                model,
                mesh,
                plans.plan_for(model, tp=tp, ep=ep),
                dp_axis="dp" if ep == 1 else ("dp", "ep"),
                dp_replicate_axis="dp_replicate" if replicate > 1 else None,
            )
            register_fsdp_forward_method(model, "row_logp")
        return cls(model, mesh, Optimizers(model.parameters(), eps=1e-4, weight_decay=0.1))

    def train(self, steps):
        rows = torch.arange(4 * 9).view(4, 9) % 67
        mine = rows[dist.get_rank() // self.mesh["tp"].size() :: dist.get_world_size() // self.mesh["tp"].size()]
        for _ in range(steps):
            loss = -self.model.row_logp(mine).sum() / 32 + 0.0
            loss.backward()
            self.optimizers.step()
        return self

    def whole(self):
        """Weights and moments as the unsharded model has them, without help of what is tested."""
        state = self.optimizers.each[0].state
        found = {}
        for shard in plans.named_shards(self.model):
            found[shard.name] = whole(shard.tensor, shard.row_order)
            for key, value in state.get(shard.tensor, {}).items():
                found[f"{shard.name}/{key}"] = whole(value, shard.row_order if value.ndim else None)
        return found

    def save(self, folder, **options):
        return save_checkpoint(self.model, self.optimizers, folder, version=self.optimizers.steps, **options)

    def load(self, folder, **options):
        return load_checkpoint(self.model, self.optimizers, folder, **options)


def row_logp(self, ids):
    hidden = self.model(input_ids=ids).last_hidden_state[:, :-1]
    return plans.linear_logp(hidden.flatten(0, 1), self.lm_head, ids[:, 1:].flatten())


def whole(tensor, order):
    full = (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach().clone()
    if order is None:
        return full
    of_ranks = (full if order.dim else full.transpose(0, 1)).flatten(order.dim, order.dim + 1)
    return torch.empty_like(of_ranks).index_copy_(order.dim, order.rows.flatten(), of_ranks)


def differing(ours, theirs):
    assert ours.keys() == theirs.keys()
    return [name for name in ours if not torch.equal(ours[name], theirs[name])]


def distance(ours, theirs):
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in theirs if "/" not in name)


def remembered(folder, name):
    return torch.load(folder / f"{name}.pt", weights_only=True)


# -- Acts -----------------------------------------------------------------------------------------


def write(folder, *, name, family, tp=1, ep=1):
    """Train, save, go on; then resume on the same mesh from other weights and take the same steps."""
    run = Run.start(family, seed=0, tp=tp, ep=ep).train(2)
    run.save(folder / name, extra={"family": family})
    saved, rng = run.whole(), torch.get_rng_state()
    after = run.train(2).whole()
    if dist.get_rank() == 0:
        torch.save(saved, folder / f"{name}.saved.pt")
        torch.save(after, folder / f"{name}.after.pt")
    again = Run.start(family, seed=1, tp=tp, ep=ep)
    torch.manual_seed(7)
    state = again.load(folder / name)
    return {
        "version": state.version,
        "extra": state.extra,
        "rng": state.rng_restored and torch.equal(torch.get_rng_state(), rng),
        "differ when loaded": differing(again.whole(), saved),
        "differ two steps on": differing(again.train(2).whole(), after),
    }


def read(folder, *, name, source, family, tp=1, replicate=1, again=None):
    """Resume on another mesh what `name` wrote; save there as `again`."""
    run = Run.start(family, seed=1, tp=tp, replicate=replicate)
    state = run.load(folder / source)
    found = {"version": state.version, "differ": differing(run.whole(), remembered(folder, f"{name}.saved"))}
    if again is not None:
        run.save(folder / again)
        found["numbers"] = numbers_in(folder / again)
        found["parameters"] = sum(parameter.numel() for parameter in run.model.parameters())
        found["files"] = sorted(path.name for path in (folder / again).iterdir())
    found["distance"] = distance(run.train(2).whole(), remembered(folder, f"{name}.after"))
    return found


def full_disk(folder, *, asynchronous):
    """One rank cannot write all of its file."""
    parent = folder / f"full-{asynchronous}"
    run = Run.start("Qwen3", seed=0).train(1)
    run.save(parent / "step-1")
    saved = run.whole()
    run.train(1)
    write_later = None
    with limited_files(2048 if dist.get_rank() == 1 else None):
        try:
            write_later = run.save(parent / "step-2", asynchronous=asynchronous)
            write_later.wait()
            error = ""
        except CheckpointError as caught:
            error = str(caught)
    dist.barrier()  # rank 0 removes what was written
    kept = sorted(path.name for path in parent.iterdir())
    again = Run.start("Qwen3", seed=1)
    again.load(find_latest(parent))
    run.save(parent / "step-2b", asynchronous=asynchronous).wait()  # the failure was told: this one goes on
    return {
        "error": error,
        "returned first": write_later is not None,
        "kept": kept,
        "differ": differing(again.whole(), saved),
        "then": sorted(path.name for path in parent.iterdir()),
    }


def failure_at_next_save(folder):
    """Nobody waits for a save that fails on one rank."""
    run = Run.start("Qwen3", seed=0)
    with limited_files(2048 if dist.get_rank() == 1 else None):
        first = run.save(folder / "next" / "step-1", asynchronous=True)
        gather_text("the file is limited until here")
        while not first.done:
            pass
    try:
        run.save(folder / "next" / "step-2")
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    run.save(folder / "next" / "step-3")
    return {"error": error, "complete": sorted(path.name for path in (folder / "next").iterdir())}


def damaged_file(folder, *, name):
    """The digests of files are shared out among ranks: the one who finds it tells the other."""
    path = folder / name / "rank-00001-of-00002.safetensors"
    if dist.get_rank() == 0:
        flip_last_byte(path)
    dist.barrier()
    run = Run.start("Qwen3", seed=1)
    before = run.whole()
    try:
        run.load(folder / name)
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    changed = differing(run.whole(), before)
    dist.barrier()
    if dist.get_rank() == 0:
        flip_last_byte(path)
    return {"error": error, "changed": changed}


def refused_schedule(folder, *, name):
    """The stage of one rank is over: the schedule of the other, which has moved, moves back."""

    def refuse(state):
        raise CheckpointError("the stage is over by then")

    run = Run.start("Qwen3", seed=1)
    before = run.whole()
    if dist.get_rank() == 1:
        run.optimizers.load_schedule_state = refuse
    try:
        run.load(folder / name)
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    return {"error": error, "steps": run.optimizers.steps, "changed": differing(run.whole(), before)}


def killed_rank(folder):
    """Rank 1 is killed as it opens its file: rank 0 is told and does not hang."""
    parent = folder / "killed-rank"
    run = Run.start("Qwen3", seed=0).train(1)
    run.save(parent / "step-1")
    run.train(1)
    if dist.get_rank() == 1:
        kill_at("open", "rank-00001-of-00002.safetensors")
    try:
        run.save(parent / "step-2")
        error = ""
    except CheckpointError as caught:
        error = str(caught)
    return {"error": error, "kept": sorted(path.name for path in parent.iterdir())}


def together(folder):
    """What ranks do together, and how each is told of a failure."""

    def fail_on_1():
        if dist.get_rank() == 1:
            raise ValueError("näher als erlaubt")
        return "fine"

    def told(action):
        try:
            return action()
        except (ValueError, RankError) as error:
            return f"{type(error).__name__}: {error}"

    def fail():
        raise OSError("no room")

    return {
        "fine": on_every_rank(lambda: dist.get_rank() + 1),
        "one fails": told(lambda: on_every_rank(fail_on_1)),
        "rank 0 fails": told_of(lambda: on_rank_0(fail)),
        "texts": gather_text(["", "zweiter"][dist.get_rank()]),
        "timeout of the host's group": str(host_group()._get_backend(torch.device("cpu")).options._timeout),
    }


def told_of(action):
    try:
        action()
    except (OSError, RankError) as error:
        return f"{type(error).__name__}: {error}"


def pruned(folder):
    """All ranks are told what was removed."""
    run = Run.start("Qwen3", seed=0)
    for step in (1, 2, 3):
        run.save(folder / "pruned" / f"step-{step}")
    removed = prune(folder / "pruned", keep=1)
    return {"removed": [path.name for path in removed], "kept": [each.name for each in (folder / "pruned").iterdir()]}


def killed_at(folder, *, point, event, name):
    """The process is killed in the midst of its second save."""
    parent = folder / "kills" / point
    run = Run.start("Qwen3", seed=0).train(1)
    run.save(parent / "step-1")
    run.train(1)
    if event == "full":
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)  # Python ignores it; by default it kills in the midst of a write
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    else:
        kill_at(event, name)
    run.save(parent / "step-2")
    return {}


# -- Means ----------------------------------------------------------------------------------------


def kill_at(event, name):
    def hook(happened, arguments):
        if happened == event and any(str(argument).endswith(name) for argument in arguments):
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


@contextlib.contextmanager
def limited_files(num_bytes):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if num_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def numbers_in(folder):
    """How many numbers of weights and of moments lie in the files."""
    found = {"weights": 0, "exp_avg": 0}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is no dict
                kind, *_, last = key.partition("@")[0].split("/")
                for name in found:
                    if name in (kind, last):
                        found[name] += file.get_tensor(key).numel()
    return found


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


KILLS = {
    "data not begun": {"event": "open", "name": "rank-00000-of-00001.safetensors"},
    "data half written": {"event": "full", "name": ""},
    "index": {"event": "open", "name": "tensors.json"},
    "state": {"event": "open", "name": "state.json"},
    "marker": {"event": "open", "name": "checkpoint.json"},
    "rename": {"event": "os.rename", "name": "step-2"},
    "named": {"event": "open", "name": "named"},  # the folder is synchronized, and that is all that was left to do
}
PHASES = {
    "two": (
        2,
        {
            "write FSDP": (write, {"name": "fsdp2", "family": "Qwen3"}),
            "write TP": (write, {"name": "tp2", "family": "Qwen3", "tp": 2}),
            "write fused TP": (write, {"name": "phi3", "family": "Phi3", "tp": 2}),
            "write MoE": (write, {"name": "moe", "family": "Qwen3Moe", "tp": 2}),
            "read fused": (read, {"name": "phi3", "source": "phi3", "family": "Phi3"}),
            "read MoE": (read, {"name": "moe", "source": "moe", "family": "Qwen3Moe"}),
            "replicas": (
                read,
                {"name": "fsdp2", "source": "fsdp2", "family": "Qwen3", "replicate": 2, "again": "hsdp"},
            ),
            "full": (full_disk, {"asynchronous": False}),
            "full later": (full_disk, {"asynchronous": True}),
            "next save": (failure_at_next_save, {}),
            "damaged": (damaged_file, {"name": "fsdp2"}),
            "refused schedule": (refused_schedule, {"name": "fsdp2"}),
            "pruned": (pruned, {}),
            "together": (together, {}),
        },
    ),
    "experts on two": (2, {"write": (write, {"name": "ep2", "family": "Qwen3Moe", "ep": 2})}),
    "experts on one": (1, {"read": (read, {"name": "ep2", "source": "ep2", "family": "Qwen3Moe"})}),
    "killed": (2, {"killed": (killed_rank, {})}),
    "four": (
        4,
        {
            "FSDP": (read, {"name": "fsdp2", "source": "fsdp2", "family": "Qwen3", "again": "fsdp4"}),
            "TP to FSDP": (read, {"name": "tp2", "source": "tp2", "family": "Qwen3"}),
            "both": (read, {"name": "phi3", "source": "phi3", "family": "Phi3", "tp": 2, "again": "both"}),
        },
    ),
    "one": (
        1,
        {
            "FSDP": (read, {"name": "fsdp2", "source": "fsdp4", "family": "Qwen3"}),
            "both": (read, {"name": "phi3", "source": "both", "family": "Phi3"}),
        },
    ),
    **{f"kill {point}": (1, {"kill": (killed_at, {"point": point, **kill})}) for point, kill in KILLS.items()},
}


def act(rank, ranks, folder, phase, acts):
    rendezvous = f"file://{folder}/rendezvous-{phase}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=ranks, timeout=timedelta(minutes=3))
    for name, (action, options) in acts.items():
        found = action(folder, **options)
        (folder / f"{phase}.{name}.{rank}.json").write_text(json.dumps(found))
    if phase != "killed":
        dist.barrier()  # a rank that leaves early tears connections that another still reads
        dist.destroy_process_group()


def fork_ranks(folder, phase, ranks, acts):
    children = []
    for rank in range(ranks):
        if (child := os.fork()) == 0:
            try:
                act(rank, ranks, folder, phase, acts)
            except BaseException:  # noqa: BLE001 - a fork must not go on as its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def main(folder, phases=tuple(PHASES)):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = Path(folder)
    for family in ("Qwen3", "Phi3", "Qwen3Moe"):  # so that what is imported late is imported once, before the forks
        model = world.make_model(family, **SIZES.get(family, {}))
        row_logp(model, torch.ones(1, 3, dtype=torch.int64)).sum().backward()
        Optimizers(model.parameters()).step()
        plans.plan_for(model, tp=2)
    assert plans.parallelize
    codes = {phase: fork_ranks(folder, phase, *PHASES[phase]) for phase in phases}
    (folder / "codes.json").write_text(json.dumps(codes))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or PHASES)
