"""A comparison of a backend with plain transformers: the truth, the ranks, and what they have written against it.

The truth is of a small model and a few rows: what plain transformers and AdamW make of them in float32, one row at a
time, without padding, on whole logits. In each rank the backend takes the same steps, and writes the parts that it
holds into <rank>.pt: "logp", "grad_norm", and the parts of "gradients" and "weights"; or "refused", in words.

Axes: B rows, T tokens.
"""

import argparse
import functools
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.errors import MissingDependencyError
from rl_backends.examples import TokenRows
from rl_backends.optimizers import OptimizerConfig
from rl_parallel_plans import named_shards

STEPS, LR, WEIGHT_DECAY, MAX_GRAD_NORM, BETAS = 3, 1e-2, 0.01, 1.0, (0.9, 0.95)
EPS = 1e-4
"""Large, so that Adam does not blow the rounding of gradients near 0 up to whole steps."""

NOT_A_NUMBER = 1e300


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallModel:
    """What was saved to be compared with."""

    described: str
    vocabulary: int
    """Words that rows may hold."""
    padding: int | None
    """The one that rows do not hold, since transformers never trains its embedding; None where there is none."""


@dataclass(frozen=True)
class VerifyRows(TokenRows):
    """Ragged rows, each with a weight in the loss."""

    weight: Float[Tensor, " B"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plain:
    """What comes out."""

    logp: Float[Tensor, "B T"]
    gradients: dict[str, Tensor]
    """Of the first step."""
    grad_norm: float
    weights: dict[str, Tensor]
    """After the last."""


def save_small_model(
    arguments: argparse.Namespace, folder: Path, *, tp: int, pp: int = 1, keep_heads: bool = False
) -> SmallModel:
    """Write a model of the kind that `arguments.model` names, small, with random weights.

    tp: ranks that its heads can be shared out to.
    pp: stages, or chunks of stages, that its layers can be shared out to.
    keep_heads: leave the size of a head as it is, on which kernels of attention depend.
    """
    from transformers.utils import logging

    from rl_parallel_plans.model_source import build, read_config
    from rl_parallel_plans.verification.shrink import shrunk

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    trust = arguments.trust_remote_code
    config: Any = read_config(arguments.model, revision=arguments.revision, trust_remote_code=trust)
    if not arguments.no_shrink:
        own, tp = config, max(2, tp)
        config = shrunk(own, tp=tp)
        if left := config.num_hidden_layers % pp:
            config = shrunk(own, tp=tp, extra_layers=pp - left)
        if keep_heads and (head_dim := getattr(own, "head_dim", None)) is not None:
            config.head_dim = head_dim
    torch.manual_seed(arguments.seed)
    model: Any = build(config, device="cpu", dtype=torch.float32, trust_remote_code=trust)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of 1 and biases of 0 would be trivially right
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    model.save_pretrained(folder)
    embeddings = model.get_input_embeddings()
    return SmallModel(
        described=f"{type(model).__name__} of {sum(p.numel() for p in model.parameters()):,} parameters",
        vocabulary=embeddings.weight.shape[0],
        padding=getattr(embeddings, "padding_idx", None),
    )


def make_rows(
    *, rows: int, seed: int, vocabulary: int, padding: int | None = None, shortest: int = 5, longest: int = 13
) -> VerifyRows:
    """The same rows in every process, of `shortest` to `longest` tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, vocabulary, (rows, longest), generator=generator)
    if padding is not None:
        tokens = torch.where(tokens == padding, (padding + 1) % vocabulary, tokens)
    lengths = torch.randint(shortest, longest + 1, (rows,), generator=generator)
    starts = torch.randint(1, 4, (rows,), generator=generator)
    place = torch.arange(longest)
    return VerifyRows(
        tokens=tokens,
        lengths=lengths,
        trainable=(place >= starts[:, None]) & (place < lengths[:, None]),
        weight=torch.randn(rows, generator=generator),
    )


def loss_of(logp: Float[Tensor, "b w"], rows: VerifyRows, *, num_tokens: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Of a sign and a size for each row, over the tokens of the whole batch."""
    total = -(torch.where(rows.trainable, logp, 0.0) * rows.weight[:, None]).sum() / num_tokens
    return total, {"loss": total.detach()}


def plain_result(folder: Path, batch: VerifyRows) -> Plain:
    """Three steps without the backend."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)  # in eval mode
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}],
        lr=LR,
        betas=BETAS,
        eps=EPS,
    )
    with torch.no_grad():
        logp = _logp(model, batch)
    gradients: dict[str, Tensor] = {}
    norm = 0.0
    for step in range(STEPS):
        value, _ = loss_of(_logp(model, batch), batch, num_tokens=int(batch.trainable.sum()))
        torch.autograd.backward(value)
        if step == 0:
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            norm = float(torch.nn.utils.get_total_norm(list(gradients.values())))
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return Plain(logp=logp, gradients=gradients, grad_norm=norm, weights=weights)


def _logp(model: nn.Module, rows: VerifyRows) -> Tensor:
    out = torch.zeros(rows.tokens.shape)
    for row, length in enumerate(rows.lengths.tolist()):
        tokens = rows.tokens[row, :length]
        logits = model(input_ids=tokens[None]).logits[0, :-1].float()
        logp = logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0]
        asked = rows.trainable[row, 1:length]
        out = out.index_put((torch.tensor([row]), torch.arange(1, length)[asked]), logp[asked])
    return out


# ---- The ranks.

Part = tuple[str, tuple[int, ...], Tensor]
"""Name, offsets and numbers of a part of a tensor."""
Found = dict[str, Any]
"""What a rank has found, as the top of this file lists it."""

OPTIMIZER = OptimizerConfig(
    lr=LR, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, schedule="constant", max_grad_norm=MAX_GRAD_NORM
)


def run_ranks(task: Mapping[str, Any], *, deadline_s: float) -> list[Found]:
    """Run the task on `task["ranks"]` processes over gloo, in `task["folder"]`; return what each found.

    All of them are ended when one fails, and at the deadline.
    """
    folder, ranks = Path(task["folder"]), int(task["ranks"])
    # Ranks are CPU ranks, and Megatron takes a GPU where it sees one.
    with patch.dict(os.environ, CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"):
        started = start_processes(  # type: ignore[no-untyped-call]
            _run_rank, args=(task,), nprocs=ranks, join=False, start_method="spawn"
        )
    until = time.monotonic() + deadline_s
    try:
        while not started.join(timeout=max(0.0, until - time.monotonic())):
            if time.monotonic() > until:
                raise TimeoutError(
                    f"the ranks were not done after {deadline_s:g} s, and were ended; raise --deadline-s"
                )
    except ProcessException as failure:
        raise RuntimeError(f"rank {failure.error_index}: {str(failure).strip().splitlines()[-1]}") from failure
    finally:
        for process in started.processes:
            process.kill()
            process.join()
    found: list[Found] = [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]
    for each in found:
        if "refused" in each:
            raise ValueError(each["refused"])
    return found


def _run_rank(rank: int, task: Mapping[str, Any]) -> None:
    """Do the task as one rank; what is refused is written down, and other failures are raised."""
    for output in (1, 2):  # what libraries say is no result, and what goes wrong is raised
        os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    folder = Path(task["folder"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=task["ranks"])
    try:
        found = result_of_rank(task)
    except (ValueError, MissingDependencyError) as refusal:  # of ours, and of what ours builds on: PlanError too
        found = {"refused": str(refusal)}
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()  # a rank that leaves early tears connections that others still read
    dist.destroy_process_group()


def result_of_rank(task: Mapping[str, Any]) -> Found:
    """Let the backend take its steps on this rank. What Megatron was given is saved again before it trains."""
    folder, config = Path(task["folder"]), task["config"]
    backend: Any
    if task["backend"] == "megatron":
        from rl_backends.megatron.backend import MegatronBackend

        backend = MegatronBackend.from_pretrained(str(folder / "model"), config)
        backend.save_pretrained(folder / "untrained")
    else:
        backend = DTensorBackend.from_pretrained(str(folder / "model"), config)
    rows = make_rows(**task["rows"])
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found: Found = {"logp": backend.logp(rows)}
    backend.forward_backward(rows, loss)
    found["gradients"] = _copied(gradients(backend))
    backend.start_training(OPTIMIZER, num_steps=STEPS)  # from no gradient
    for step in range(STEPS):
        backend.forward_backward(rows, loss)
        norm = backend.optim_step()
        if step == 0:
            found["grad_norm"] = torch.tensor([norm])
    boxes = ((shard, box) for shard in backend.shards() for box in shard.boxes())
    found["weights"] = _copied((s.name, tuple(box.offsets), box.of_local(s.local.detach())) for s, box in boxes)
    backend.save_pretrained(folder / "saved")
    backend.close()
    return found


def gradients(backend: Any) -> Iterator[Part]:
    """Name, offsets and numbers of every part of a gradient that this rank holds.

    Megatron's ranks sum them up for it: the backend must forget them before it goes on.
    """
    if not isinstance(backend, DTensorBackend):
        from rl_backends.megatron.gradients import summed_gradients

        yield from summed_gradients(backend._distributed, backend._optimizers)  # noqa: SLF001 - ours
        return
    for shard in named_shards(backend.model):
        if (gradient := shard.tensor.grad) is not None:
            local = shard.local_of(gradient)
            for box in shard.boxes(gradient):
                yield shard.name, tuple(box.offsets), box.of_local(local)


def _copied(parts: Iterable[Part]) -> list[Part]:
    return [(name, at, numbers.clone(memory_format=torch.contiguous_format)) for name, at, numbers in parts]


# ---- What ranks have written, put together again and compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    """What is compared."""
    difference: float
    """The largest one, relative to the largest number of its tensor; 1e300 where numbers are missing or not finite."""
    where: str
    """The tensor that has it."""
    holds: bool
    """Whether it is within the tolerance."""


def compare(
    folder: Path, truth: Plain, found: Sequence[Found], *, tolerance: float, untrained: torch.dtype | None = None
) -> list[Check]:
    """Every check, over what each rank has found, and what they have saved in `folder`.

    untrained: of the weights that ranks have saved before they trained, as they came; None where they have not.
    """
    logps = {f"rank {rank}": each["logp"] for rank, each in enumerate(found)}
    norm, plain_norm = found[0]["grad_norm"], torch.tensor([truth.grad_norm])
    weights = _whole(found, "weights", truth.weights)
    checks = [
        check("log-probabilities", logps, dict.fromkeys(logps, truth.logp), tolerance=tolerance),
        check("gradients", _whole(found, "gradients", truth.gradients), truth.gradients, tolerance=tolerance),
        check("gradient norm", {"": norm}, {"": plain_norm}, tolerance=tolerance),
        check(f"weights after {STEPS} steps", weights, truth.weights, tolerance=tolerance),
    ]
    checks.append(_saved(folder / "saved", weights, name="saved and loaded again"))
    if untrained is not None:
        given = {name: tensor.to(untrained).float() for name, tensor in _loaded(folder / "model").items()}
        checks.append(_saved(folder / "untrained", given, name="there and back"))
    return checks


def _whole(found: Sequence[Found], kind: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors from the parts of all ranks; NaN where no rank has any."""
    whole = {name: torch.full_like(tensor, float("nan")) for name, tensor in like.items()}
    for name, offsets, numbers in (part for each in found for part in each[kind]):
        if name in whole:
            place = tuple(slice(start, start + size) for start, size in zip(offsets, numbers.shape, strict=True))
            whole[name][place] = numbers.to(whole[name].dtype)
    return whole


def check(name: str, found: Mapping[str, Tensor], truth: Mapping[str, Tensor], *, tolerance: float) -> Check:
    """Tensors by name against the truth, each relative to its largest entry."""
    floor = max(float(tensor.abs().max()) for tensor in truth.values()) * 1e-3
    worst, where = -1.0, ""
    for key, expected in truth.items():
        scale = max(float(expected.abs().max()), floor)
        apart = _apart(found[key], expected) / scale if scale else 0.0
        if apart > worst:
            worst, where = apart, key
    return Check(name=name, difference=worst, where=where, holds=worst <= tolerance)


def _apart(found: Tensor, expected: Tensor) -> float:
    """The largest difference; a number, since JSON has no NaN."""
    apart = float((found - expected).abs().max())
    return apart if math.isfinite(apart) else NOT_A_NUMBER


def _saved(folder: Path, weights: Mapping[str, Tensor], *, name: str) -> Check:
    """What from_pretrained makes of the folder has these weights, bit for bit."""
    loaded = _loaded(folder)
    if loaded.keys() != weights.keys():
        missing = sorted(loaded.keys() ^ weights.keys())
        return Check(name=name, difference=NOT_A_NUMBER, where=", ".join(missing[:3]), holds=False)
    pairs = {key: (tensor, loaded[key]) for key, tensor in weights.items()}
    differing = [
        key
        for key, (left, right) in pairs.items()
        if not (torch.equal(left, right) and torch.equal(left.signbit(), right.signbit()))  # 0.0 equals -0.0
    ]
    apart = max((_apart(loaded[key], weights[key]) for key in differing), default=0.0)
    return Check(name=name, difference=apart, where=", ".join(differing[:3]), holds=not differing)


def _loaded(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}
