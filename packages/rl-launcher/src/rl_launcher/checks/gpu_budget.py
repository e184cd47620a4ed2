"""Does a recipe fit on GPUs that are not here, and how long does a step take? Arithmetic for `explain --gpu`.

Memory is counted per GPU and phase, and per node for the host. Times follow from FLOPs and bytes with the stated
efficiencies; they are a roofline, to compare recipes and to see what a step is spent on, not a promise.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rl_backends import DTensorConfig, MegatronConfig, ModelError, select_backend
from rl_backends.least_memory import least_memory
from rl_backends.loading.source import open_model
from rl_backends.lora.layers import AdapterSize
from rl_backends.metrics.flops import ModelFlops, peak_flops_per_s
from rl_generation import EngineMemory, EngineOptionError, estimate_memory
from rl_generation import ModelError as EngineModelError
from rl_launcher.errors import Refusal
from rl_launcher.ray.placement import Placement, lacking_slots, plan_placement
from rl_launcher.recipe_files.problems import nearest
from rl_launcher.schema import Recipe
from rl_launcher.user_code import is_import_string

GIB = 2**30
CONTEXT_BYTES = int(1.5 * GIB)
"""Of CUDA, cuBLAS and NCCL, in each process on a GPU; torch's allocator does not count them."""
PROCESS_HOST_BYTES = 3 * GIB
"""Of host memory that a rank or an engine takes for Python, torch and their libraries."""
MATMUL_EFFICIENCY = 0.45
"""Of the peak, that training and prefill reach."""
BANDWIDTH_EFFICIENCY = 0.6
"""Of the memory's bandwidth, that a step of decoding reaches."""
HOST_BYTES_PER_S = 20e9
"""Between a GPU and its host's memory, over PCIe."""
RESPONSE_SHARE = 0.5
"""Mean length of a response, as a share of `max_new_tokens`."""
PROMPT_TOKENS = 256
"""Assumed length of a prompt."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet."""

    device_name: str
    """As torch names it."""
    memory_bytes: int
    """That a process can allocate, its context included."""
    bytes_per_s: float
    """Of its memory."""


GPUS = {
    "a100-40gb": Gpu("NVIDIA A100-SXM4-40GB", int(39.4 * GIB), 1.555e12),
    "a100-80gb": Gpu("NVIDIA A100-SXM4-80GB", int(79.2 * GIB), 2.039e12),
    "h100-80gb": Gpu("NVIDIA H100 80GB HBM3", int(79.1 * GIB), 3.35e12),
    "h200-141gb": Gpu("NVIDIA H200", int(139.8 * GIB), 4.8e12),
    "b200-180gb": Gpu("NVIDIA B200", int(178.3 * GIB), 7.7e12),
    "l4-24gb": Gpu("NVIDIA L4", int(22.0 * GIB), 0.3e12),
    "l40s-48gb": Gpu("NVIDIA L40S", int(44.5 * GIB), 0.864e12),
}
"""Known GPUs by the names that `--gpu` takes."""


