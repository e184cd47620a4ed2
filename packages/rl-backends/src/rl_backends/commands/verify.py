"""`rl-backends verify`: is the backend, sharded and cut as asked, the same as plain transformers and AdamW in float32?

On a small model of the same kind as MODEL, with random weights: real ranks over gloo take the steps that this process
takes without the backend. Compared are log-probabilities, gradients, weights after three steps, and the saved folder
with those weights, bit for bit. Of the Megatron backend also what it saves before it trains with what it was given; and
rows are long, since a wrong rotary base shows in no others.

With `--each-kernel` every choice of kernels is a cell instead, on one rank of `--device`: values and gradients against
the same truth, tokens a second and MFU of a few steps, or the words in which it is refused.

The truth is what plain transformers and AdamW make of a few rows, one at a time, without padding, on whole logits. Each
rank writes the parts that it holds into <rank>.pt: "logp", "grad_norm", and the parts of "gradients" and "weights"; or
"refused", in words.

Axes: B rows, T tokens.

Exit codes: 0 it is; 1 it is not, or a rank failed; 2 refused.
"""

import argparse
import functools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from jaxtyping import Float
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessException, start_processes

from rl_backends.commands.flags import add_backend_flags, add_model_arguments, chosen_config
from rl_backends.commands.megatron_layout import readable_layout
from rl_backends.dtensor.backend import DTensorBackend
from rl_backends.errors import MissingDependencyError, some
from rl_backends.examples import TokenRows
from rl_backends.kernels.table import KERNELS
from rl_backends.megatron.installed import check_installed
from rl_backends.optimizers.config import OptimizerConfig
from rl_parallel_plans import named_shards
from rl_parallel_plans.model_source import build, read_config
from rl_parallel_plans.verification.shrink import shrunk

LEFT_OUT = ("device", "router_aux_loss_coef", "peak_flops_per_s", "timeout_s")
PREFERRED = {"micro_batch_size": 2}
LENGTHS = {"dtensor": (5, 13), "megatron": (512, 560)}
"""Tokens of the shortest row, and of the longest."""

STEPS, LR, WEIGHT_DECAY, MAX_GRAD_NORM, BETAS = 3, 1e-2, 0.01, 1.0, (0.9, 0.95)
EPS = 1e-4
"""Large, so that Adam does not blow the rounding of gradients near 0 up to whole steps."""

TOLERANCES = {"float32": 1e-5, "bfloat16": 0.1}
"""Of the largest relative difference where nobody said another; bfloat16 has 8 bits."""
NOT_A_NUMBER = 1e300


