"""Preflight checks, before any model is loaded or process started: files, mesh, memory, disk, tokenizer, rows.

`run`, `resume` and `validate` call `check`. A check refuses only what certainly fails. Where it could only guess (a hub
that does not answer, GPUs on other nodes) it lets the run start, and `explain` says what is unknown. Other nodes are
asked for their memory when Ray has started, and `check_nodes` refuses them before anything is loaded.
"""

import fcntl
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rl_backends import DTensorConfig, ModelError, load_tokenizer, select_backend
from rl_backends.least_memory import device_bytes, host_bytes, least_memory
from rl_backends.loading.source import local_folder, open_model
from rl_backends.lora.layers import AdapterSize
from rl_generation import estimate_memory
from rl_launcher.build.environments import load_environment
from rl_launcher.build.inputs import load_dataset
from rl_launcher.build.models import adapters_of, copies_reference
from rl_launcher.build.remote_engines import sglang_checkpoint
from rl_launcher.checkpoints.disk import CLAIM_FILE, STATE_PER_WEIGHT, check_space
from rl_launcher.errors import Refusal
from rl_launcher.ray.node_memory import SHARED_MEMORY, NodeMemory
from rl_launcher.ray.placement import Placement, plan_placement
from rl_launcher.recipe_files.problems import nearest
from rl_launcher.schema import PolicyConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string, is_python_object, named_code
from rl_observe import check_trackers
from rl_observe.glossary import METRICS, metric_of

GIB = 2**30
FLOAT32_BYTES = 4
DATA_SUFFIXES = {".jsonl", ".json", ".parquet"}
LOGGED_BY = {
    "held_out_loss": ("sft",),
    "held_out_margin": ("dpo", "kto"),
    "held_out_pair_accuracy": ("dpo", "orpo", "reward_model"),
}
"""The only stages that log each of these metrics."""