def gpu_named(text: str) -> Gpu:
    """The GPU of a name, or one of so many bytes, of whose speed nothing is known.

    Raises:
        Refusal: neither a known name nor a number of bytes.
    """
    if text.isdigit() and int(text) > 0:
        return Gpu("", int(text), 0.0)
    if (known := GPUS.get(text.lower())) is not None:
        return known
    like = nearest(text.lower(), list(GPUS))
    hint = f"; did you mean {like[0]}?" if like else ""
    raise Refusal(f"--gpu={text} is no GPU known here{hint} Known are {', '.join(GPUS)}; or give its memory in bytes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Mean tokens of the rows that a step is made of."""

    prompt: float = PROMPT_TOKENS
    """Read, and not trained on."""
    response: float | None = None
    """Sampled or imitated; None assumes a share of `max_new_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimes:
    """How long one batch of a recipe takes, by arithmetic. What is not known is not there."""

    phases: Mapping[str, float]
    """Seconds of `generate`, `train`, `logp` and `refit`."""
    unknown: Mapping[str, str]
    """Why others have none, by the same names."""
    overlaps: bool = False
    """Whether generating goes on while the trainer trains, so that the longer one counts."""
    rows: int = 0
    """Of a batch."""
    prompt: float = 0.0
    """Mean tokens of a prompt."""
    response: float = 0.0
    """Mean tokens of a response."""
    samples: bool = False
    """Whether responses are sampled before each step."""
    mfu: float | None = None
    """Of the trainer's own seconds and GPUs: what the log calls `mfu`."""
    step_mfu: float | None = None
    """Of the whole step, and of all GPUs of the run."""
    recomputes: bool = False
    """Whether every layer's forward is computed once more in backward."""

    @property
    def total(self) -> float | None:
        """Seconds of a step; None if a phase is not known."""
        if self.unknown or not self.phases:
            return None
        rest = sum(seconds for name, seconds in self.phases.items() if name != "generate")
        generate = self.phases.get("generate", 0.0)
        return max(generate, rest) if self.overlaps else generate + rest

    @property
    def assumed(self) -> list[str]:
        """What the figures rest on."""
        found = [f"prompts of {self.prompt:.0f} tokens", f"responses of {self.response:.0f}"]
        if self.recomputes:
            found.append("every layer's forward once more in backward (activation recomputation)")
        return [
            *found,
            f"{MATMUL_EFFICIENCY:.0%} of the peak in matrix products",
            f"{BANDWIDTH_EFFICIENCY:.0%} of the memory's bandwidth in decoding",
            f"{HOST_BYTES_PER_S / 1e9:g} GB/s over PCIe",
            "collectives overlap with computation",
        ]

    def lines(self) -> list[str]:
        """The same for people."""
        if (total := self.total) is None:
            return [f"time of a step: unknown, {each}" for each in dict.fromkeys(self.unknown.values())]
        tokens = self.rows * (self.prompt + self.response)
        parts = ", ".join(f"{each} {seconds:.3g} s" for each, seconds in self.phases.items())
        parts += "; generating goes on beside the rest" * self.overlaps
        what = " (prompts x generations)" * self.samples
        told = f"a batch of {self.rows:,} rows{what}, {tokens:,.0f} tokens: about {total:.3g} s ({parts}), "
        told += f"{tokens / total:,.0f} tokens/s, MFU {self.step_mfu or 0.0:.1%} of the whole step"
        return [told, f"  assumed: {', '.join(self.assumed[:-1])}; {self.assumed[-1]}"]

    def figures(self) -> dict[str, float] | None:
        """The same for `--json`; `tokens_per_s` counts prompts and responses."""
        if (total := self.total) is None:
            return None
        tokens = self.rows * (self.prompt + self.response)
        mfu = {"mfu": self.step_mfu or 0.0, "trainer_mfu": self.mfu or 0.0}
        return {**self.phases, "total": total, "tokens_per_s": tokens / total, **mfu}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """What a recipe takes of given GPUs."""

    text: str
    figures: Mapping[str, Any]
    refusal: str | None
    """Why it does not fit, with the smallest change that does, or None."""


def budget(
    recipe: Recipe,
    skeleton: nn.Module,
    placement: Placement,
    *,
    gpu: Gpu,
    rank_peak_bytes: int | None,
    engine: EngineMemory,
    adapters: AdapterSize | None = None,
    peak_with: Callable[..., int | None] | None = None,
    microbatch_rows: int = 1,
    times: StepTimes | None = None,
) -> Budget:
    """Compare a recipe with a GPU.

    Args:
        recipe: of the run.
        skeleton: the policy on the meta device.
        placement: of ranks and engines.
        gpu: each of the run's GPUs.
        rank_peak_bytes: of a rank's GPU memory in one step; None if it is not known.
        engine: the memory of one rank of an engine.
        adapters: what is trained instead of the weights.
        peak_with: `rank_peak_bytes` with fields of `policy.dtensor_cfg` changed; what is proposed was tried by it.
        microbatch_rows: rows of a microbatch, which its tokens may bound below `micro_batch_size`.
        times: of a step, where they were calculated already.
    """
    if placement.device != "cuda":
        raise Refusal(
            "--gpu is for a recipe that trains on GPUs, and this one trains on the CPU: add "
            "policy.dtensor_cfg.device=cuda, or leave --gpu out"
        )
    parameters, ranks = sum(each.numel() for each in skeleton.parameters()), len(placement.ranks)
    config = select_backend(recipe.policy).config
    least = least_memory(
        config,
        parameters=parameters,
        optimizers={stage.optimizer.name for stage in recipe.stages.values()},
        ranks=ranks,
        adapters=adapters,
    )
    peak = least.trainer_bytes // ranks if rank_peak_bytes is None else rank_peak_bytes
    phases = _phases(recipe, placement, gpu=gpu, peak=peak, weights=least.weight_bytes // ranks, engine=engine)
    room = gpu.memory_bytes
    lines = [f"{'GPU' if gpu.device_name == '' else gpu.device_name} with {_gib(room)}, memory of each GPU by phase:"]
    lines += [
        f"  {name:<11}{_gib(taken):>10}  {'fits' if taken <= room else 'DOES NOT FIT'}: {what}"
        for name, (taken, what) in phases.items()
    ]
    nodes = host_needs(recipe, placement, parameters=parameters, trainer_bytes=least.trainer_bytes, engine=engine)
    host, shm = max(nodes)
    lines.append(f"host memory of a node: {_gib(host)}, of which /dev/shm {_gib(shm)}")
    reasons = []
    for phase in (name for name, (taken, _) in phases.items() if taken > room):
        change = _smallest_change(
            recipe,
            placement,
            gpu=gpu,
            lacking=phase,
            peak=peak,
            state=least.trainer_bytes // ranks,
            weights=least.weight_bytes // ranks,
            engine=engine,
            peak_with=peak_with,
            microbatch_rows=microbatch_rows,
        )
        needs = f"while {phase}, a GPU needs {_gib(phases[phase][0])} and has {_gib(room)}"
        reasons.append(f"{needs}; the smallest change: {change}")
    lines += reasons
    refusal = "; ".join(reasons) or None
    times = step_times(recipe, skeleton, placement, gpu=gpu, engine=engine) if times is None else times
    lines += times.lines()
    return Budget(
        text="\n".join(lines),
        figures={
            "gpu_bytes": room,
            "phase_bytes": {name: taken for name, (taken, _) in phases.items()},
            "host_bytes_per_node": host,
            "shm_bytes_per_node": shm,
            "step_s": times.figures(),
        },
        refusal=refusal,
    )


def host_needs(
    recipe: Recipe, placement: Placement, *, parameters: int, trainer_bytes: int, engine: EngineMemory
) -> list[tuple[int, int]]:
    """Bytes of host memory that each node needs, and those of /dev/shm among them.

    Colocated trainers and sleeping engines wait in host memory while the other works. On CPUs engines have their
    weights there, twice: a refit stages the new ones beside the old. In /dev/shm are the slots in which weights travel,
    and what Ray's object store holds of a batch. Of an engine on several nodes each has its share.
    """
    needs = []
    size = recipe.policy.generation.ranks_per_engine
    for node in range(placement.num_nodes):
        ranks = len(placement.ranks_on(node))
        engine_ranks = sum(len(place.slots_on(node)) for place in placement.engines)
        on_cpu, waiting = 0, 0
        if placement.device == "cpu":
            on_cpu = 2 * parameters * engine.element_bytes * engine_ranks // size
        if placement.colocated and engine_ranks and not placement.in_process and placement.device == "cuda":
            waiting = trainer_bytes * ranks // len(placement.ranks) + engine.weight_bytes * engine_ranks
        refit = recipe.policy.refit
        shm = GIB + refit.buckets * refit.bucket_bytes * (ranks + engine_ranks)
        vllm = recipe.policy.generation.backend == "vllm"
        shared = placement.in_process and not vllm  # by policy and engine
        processes = 1 if shared else ranks + engine_ranks
        if vllm and not placement.in_process:  # the actor of each engine, and what schedules for its ranks if several
            processes += sum(place.node == node for place in placement.engines) * (1 if size == 1 else 2)
        needs.append((shm + on_cpu + waiting + processes * PROCESS_HOST_BYTES, shm))
    return needs


def node_needs(recipe: Recipe) -> list[tuple[int, int]] | None:
    """Host memory and /dev/shm of each of a recipe's nodes in bytes; None where the model cannot be read from here."""
    policy = recipe.policy
    if is_import_string(policy.model_name):
        return None
    try:
        config = open_model(
            policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code
        ).config
        cfg, trainer = policy.generation.vllm_cfg, select_backend(policy).config
        dtype = trainer.precision if cfg.precision == "auto" else cfg.precision
        engine = estimate_memory(config, dtype=dtype, **cfg.sizes)
    except (ModelError, EngineModelError, EngineOptionError):
        return None
    placement = plan_placement(recipe)
    least = least_memory(
        trainer,
        parameters=engine.parameters,
        optimizers={stage.optimizer.name for stage in recipe.stages.values()},
        ranks=len(placement.ranks),
    )
    return host_needs(recipe, placement, parameters=engine.parameters, trainer_bytes=least.trainer_bytes, engine=engine)


def _phases(
    recipe: Recipe, placement: Placement, *, gpu: Gpu, peak: int, weights: int, engine: EngineMemory
) -> dict[str, tuple[int, str]]:
    """Bytes of a GPU in each phase, and what they are."""
    cfg = recipe.policy.generation.vllm_cfg
    one = engine.sequence_bytes(engine.max_model_len)
    share = _share(recipe, gpu=gpu, engine=engine)
    cache = cfg.kv_cache_memory_bytes or one
    serving = engine.weight_bytes + cache
    if recipe.policy.generation.backend == "vllm" and cfg.kv_cache_memory_bytes is None:
        serving = max(serving, int(gpu.memory_bytes * share) if serving <= gpu.memory_bytes * share else serving)
    told = f"weights {_gib(engine.weight_bytes)} and a cache that holds a response of full length ({_gib(one)})"
    if not placement.engines:
        return {"training": (peak + CONTEXT_BYTES, f"a step's peak {_gib(peak)}, and no engine")}
    # A refit stages the new weights on the engine's GPU. They stay allocated, also while the engine sleeps.
    staged = engine.weight_bytes
    beside = f"{_gib(staged)} in which refits are staged"
    if placement.in_process:
        # vLLM has processes of its own, each with a context.
        contexts = CONTEXT_BYTES * (2 if recipe.policy.generation.backend == "vllm" else 1)
        both = peak + serving + staged + contexts
        told = f"the engine beside it, {_gib(serving)}: {told}"
        return {"training": (both, f"a step's peak {_gib(peak)}, {told}, and {beside}")}
    if not placement.colocated:
        return {
            "training": (peak + CONTEXT_BYTES, f"a step's peak {_gib(peak)}"),
            "generating": (serving + staged, f"{told}, and {beside}"),
        }
    other = 2 * CONTEXT_BYTES
    return {
        "training": (peak + staged + other, f"a step's peak {_gib(peak)}, the engine asleep, and {beside}"),
        "refitting": (weights + engine.weight_bytes + staged + other, f"weights of both, and {beside}"),
        "generating": (serving + staged + CONTEXT_BYTES, f"{told}, and {beside}"),
    }


def _share(recipe: Recipe, *, gpu: Gpu, engine: EngineMemory) -> float:
    """Share of a GPU that vLLM takes."""
    given = recipe.policy.generation.vllm_cfg.gpu_memory_utilization
    return given or engine.default_gpu_memory_utilization(gpu.memory_bytes)


def _smallest_change(
    recipe: Recipe,
    placement: Placement,
    *,
    gpu: Gpu,
    lacking: str,
    peak: int,
    state: int,
    weights: int,
    engine: EngineMemory,
    peak_with: Callable[..., int | None] | None,
    microbatch_rows: int,
) -> str:
    """The change of a key that makes the phase `lacking` fit; or what to do if none does.

    A change of the training step was tried: the step was traced with it. Others are found by the arithmetic above.
    """
    cluster, section = recipe.cluster, "policy.generation.vllm_cfg"
    beside_vllm = placement.in_process and placement.engines and recipe.policy.generation.backend == "vllm"
    spare = CONTEXT_BYTES * (2 if beside_vllm or (placement.colocated and not placement.in_process) else 1)
    if lacking == "training":
        # What else is on the GPU then: contexts, and in one process the engine.
        beside = _phases(recipe, placement, gpu=gpu, peak=0, weights=weights, engine=engine)["training"][0]
        room, activations = gpu.memory_bytes - beside, max(peak - state, 0)
        config = recipe.policy.dtensor_cfg
        if beside_vllm:
            left = gpu.memory_bytes - peak - engine.weight_bytes - spare
            if left >= engine.weight_bytes + engine.sequence_bytes(engine.max_model_len):
                smaller = math.floor(100 * left / gpu.memory_bytes) / 100
                usual = _share(recipe, gpu=gpu, engine=engine)
                return f"{section}.gpu_memory_utilization={smaller:g} (it is {usual:g})"
        if peak_with is not None:
            fitting = int(microbatch_rows * (room - state) / activations) if activations else 0
            candidates: list[dict[str, Any]] = []
            if 0 < fitting < microbatch_rows:
                candidates.append({"micro_batch_size": fitting})
            if config.activation_checkpointing != "full":
                candidates.append({"activation_checkpointing": "full"})
            if microbatch_rows > 1:
                candidates.append({"activation_checkpointing": "full", "micro_batch_size": 1})
            candidates.append({"activation_checkpointing": "full", "micro_batch_size": 1, "cpu_offload": True})
            for candidate in candidates:
                changed = {name: value for name, value in candidate.items() if getattr(config, name) != value}
                if changed and (needed := peak_with(**changed)) is not None and needed <= room:
                    keys = (
                        f"policy.dtensor_cfg.{name}={_yaml(value)} (it is {_yaml(getattr(config, name))})"
                        for name, value in changed.items()
                    )
                    return f"{' and '.join(keys)}: with it {_gib(needed + beside)}"
        if activations < room and not placement.in_process:
            nodes = math.ceil(cluster.num_nodes * state / (room - activations))
            if nodes > cluster.num_nodes:
                was_nodes = f"(it is {cluster.num_nodes})"
                return f"cluster.num_nodes={nodes} {was_nodes}: weights and optimizer take {_gib(state)}"
        if recipe.policy.megatron_cfg.enabled:
            return "more tensor or pipeline ranks, policy.megatron_cfg.recompute_granularity=full, or larger GPUs"
        return (
            "a smaller policy.generation.max_new_tokens, policy.dtensor_cfg.tensor_parallel_size or "
            "context_parallel_size over more GPUs, LoRA (policy.dtensor_cfg.lora_cfg.rank=16), or larger GPUs"
        )
    share = _share(recipe, gpu=gpu, engine=engine)
    held = weights if placement.colocated else 0  # the policy's, beside the engine's during a refit
    staged = engine.weight_bytes
    full = engine.weight_bytes + engine.sequence_bytes(engine.max_model_len)
    least = staged + max(full, engine.weight_bytes + held)
    if least + spare <= gpu.memory_bytes:
        smaller_share = math.floor(100 * (gpu.memory_bytes - staged - spare) / gpu.memory_bytes) / 100
        return f"{section}.gpu_memory_utilization={smaller_share:g} (it is {share:g})"
    given = [sum(len(place.slots_on(node)) for place in placement.engines) for node in range(placement.num_nodes)]
    was = {name: getattr(engine, name) for name in ("tensor_parallel_size", "pipeline_parallel_size")}
    for ranks in range(math.prod(was.values()) + 1, sum(given) + 1):
        for tensor in (each for each in range(min(ranks, max(given)), 0, -1) if ranks % each == 0):
            if lacking_slots(given, tensor=tensor, pipeline=ranks // tensor) is not None:
                continue
            smaller = math.prod(was.values()) / ranks
            serving = (engine.weight_bytes + engine.sequence_bytes(engine.max_model_len)) * smaller
            if staged * smaller + max(serving, engine.weight_bytes * smaller + held) + spare <= gpu.memory_bytes:
                sizes = {"tensor_parallel_size": tensor, "pipeline_parallel_size": ranks // tensor}
                return " and ".join(
                    f"{section}.{name}={size} (it is {was[name]})" for name, size in sizes.items() if size != was[name]
                )
    return f"a shorter {section}.max_model_len, or larger GPUs"


def step_times(
    recipe: Recipe,
    skeleton: nn.Module,
    placement: Placement,
    *,
    gpu: Gpu | None,
    engine: EngineMemory,
    lengths: Lengths | None = None,
) -> StepTimes:
    """Seconds of each phase of one batch of the recipe's last stage.

    Args:
        recipe: of the run.
        skeleton: the policy on the meta device.
        placement: of ranks and engines.
        gpu: each of the run's GPUs; None where it runs on CPUs, of whose speed nothing is known.
        engine: the memory of one rank of an engine.
        lengths: of the rows; by default assumed.
    """
    config = select_backend(recipe.policy).config
    precision: Any = config.precision
    stage, name = next(((each, name) for name, each in recipe.stages.items() if name == recipe.headline), (None, ""))
    if stage is None:
        return StepTimes(phases={}, unknown={"train": "the recipe trains nothing"})
    # Pairs of `sampled` are there before the first step.
    samples = hasattr(stage, "num_generations_per_prompt") and recipe.form is None
    samples = samples and getattr(stage, "pairs", "online") == "online"
    lengths = Lengths() if lengths is None else lengths
    response = recipe.policy.generation.max_new_tokens * RESPONSE_SHARE
    prompt, response = lengths.prompt, response if lengths.response is None else lengths.response
    rows = int(getattr(stage, "batch_size", 1))
    if samples:
        rows = int(stage.num_prompts * stage.num_generations_per_prompt)
    elif name in {"dpo", "orpo", "reward_model"}:
        rows *= 2
    ranks, engines = len(placement.ranks), len(placement.engines)
    times: dict[str, float] = {}
    unknown: dict[str, str] = {}
    mfu: float | None = None
    trained, recomputes = 0.0, _recomputes(config)
    device_name = "" if gpu is None else gpu.device_name
    peak = config.peak_flops_per_s or (peak_flops_per_s(device_name, precision) if device_name else None)
    # Forward passes without a gradient: of the reference, be it a copy or the policy with its adapters off; of the
    # policy itself; and of the critic, which then trains as the policy does.
    extra = int(getattr(stage, "keeps_reference", False)) + int(recipe.ppo is not None)
    objective = getattr(stage, "objective", None)
    extra += int(getattr(getattr(objective, "ratio", None), "proximal", "") == "recomputed")
    whose = "a CPU" if gpu is None else f"a {device_name}" if device_name else "a GPU of which only the memory is given"
    if samples and (gpu is None or not gpu.bytes_per_s):
        unknown["generate"] = f"nobody states the bandwidth of the memory of {whose}"
    elif samples and gpu is not None:
        tokens = {"prompt": prompt, "response": response}
        times["generate"] = _decoding_s(recipe, gpu=gpu, engine=engine, engines=engines, rows=rows, **tokens)
    try:
        flops = ModelFlops.of(skeleton)
        if peak is None:
            key = "megatron_cfg" if recipe.policy.megatron_cfg.enabled else "dtensor_cfg"
            unknown["train"] = f"nobody states the peak of {whose} (policy.{key}.peak_flops_per_s does)"
        else:
            read = torch.full((1,), round(prompt + response))
            asked = torch.full((1,), round(response))
            trained = rows * float(flops.of_rows(read, asked).sum())
            computed = rows * float(flops.of_rows(read, asked, recomputed=recomputes).sum())
            if not recomputes:  # the head makes its logits a second time in backward in any case
                computed += rows * float(asked.sum()) * flops.head.forward
            compute = peak * MATMUL_EFFICIENCY * ranks
            times["train"] = computed / compute * (1 if recipe.ppo is None else 2)
            mfu = trained / (computed / compute * peak * ranks)
            if extra:
                times["logp"] = extra * trained / 3 / compute
    except ModelError as error:
        unknown["train"] = str(error)
    if samples and gpu is None:
        unknown["refit"] = "nobody states the speed at which this machine copies weights"
    elif samples:
        parameters = sum(each.numel() for each in skeleton.parameters())
        sent = parameters * (2 if precision == "bfloat16" else 4) * engines / max(placement.num_nodes, 1)
        times["refit"] = sent / HOST_BYTES_PER_S / max(1, min(engines, max(placement.num_slots)))
    found = StepTimes(
        phases=times,
        unknown=unknown,
        overlaps=getattr(stage, "async_grpo", None) is not None,
        rows=rows,
        prompt=prompt,
        response=response,
        samples=samples,
        mfu=mfu,
        recomputes=recomputes,
    )
    if (total := found.total) is None or peak is None:
        return found
    return replace(found, step_mfu=trained / (total * peak * sum(placement.num_slots)))


def _recomputes(config: DTensorConfig | MegatronConfig) -> bool:
    """Whether backward computes all layers again.

    What `selective` computes again is no matrix product of the layers' own parameters, and is not counted.
    """
    if isinstance(config, MegatronConfig):
        return config.recompute_granularity == "full"
    return config.activation_checkpointing == "full"


def _decoding_s(
    recipe: Recipe, *, gpu: Gpu, engine: EngineMemory, engines: int, rows: int, prompt: float, response: float
) -> float:
    """Seconds of sampling: each step of decoding reads the weights once, and the cache of every response."""
    cfg, engines = recipe.policy.generation.vllm_cfg, max(1, engines)
    share = _share(recipe, gpu=gpu, engine=engine) * gpu.memory_bytes
    cache = cfg.kv_cache_memory_bytes or max(share - engine.weight_bytes, engine.sequence_bytes(engine.max_model_len))
    held = max(1, int(cache // max(engine.sequence_bytes(round(prompt + response)), 1)))
    at_once = max(1, min(cfg.max_num_seqs or 256, held, math.ceil(rows / engines)))
    read = engine.weight_bytes + at_once * engine.kv_bytes_per_token * (prompt + response / 2)
    rounds = math.ceil(math.ceil(rows / engines) / at_once)
    return float(rounds * response * read / (gpu.bytes_per_s * BANDWIDTH_EFFICIENCY))


def _yaml(value: object) -> str:
    """A value as a recipe writes it."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