def add_arguments(parser: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """Declare what the command takes, with the flags of the backend that is asked for."""
    backend = add_model_arguments(parser, given)
    group = parser.add_argument_group("comparison")
    group.add_argument("--tolerance", type=float, metavar="X", help="default: 1e-5 in float32, 0.1 in bfloat16")
    group.add_argument("--no-shrink", action="store_true", help="the configuration is small already")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of weights and rows (default %(default)s)")
    group.add_argument(
        "--deadline-s", type=float, default=300.0, metavar="X", help="for all ranks (default %(default)s)"
    )
    group.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="where ranks compute (default %(default)s)"
    )
    group.add_argument(
        "--each-kernel", action="store_true", help="every choice of kernels, a cell each, on one rank of DTensor"
    )

    add_backend_flags(parser, backend, leave_out=LEFT_OUT)


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compare; it holds what is exact."""
    if arguments.ranks < 1:
        raise ValueError(f"--ranks must be at least 1; got {arguments.ranks}")
    if arguments.each_kernel:
        if arguments.ranks != 1 or arguments.backend != "dtensor":
            raise ValueError("--each-kernel compares kernels of the DTensor backend on one rank: leave out the others")
        return verify_each_kernel(arguments)
    if arguments.device == "cuda":
        raise ValueError("--device cuda is for --each-kernel: the comparison of several ranks runs on CPUs over gloo")
    megatron = arguments.backend == "megatron"
    if megatron:
        # What could not be done with the model itself is refused here, and not done with a small one.
        trust = arguments.trust_remote_code
        hf_config = read_config(arguments.model, revision=arguments.revision, trust_remote_code=trust)
        _, config = readable_layout(hf_config, lambda: chosen_config(arguments, **PREFERRED), ranks=arguments.ranks)
        check_installed()  # else every rank would say so, half a minute later
        stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
        sizes: dict[str, Any] = {"tp": config.tensor_model_parallel_size, "pp": stages}
    else:
        config = chosen_config(arguments, **PREFERRED)
        sizes = {"tp": config.tensor_parallel_size}
    tolerance = TOLERANCES[config.precision] if arguments.tolerance is None else arguments.tolerance
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        folder = Path(name)
        small = save_small_model(arguments, folder / "model", **sizes)
        print(f"{small.described}: {arguments.ranks} ranks start", file=sys.stderr)
        rows = make_rows(small, rows=2 * arguments.ranks + 1, seed=arguments.seed, between=LENGTHS[arguments.backend])
        task = {"folder": name, "backend": arguments.backend, "config": config, "ranks": arguments.ranks, "rows": rows}
        found = run_ranks(task, deadline_s=arguments.deadline_s)
        truth = plain_result(folder / "model", rows)
        untrained = getattr(torch, config.precision) if megatron else None
        checks = compare(folder, truth, found, tolerance=tolerance, untrained=untrained)
    holds = all(check.holds for check in checks)

    print(f"{small.described} against plain transformers and AdamW in float32; tolerance {tolerance:g}")
    width = max(len(check.name) for check in checks)
    for check in checks:
        verdict = "holds" if check.holds else "DOES NOT HOLD"
        print(f"  {check.name:<{width}}  {check.difference:>9.2e}  {verdict:<14}{check.where}")
    print("the backend is exact" if holds else "the backend is NOT exact here")
    figures: dict[str, Any] = {"model": arguments.model, "small_model": small.described, "ranks": arguments.ranks}
    figures |= {"backend": arguments.backend, "config": asdict(config), "tolerance": tolerance}
    return {**figures, "checks": [asdict(check) for check in checks], "holds": holds}


# ---- The truth, of a small model and a few rows.


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


def make_rows(small: SmallModel, *, rows: int, seed: int, between: tuple[int, int]) -> VerifyRows:
    """Rows of so many tokens, from the fewest to the most."""
    generator, (shortest, longest) = torch.Generator().manual_seed(seed), between
    tokens = torch.randint(0, small.vocabulary, (rows, longest), generator=generator)
    if small.padding is not None:
        tokens = torch.where(tokens == small.padding, (small.padding + 1) % small.vocabulary, tokens)
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
    rows = task["rows"]
    loss = functools.partial(loss_of, num_tokens=int(rows.trainable.sum()))
    backend.start_training(OPTIMIZER, num_steps=STEPS)
    found: Found = {"logp": backend.logp(rows)}
    backend.forward_backward(rows, loss)
    found["gradients"] = [(name, at, numbers.clone()) for name, at, numbers in gradients(backend)]
    backend.start_training(OPTIMIZER, num_steps=STEPS)  # from no gradient
    for step in range(STEPS):
        backend.forward_backward(rows, loss)
        norm = backend.optim_step()
        if step == 0:
            found["grad_norm"] = torch.tensor([norm])
    found["weights"] = [
        (shard.name, tuple(box.offsets), box.of_local(shard.local.detach()).clone())
        for shard in backend.shards()
        for box in shard.boxes()
    ]
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


# ---- What ranks have written, put together again and compared.


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One comparison."""

    name: str
    difference: float
    """The largest one, relative to the largest number of its tensor; 1e300 where numbers are missing or not finite."""
    where: str
    holds: bool


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
        apart = float((found[key] - expected).abs().max()) / (scale or 1.0)
        if (apart := apart if math.isfinite(apart) else NOT_A_NUMBER) > worst:  # JSON has no NaN
            worst, where = apart, key
    return Check(name=name, difference=worst, where=where, holds=worst <= tolerance)


def _saved(folder: Path, weights: Mapping[str, Tensor], *, name: str) -> Check:
    """What from_pretrained makes of the folder has these weights, bit for bit."""
    loaded = _loaded(folder)
    if missing := sorted(loaded.keys() ^ weights.keys()):
        return Check(name=name, difference=NOT_A_NUMBER, where=some(missing), holds=False)
    as_bits = torch.int32  # of float32; 0.0 equals -0.0
    differing = [key for key, each in weights.items() if not torch.equal(each.view(as_bits), loaded[key].view(as_bits))]
    apart = [float((loaded[key] - weights[key]).abs().nan_to_num(NOT_A_NUMBER).max()) for key in differing]
    return Check(name=name, difference=max(apart, default=0.0), where=some(differing), holds=not differing)


def _loaded(folder: Path) -> dict[str, Tensor]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


# ---- Every choice of kernels against the same truth, with its speed beside it.

FLOAT8_TOLERANCE = 0.5
"""Of 3 or 2 bits of mantissa, over the largest entry of each tensor."""
TIMED_STEPS = 3
TIMED_LENGTHS = (64, 256)