def check(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse a recipe that cannot run. Takes seconds, however large the model is.

    Args:
        recipe: already validated against the schema.
        new_run: whether a run directory will be created: it must be unused, and its disk must have room.

    Raises:
        ValueError: the first reason, with the key and the remedy.
    """
    if (lacking := check_all_but_memory(recipe, new_run=new_run)) is not None:
        raise Refusal(f"{lacking}; rl-launcher explain shows the details")


def check_all_but_memory(recipe: Recipe, *, new_run: bool = False) -> str | None:
    """Refuse as `check` does, but return the reason if the memory is too small: `explain` shows the rest first.

    Raises:
        ValueError: any other reason.
    """
    check_files(recipe, new_run=new_run)
    placement = plan_placement(recipe)
    model = known_model(recipe.policy)
    if model is None:
        return None
    check_prompt_format(recipe)
    lacking = lacking_memory(recipe, model=model, placement=placement) or lacking_cache(recipe, placement=placement)
    if lacking is None and new_run:
        check_disk(recipe, model=model)
    return lacking


# ---- The model, without its weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """What a model's configuration says."""

    name: str
    """As in the recipe."""
    parameters: int
    """Elements of all weights; tied weights count once."""
    adapters: AdapterSize | None = None
    """The LoRA adapters that are trained instead of the weights, or None."""


def known_model(policy: PolicyConfig) -> KnownModel | None:
    """Return what the policy's configuration says, or None if Python code builds it or the hub does not answer.

    Raises:
        ModelError: the named folder has no configuration of a language model.
        Refusal: the adapters do not fit the model.
    """
    if is_import_string(policy.model_name) or is_python_object(policy.model_name):
        return None
    try:
        source = open_model(policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code)
        parameters = estimate_memory(source.config, dtype="float32", max_model_len=1).parameters
    except ModelError:
        if local_folder(policy.model_name) is not None:
            raise
        return None  # loading the model will report why the hub did not answer
    adapters = None if select_backend(policy).adapters is None else adapters_of(policy, source.skeleton())
    return KnownModel(name=policy.model_name, parameters=parameters, adapters=adapters)


# ---- Files and the run directory.


def check_files(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse missing model folders, data files and code files, and for a new run a run directory that is in use.

    The message has the key, the path, and an existing file of nearly the same name.
    """
    for key, text in named_code(recipe).items():
        file = Path(text.rpartition(":")[0]).expanduser()
        if file.suffix == ".py" and not file.is_file():
            raise Refusal(f"{key}={text}: there is no file {file}{_where_to_look(file)}")
    sources = {"data.source": recipe.data.source}
    if recipe.reward_model is not None and recipe.reward_model.data is not None:
        sources["reward_model.data.source"] = recipe.reward_model.data.source
    sources |= {f"data.mix.{name}": source for name, source in recipe.data.mix.items()}
    sources |= {f"evaluation.sets.{name}.source": each.source for name, each in recipe.evaluation.sets.items()}
    if recipe.data.held_out is not None:
        sources["data.held_out"] = recipe.data.held_out
    for key, source in sources.items():
        if not is_import_string(source):
            path = Path(source).expanduser()
            is_path = path.suffix in DATA_SUFFIXES or source.startswith((".", "/", "~"))
            if is_path and not path.exists():
                raise Refusal(f"{key}={source}: there is no such file{_where_to_look(path)}")
    models = {"policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        models["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    for key, name in models.items():
        try:
            if not is_import_string(name):
                local_folder(name)
        except ValueError as error:
            raise Refusal(f"{key}={error}{_where_to_look(Path(name).expanduser())}") from error
    remote = recipe.policy.generation.remote
    if recipe.generates and remote is not None and remote.kind == "sglang":
        sglang_checkpoint(recipe.policy)
    check_trackers(recipe.logger)
    _check_metric(recipe)
    if new_run:
        if (reason := taken(recipe.run_dir)) is not None:
            raise Refusal(reason)
        folder = _existing_parent(recipe.run_dir)
        try:
            # Tried before the free space is read: a folder that cannot be written, such as /proc, may report 0 bytes.
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            why = (error.strerror or type(error).__name__).lower()
            raise Refusal(
                f"run_dir={recipe.run_dir!r} cannot be written: {folder}: {why}; choose another run_dir=…"
            ) from error


def _check_metric(recipe: Recipe) -> None:
    """Refuse to keep the best checkpoints by a metric that this recipe never logs: none would be kept."""
    name, best = recipe.checkpointing.metric_name, recipe.checkpointing.keep_top_k
    if not best:
        return
    what = f"checkpointing.keep_top_k={best} keeps the best by metric_name={name}, and"
    if metric_of(name) is None:
        like = nearest(name, list(METRICS))
        raise Refusal(f"{what} no run logs that{f'; did you mean {like[0]}?' if like else ''}")
    if (stages := LOGGED_BY.get(name)) is not None and not {*stages} & {*recipe.stages}:
        *others, last = stages
        who = f"{', '.join(others)} and {last} log" if others else f"{last} logs"
        raise Refusal(f"{what} only {who} that, which is not in this recipe; choose another")


def taken(run_dir: str) -> str | None:
    """Return why a new run would refuse this run directory, or None if it would not."""
    folder = Path(run_dir).expanduser()
    if not (folder.is_dir() and any(folder.iterdir())):
        return None
    try:
        with (folder / CLAIM_FILE).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = file.read() or "a process that has just started"
                return f"run_dir={run_dir!r} is in use: {holder} is running it now; choose another run_dir=…"
    except OSError:
        pass  # no claim, one that a killed process left, or a file system without locks
    held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:4])
    return (
        f"run_dir={run_dir!r} exists and is not empty (it holds {held}, …); choose another run_dir=… or delete it. "
        f"To continue an interrupted run: rl-launcher resume {run_dir}"
    )


def _existing_parent(path: str) -> Path:
    """Return the folder itself, or the nearest one above it that exists."""
    folder = Path(path).expanduser().absolute()
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


def _where_to_look(path: Path) -> str:
    """Return the file beside `path` whose name is nearest, or else the folder that was searched."""
    beside = sorted({entry.name for entry in path.parent.iterdir()} - {path.name}) if path.parent.is_dir() else []
    like = nearest(path.name, beside)
    return f"; did you mean {path.parent / like[0]}?" if like else f"; looked in {path.parent.absolute()}"


# ---- Disk and memory.


def check_disk(recipe: Recipe, *, model: KnownModel, free_bytes: int | None = None) -> None:
    """Refuse, as `check_space`, a run whose checkpoints and final model do not fit on the disk."""
    if not recipe.stages:
        return
    weights = model.parameters * FLOAT32_BYTES
    checkpoint = weights * STATE_PER_WEIGHT
    if (size := model.adapters) is not None:
        checkpoint = size.frozen_bytes + size.trainable_bytes * STATE_PER_WEIGHT
    folder, config = _existing_parent(recipe.run_dir), recipe.checkpointing
    check_space(folder, checkpoint_bytes=checkpoint, model_bytes=weights, config=config, free_bytes=free_bytes)


class MemoryNeeds(NamedTuple):
    """The least bytes that a run holds, summed over all its GPUs or processes."""

    trainer_bytes: int
    """The policy with gradients and optimizer state, and the critic or reward model that trains beside it."""
    frozen_bytes: int
    """The reference model, if there is a separate one, and the reward model that scores responses."""
    engine_bytes: int


def lacking_memory(
    recipe: Recipe, *, model: KnownModel, placement: Placement, available_bytes: int | None = None
) -> str | None:
    """Return why a run does not fit in memory, with the keys that make it smaller, or None if it may fit.

    It does not fit if weights, gradients and optimizer state alone exceed `available_bytes`, the memory of all GPUs or
    processes together. None reads this machine.
    """
    available = _available(recipe, placement) if available_bytes is None else available_bytes
    if available is None:
        return None
    needs, on_gpu = least_needed(recipe, model=model, placement=placement), placement.device == "cuda"
    needed = sum(needs)
    if placement.colocated and on_gpu and recipe.cluster.runtime == "ray":
        needed = max(needs.trainer_bytes, needs.engine_bytes)  # colocated: each is offloaded while the other works
    if needed <= available:
        return None
    engine = f", engine {_gib(needs.engine_bytes)}" if needs.engine_bytes else ""
    reference = f", reference {_gib(needs.frozen_bytes)}" if needs.frozen_bytes else ""
    return (
        f"policy.model_name={model.name} has {model.parameters / 1e9:.2f} billion parameters, and training it takes at "
        f"least {_gib(needed)} of {'GPU memory' if on_gpu else 'memory'}: weights, gradients and optimizer "
        f"{_gib(needs.trainer_bytes)}{engine}{reference}; this machine has "
        f"{_gib(available)}. {_remedy(recipe)}"
    )


def _remedy(recipe: Recipe) -> str:
    """What makes a training run smaller, or spreads it wider."""
    smaller = "LoRA (policy.dtensor_cfg.lora_cfg.rank=16)"
    if recipe.policy.megatron_cfg.enabled:
        smaller = "policy.megatron_cfg.precision=bfloat16"
    elif (lora := recipe.policy.dtensor_cfg.lora_cfg) is not None:
        smaller = f"policy.dtensor_cfg.lora_cfg.base_dtype=bfloat16 (it is {lora.base_dtype})"
    return (
        f"Use a smaller model, more GPUs or nodes (cluster.gpus_per_node, cluster.num_nodes), {smaller}, or "
        f"policy.dtensor_cfg.cpu_offload=true on a GPU"
    )


class NodeMemoryError(Refusal):
    """A node of a running cluster that has not the memory for what the placement puts there."""


def check_nodes(
    recipe: Recipe,
    *,
    model: KnownModel,
    placement: Placement,
    nodes: Sequence[NodeMemory],
    gpus: Sequence[Sequence[tuple[str, int]]],
) -> None:
    """Refuse nodes that certainly lack memory, once they have been asked and before anything is loaded there.

    Args:
        recipe: of the run.
        model: its policy.
        placement: of ranks and engines.
        nodes: what each node of the placement has.
        gpus: of each node, name and bytes of those GPUs that the run has there; empty where they are not known.

    Raises:
        NodeMemoryError: names every such node, the phase, what it needs and has, and what to do.
    """
    needs, on_gpu = least_needed(recipe, model=model, placement=placement), placement.device == "cuda"
    config, generation, refit = select_backend(recipe.policy).config, recipe.policy.generation, recipe.policy.refit
    each_rank = (needs.trainer_bytes + needs.frozen_bytes) // len(placement.ranks)
    num_engine_ranks = sum(len(place.slots) for place in placement.engines)
    each_engine = needs.engine_bytes // max(1, num_engine_ranks)
    offloads = isinstance(config, DTensorConfig) and config.cpu_offload
    lacking: list[str] = []
    remedies: dict[str, None] = {}
    trainer = f"weights, gradients and optimizer {_gib(each_rank)} a rank"
    engine = f"weights of an engine {_gib(each_engine)} a rank"
    for number, node in enumerate(nodes):
        ranks = len(placement.ranks_on(number))
        engine_ranks = sum(len(place.slots_on(number)) for place in placement.engines)
        # (phase, memory, what it needs, what it has, of what)
        found: list[tuple[str, str, int, int, str]] = []
        if on_gpu and gpus[number]:
            name, each = min(gpus[number], key=lambda gpu: gpu[1])
            memory = f"memory of each of its GPUs ({name})"
            if ranks and not offloads:
                found.append(("training", memory, each_rank, each, trainer))
            if engine_ranks:
                found.append(("generating", memory, each_engine, each, engine))
        if not on_gpu:
            taken = ranks * each_rank + engine_ranks * each_engine
            what = ", ".join(
                [f"{ranks} x {trainer}"] * bool(ranks) + [f"{engine_ranks} x {engine}"] * bool(engine_ranks)
            )
            found.append(("training and generating", "host memory", taken, node.host_bytes, what))
        elif ranks and offloads:
            found.append(("training", "host memory", ranks * each_rank, node.host_bytes, f"{ranks} x {trainer}"))
        elif ranks and engine_ranks and placement.colocated:
            what = f"{ranks} x {trainer}, which wait there while the engines have the GPUs"
            found.append(("generating", "host memory", ranks * each_rank, node.host_bytes, what))
        if engine_ranks and node.shm_bytes is not None:
            slots = refit.buckets * refit.bucket_bytes * (ranks + engine_ranks)
            what = f"the buckets of {ranks + engine_ranks} processes (policy.refit)"
            found.append(("refitting", SHARED_MEMORY, slots, node.shm_bytes, what))
        for phase, memory, needed, has, what in found:
            if needed > has:
                lacking.append(
                    f"node {number} ({node.host}) lacks {memory} while {phase}: it needs at least {_gib(needed)} "
                    f"({what}) and has {_gib(has)}"
                )
                if memory == SHARED_MEMORY:
                    remedies["Give that node a larger /dev/shm (docker run --shm-size, a Memory emptyDir)"] = None
                elif phase == "generating" and memory != "host memory" and generation.backend == "vllm":
                    key = "policy.generation.vllm_cfg"
                    remedies[
                        f"Raise {key}.tensor_parallel_size (it is {generation.vllm_cfg.tensor_parallel_size}) or "
                        f"pipeline_parallel_size (it is {generation.vllm_cfg.pipeline_parallel_size})"
                    ] = None
                else:
                    remedies[_remedy(recipe)] = None
    if lacking:
        size = f"policy.model_name={model.name} has {model.parameters / 1e9:.2f} billion parameters"
        raise NodeMemoryError(f"{size}; {'; '.join(lacking)}. {'. '.join(remedies)}")


def lacking_cache(recipe: Recipe, *, placement: Placement) -> str | None:
    """Return why the caches of vLLM engines do not fit in this machine's memory, where they run on its CPU, or None."""
    policy, cfg = recipe.policy, recipe.policy.generation.vllm_cfg
    config, key = select_backend(policy).config, "policy.generation.vllm_cfg"
    on_this_cpu = config.device == "cpu" and recipe.cluster.address is None
    is_vllm = policy.generation.backend == "vllm" and bool(placement.engines)
    if not is_vllm or not on_this_cpu or (here := host_bytes()) is None:
        return None
    source = open_model(policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code)
    each = cfg.kv_cache_memory_bytes
    if each is None:
        dtype = config.precision if cfg.precision == "auto" else cfg.precision
        each = estimate_memory(source.config, dtype=dtype, **cfg.sizes).default_cpu_cache_bytes
    total = each * policy.generation.ranks_per_engine * len(placement.engines)
    if total <= here:
        return None
    given = "is" if cfg.kv_cache_memory_bytes else "is by default"
    return (
        f"{key}.kv_cache_memory_bytes {given} {_gib(each)} on each rank of an engine, {_gib(total)} of them all, and "
        f"this machine has {_gib(here)}: lower it, or {key}.max_model_len (null is the model's own limit)"
    )


def least_needed(recipe: Recipe, *, model: KnownModel, placement: Placement) -> MemoryNeeds:
    """Calculate the bytes of weights, gradients, optimizer state, reference and engines."""
    trainer = least_memory(
        select_backend(recipe.policy).config,
        parameters=model.parameters,
        optimizers={stage.optimizer.name for stage in recipe.stages.values()},
        ranks=len(placement.ranks),
        adapters=model.adapters,
    )
    generation = recipe.policy.generation
    dtype: str = generation.vllm_cfg.precision
    dtype = select_backend(recipe.policy).config.precision if dtype == "auto" else dtype
    half = generation.backend == "vllm" and dtype in {"bfloat16", "float16", "half"}
    return MemoryNeeds(
        # A critic, or a reward model while it learns, is another model that is trained; a reward model that scores is
        # not trained any more.
        trainer_bytes=trainer.trainer_bytes * (2 if recipe.ppo or recipe.reward_model else 1),
        frozen_bytes=trainer.weight_bytes * (copies_reference(recipe) + recipe.is_judged_by_model),
        engine_bytes=model.parameters * (2 if half else trainer.element_bytes) * len(placement.engines),
    )


def _available(recipe: Recipe, placement: Placement) -> int | None:
    """Return the memory of all GPUs or processes of the run, or None if it runs on nodes that this one cannot see."""
    if recipe.cluster.address is not None or placement.num_nodes > 1:
        return None
    if placement.device == "cpu":
        return host_bytes()
    each, config = device_bytes(), select_backend(recipe.policy).config
    if each is None or (isinstance(config, DTensorConfig) and config.cpu_offload):
        return None
    return each * sum(placement.num_slots)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB" if num_bytes > GIB // 10 else f"{num_bytes / 2**20:.0f} MiB"


# ---- Tokenizer and rows.


def check_prompt_format(recipe: Recipe) -> None:
    """Refuse `data.prompt_format=chat` with a tokenizer that has no chat template."""
    policy = recipe.policy
    if recipe.data.prompt_format != "chat" or is_import_string(policy.model_name):
        return
    try:
        tokenizer = load_tokenizer(
            policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code
        )
    except ModelError:
        return  # a folder with a configuration alone can be explained; loading will report what is missing
    if not tokenizer.chat_template:
        raise Refusal(
            f"data.prompt_format=chat needs a tokenizer with a chat template, and that of policy.model_name="
            f"{policy.model_name} has none; set data.prompt_format=plain (the text as it is, no roles), or give the "
            f"tokenizer a template"
        )


def check_rows(recipe: Recipe, objects: Objects = NO_OBJECTS) -> None:
    """Read the local data rows, and refuse malformed ones, and a reward that needs a column which they do not have.

    A multi-turn environment is not built: it reads no row before an episode begins.

    Raises:
        ValueError: with file, line and field; or with the reward's argument and the columns that exist.
    """
    source = recipe.data.source
    if objects.data is None and not is_import_string(source) and not Path(source).expanduser().exists():
        return
    has_reward = recipe.env is not None and recipe.env.environment is None
    judge = load_environment(recipe.env, objects) if has_reward else None
    dataset, _ = load_dataset(recipe, objects)
    if judge is not None:
        judge.check(dataset.columns)