def verify_each_kernel(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every cell, print them, and return the figures. It does not hold if one runs and is beyond its tolerance.

    A cell is one backend on one rank whose configuration differs from the plain one in one choice. It computes
    log-probabilities and gradients, and then takes a few steps over longer rows, for tokens a second and MFU. What
    cannot run here is refused, in words.
    """
    base = chosen_config(arguments, micro_batch_size=2, device=arguments.device)
    cells: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="rl-backends-verify-") as name:
        model = Path(name) / "model"
        small = save_small_model(arguments, model, tp=1, keep_heads=True)
        rows = make_rows(small, rows=5, seed=arguments.seed, between=LENGTHS["dtensor"])
        timed_rows = make_rows(small, rows=16, seed=arguments.seed, between=TIMED_LENGTHS)
        truth = plain_result(model, rows)
        print(f"{small.described} on {arguments.device} against plain transformers in float32", flush=True)
        for choice, changes in _choices():
            print(choice, file=sys.stderr)
            cell: dict[str, Any] = dict.fromkeys(("holds", "refused", "tokens_per_s", "mfu"))
            cell |= {"choice": choice, "checks": []}
            cells.append(cell)
            try:
                kernels = replace(base.kernels, **changes.get("kernels", {}))
                config = replace(base, **{**changes, "kernels": kernels})
                backend = DTensorBackend.from_pretrained(str(model), config)
            except (ValueError, MissingDependencyError) as refusal:
                cell["refused"] = str(refusal)
                print(f"  {choice:<38}refused: {refusal}", flush=True)
                continue
            tolerance = arguments.tolerance
            if tolerance is None:
                tolerance = FLOAT8_TOLERANCE if kernels.float8 else TOLERANCES[config.precision]
            speed, mfu = 0.0, None
            with closing(backend):
                backend.start_training(OptimizerConfig(lr=1e-6), num_steps=TIMED_STEPS + 2)
                logp = {"": backend.logp(rows).cpu()}
                backend.forward_backward(rows, functools.partial(loss_of, num_tokens=int(rows.trainable.sum())))
                found = {name: part.detach().float().cpu().clone() for name, _, part in gradients(backend)}
                backend.optim_step()
                loss = functools.partial(loss_of, num_tokens=int(timed_rows.trainable.sum()))
                for step in range(TIMED_STEPS + 1):  # the fastest counts; the first, which may compile, does not
                    backend.forward_backward(timed_rows, loss)
                    backend.optim_step()
                    metrics = backend.metrics()
                    assert metrics is not None
                    if step and metrics.tokens_per_s > speed:
                        speed, mfu = float(metrics.tokens_per_s), metrics.mfu
            checks = [
                check("log-probabilities", logp, {"": truth.logp}, tolerance=tolerance),
                check("gradients", found, truth.gradients, tolerance=tolerance),
            ]
            cell |= {"holds": all(each.holds for each in checks), "checks": [asdict(each) for each in checks]}
            cell |= {"tokens_per_s": speed, "mfu": mfu}
            verdict = "holds" if cell["holds"] else "DOES NOT HOLD"
            apart = "  ".join(f"{each.name} {each.difference:.1e}" for each in checks)
            used = "MFU unknown" if mfu is None else f"MFU {mfu:.1%}"
            print(f"  {choice:<38}{verdict:<14}{apart}  {speed:,.0f} tokens/s  {used}", flush=True)
    holds = all(cell["holds"] is not False for cell in cells)
    ran = sum(cell["holds"] is not None for cell in cells)
    within = "all are within their tolerance" if holds else "NOT all are within their tolerance"
    print(f"{ran} choices ran, {len(cells) - ran} were refused; {within}")
    figures = {"model": arguments.model, "small_model": small.described, "device": arguments.device}
    return {**figures, "cells": cells, "holds": holds}


def _choices() -> Iterator[tuple[str, dict[str, Any]]]:
    """Name of a cell, and the fields of the configuration that it changes."""
    yield "plain torch, padded rows", {}
    yield "plain torch, packed rows", {"sequence_packing": True}
    yield "compile, padded rows", {"compile": True}
    yield "loss_chunk_size=3", {"kernels": {"loss_chunk_size": 3}}
    for part, name in KERNELS:
        if part == "attention":
            for packed, rows in ((False, "padded"), (True, "packed")):
                yield f"attention={name}, {rows} rows", {"kernels": {part: name}, "sequence_packing": packed}
        else:
            yield f"{part}={name}", {"kernels": {part: name}}
            if part == "float8":
                yield f"float8={name}, emulated", {"kernels": {"float8": name, "float8_emulate": True}}
