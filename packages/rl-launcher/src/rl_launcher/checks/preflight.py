"""Preflight checks before any model is loaded or process started: files, mesh, memory, disk.

    in float32 by DTensor      weights 4, gradients 4, AdamW's moments 8         bytes a parameter
    in bfloat16 by Megatron    weights 2, gradients 4, moments and masters 12
    with adapters              the frozen weights, merged ones beside them, and 16 for each parameter of an adapter
    an engine                  its weights, in its own dtype

Activations, caches and working memory come on top and are left out: what is refused here cannot be run, and what is not
may still be too large. `explain` predicts the whole.

Knows no hub: a tokenizer or rows that cannot be had from there are left to the run.

Every check is sure of what it refuses: where only a guess is possible (a hub that does not answer, GPUs of another
machine), nothing is refused, and `explain` says what is not known.
"""

import fcntl
import os
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_backends import DTensorConfig, MegatronConfig, ModelError, load_tokenizer, select_backend
from rl_backends.loading import open_model
from rl_backends.loading.files import local_folder
from rl_backends.lora import AdapterSize
from rl_launcher.checkpoints.disk import NAME as CLAIM
from rl_launcher.checkpoints.disk import STATE_PER_WEIGHT, check_space
from rl_launcher.environments import load_environment
from rl_launcher.errors import Refusal
from rl_launcher.inputs import columns_of, load_dataset
from rl_launcher.load_model import NamedModel, adapters_of, copies_reference
from rl_launcher.python_objects import is_python_object
from rl_launcher.ray.placement import Placement, plan_placement
from rl_launcher.recipe_files.problems import nearest
from rl_launcher.schema import PolicyConfig, Recipe
from rl_launcher.user_code import NO_OBJECTS, Objects, is_import_string, named_code
from rl_observe import check_trackers
from rl_observe.glossary import METRICS, metric_of

__all__ = [
    "KnownModel",
    "Needs",
    "check",
    "check_disk",
    "check_files",
    "check_memory",
    "check_prompt_format",
    "check_rows",
    "device_bytes",
    "explained",
    "host_bytes",
    "known_model",
    "known_policy",
    "lacking_memory",
    "least_needed",
    "open_known",
    "taken",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model without its weights."""

    name: str
    """As the recipe has it."""

    config: Any
    """Of transformers."""

    parameters: int
    """Of the whole model, tied ones once."""

    adapters: AdapterSize | None = None
    """What trains in the place of the whole model; None where that does."""


def known_model(named: NamedModel) -> KnownModel | None:
    """What the model's configuration says; None where Python code makes it, or the hub does not answer.

    Raises:
        ModelError: the folder that is named holds no configuration of a language model.
    """
    if is_import_string(named.model_name) or is_python_object(named.model_name):
        return None
    try:
        return open_known(named)
    except ModelError:
        if local_folder(named.model_name) is not None:
            raise
        return None  # loading will say why the hub has no answer; nothing can be predicted meanwhile


def known_policy(policy: PolicyConfig) -> KnownModel | None:
    """As `known_model`, with the adapters that the policy trains.

    Raises:
        ModelError: as `known_model`.
        Refusal: it cannot be adapted as asked.
    """
    model = known_model(policy)
    if model is None or policy.dtensor_cfg.lora_cfg is None:
        return model
    source = open_model(policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code)
    return replace(model, adapters=adapters_of(policy, source.skeleton()))


def open_known(named: NamedModel) -> KnownModel:
    """As `known_model`, of a folder or hub id.

    Raises:
        ModelError: there is no such model, or it is not that of a language model.
    """
    from rl_generation import estimate_memory

    source = open_model(named.model_name, revision=named.revision, trust_remote_code=named.trust_remote_code)
    parameters = estimate_memory(source.config, dtype="float32", max_model_len=1).parameters
    return KnownModel(name=named.model_name, config=source.config, parameters=parameters)


WEIGHT_BYTES = 4


def check_disk(recipe: Recipe, *, model: KnownModel, free_bytes: int | None = None) -> None:
    """Refuse a run whose checkpoints and model would not fit; `free_bytes` None asks the disk.

    Raises:
        DiskSpaceError: saying how much is needed and how much is free.
    """
    if not recipe.stages:
        return
    weights = model.parameters * WEIGHT_BYTES
    check_space(
        _existing(Path(recipe.run_dir).expanduser().absolute()),
        checkpoint_bytes=_checkpoint_bytes(model),
        model_bytes=weights,
        config=recipe.checkpointing,
        free_bytes=free_bytes,
    )


def _checkpoint_bytes(model: KnownModel) -> int:
    if model.adapters is None:
        return model.parameters * WEIGHT_BYTES * STATE_PER_WEIGHT
    return model.adapters.frozen_bytes + model.adapters.trainable_bytes * STATE_PER_WEIGHT


def _existing(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(parent for parent in (folder, *folder.parents) if parent.is_dir())


READABLE = {".jsonl", ".json", ".parquet"}
LOGGED_BY = {"held_out_loss": "sft", "held_out_margin": "dpo", "held_out_pair_accuracy": "dpo"}
"""Of figures that one stage alone measures, which."""


def check_files(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse a model folder, a data file or a user's file that is not there, and a run directory that is.

    Raises:
        ValueError: naming the key, the file and one that is called nearly the same.
    """
    for key, text in named_code(recipe).items():
        _check_code(key, text)
    if not is_import_string(recipe.data.source):
        _check_data(recipe.data.source)
    for key, name in _models(recipe).items():
        if not is_import_string(name):
            try:
                local_folder(name)
            except ValueError as error:
                raise Refusal(f"{key}={error}{_like(Path(name).expanduser())}") from error
    check_trackers(recipe.logger)
    _check_metric(recipe)
    if new_run:
        if (reason := taken(recipe.run_dir)) is not None:
            raise Refusal(reason)
        _check_writable(recipe.run_dir)


def _models(recipe: Recipe) -> dict[str, str]:
    names = {"policy.model_name": recipe.policy.model_name}
    if recipe.distill is not None:
        names["distill.teacher.model_name"] = recipe.distill.teacher.model_name
    return names


def _check_metric(recipe: Recipe) -> None:
    """Refuse checkpoints that are kept for a figure which no step would log: none would be kept."""
    name = recipe.checkpointing.metric_name
    if not recipe.checkpointing.keep_top_k:
        return
    what = f"checkpointing.keep_top_k={recipe.checkpointing.keep_top_k} keeps the best by metric_name={name}, and"
    if metric_of(name) is None:
        like = nearest(name, list(METRICS))
        raise Refusal(f"{what} no run logs that{f'; did you mean {like[0]}?' if like else ''}")
    stage = LOGGED_BY.get(name)
    if stage is not None and stage not in recipe.stages:
        raise Refusal(f"{what} only {stage} logs that, which is not in this recipe; choose another")


def _check_code(key: str, text: str) -> None:
    place = text.rpartition(":")[0]
    if not place.endswith(".py"):
        return
    path = Path(place).expanduser()
    if not path.is_file():
        raise Refusal(f"{key}={text}: there is no file {path}{_like(path) or f'; looked in {path.parent.absolute()}'}")


def _check_data(source: str) -> None:
    path = Path(source).expanduser()
    is_path = path.suffix in READABLE or source.startswith((".", "/", "~"))
    if is_path and not path.exists():
        where = _like(path) or f"; looked in {path.parent.absolute()}"
        raise Refusal(f"data.source={source}: there is no such file{where}")


def taken(run_dir: str) -> str | None:
    """Why a new run would be refused this directory; None where nothing is in it."""
    folder = Path(run_dir).expanduser()
    if not (folder.is_dir() and any(folder.iterdir())):
        return None
    if (holder := _holder(folder)) is not None:
        return f"run_dir={run_dir!r} is that of a run which {holder} is carrying out now; choose another run_dir=…"
    held = ", ".join(sorted(entry.name for entry in folder.iterdir())[:4])
    return (
        f"run_dir={run_dir!r} exists and is not empty (it holds {held}, …); choose another run_dir=… or delete it. "
        f"A run that was interrupted goes on by: rl-launcher resume {run_dir}"
    )


def _holder(folder: Path) -> str | None:
    """Who holds the claim on a run's directory; None where nobody does, as after a process that was killed."""
    try:
        with (folder / CLAIM).open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read() or "a process that has just begun"
    except OSError:  # no claim, or a file system without locks
        return None
    return None


def _check_writable(run_dir: str) -> None:
    """A folder that cannot be written would else be told to be full: `/proc` has 0 bytes free."""
    folder = Path(run_dir).expanduser().absolute()
    existing = next((parent for parent in (folder, *folder.parents) if parent.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        why = (error.strerror or type(error).__name__).lower()
        raise Refusal(f"run_dir={run_dir!r} cannot be written: {existing}: {why}; choose another run_dir=…") from error


def _like(path: Path) -> str:
    """The entries beside `path` with nearly its name."""
    beside = sorted({entry.name for entry in path.parent.iterdir()} - {path.name}) if path.parent.is_dir() else []
    like = nearest(path.name, beside)
    return f"; did you mean {path.parent / like[0]}?" if like else ""


GIB = 2**30
CGROUP_LIMIT = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """The least that a run holds, on all its slots together."""

    trainer_bytes: int
    """Weights, gradients and optimizer state."""

    frozen_bytes: int
    """The reference, where there is one."""

    engine_bytes: int
    """Weights of all engines."""

    num_slots: int
    """GPUs, or processes, that share it."""

    @property
    def total(self) -> int:
        """All of it, where engine and trainer hold theirs at the same time."""
        return self.trainer_bytes + self.frozen_bytes + self.engine_bytes


def check_memory(
    recipe: Recipe, *, model: KnownModel, placement: Placement, available_bytes: int | None = None
) -> None:
    """Refuse a run whose weights, gradients and optimizer state alone are more than this machine has.

    `available_bytes` is what all slots have together; None asks the machine, which knows nothing of other ones.

    Raises:
        Refusal: saying what is needed, what there is, and which keys make it less.
    """
    lacking = lacking_memory(recipe, model=model, placement=placement, available_bytes=available_bytes)
    if lacking is not None:
        raise Refusal(f"{lacking}; rl-launcher explain shows the whole")


def lacking_memory(
    recipe: Recipe, *, model: KnownModel, placement: Placement, available_bytes: int | None = None
) -> str | None:
    """Why `check_memory` would refuse, in words; None where it would not."""
    needs = least_needed(recipe, model=model, placement=placement)
    available = _available(recipe, placement) if available_bytes is None else available_bytes
    if available is None:
        return None
    # Engines that take turns with the trainer on GPUs have given their memory away by then.
    needed = needs.total if not _takes_turns(recipe, placement) else max(needs.trainer_bytes, needs.engine_bytes)
    if needed <= available:
        return None
    what = "GPU memory" if placement.device == "cuda" else "memory"
    return (
        f"policy.model_name={model.name} has {model.parameters / 1e9:.2f} billion parameters, and training it takes at "
        f"least {_gib(needed)} of {what}: weights, gradients and optimizer {_gib(needs.trainer_bytes)}, engine "
        f"{_gib(needs.engine_bytes)}"
        + (f", reference {_gib(needs.frozen_bytes)}" if needs.frozen_bytes else "")
        + f"; "
        f"this machine has {_gib(available)}. Take a smaller model, more GPUs or nodes (cluster.gpus_per_node, "
        f"cluster.num_nodes), {_less(recipe)}, or policy.dtensor_cfg.cpu_offload=true on a GPU"
    )


def _less(recipe: Recipe) -> str:
    adapters = recipe.policy.dtensor_cfg.lora_cfg
    if recipe.policy.megatron_cfg.enabled:
        return "policy.megatron_cfg.precision=bfloat16"
    if adapters is None:
        return "adapters alone to train (policy.dtensor_cfg.lora_cfg.rank=16)"
    return f"policy.dtensor_cfg.lora_cfg.base_dtype=bfloat16 (it is {adapters.base_dtype})"


def least_needed(recipe: Recipe, *, model: KnownModel, placement: Placement) -> Needs:
    """What weights, gradients, optimizer state, reference and engines take, by arithmetic."""
    config = select_backend(recipe.policy).config
    ranks = len(placement.ranks)
    copies = _copies(config, ranks)
    weights = _weight_bytes(config)
    state = 0
    if recipe.stages:
        state = 4 + _optimizer_bytes(recipe, config)  # gradients are float32 in both backends
    held, trained, merged = model.parameters * weights, model.parameters, 0
    if (size := model.adapters) is not None:
        held, trained, merged = size.frozen_bytes + size.trainable_bytes, size.trainable, size.merged_bytes
    engines = len(placement.engines)
    return Needs(
        trainer_bytes=(held + trained * state + merged) * copies,
        frozen_bytes=held * copies if copies_reference(recipe) else 0,
        engine_bytes=model.parameters * _engine_item(recipe, weights) * engines,
        num_slots=placement.num_nodes * placement.slots_per_node,
    )


def host_bytes() -> int:
    """Memory of this machine, or of the container that this process is in, where that is less."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    try:
        limit = CGROUP_LIMIT.read_text(encoding="ascii").strip()
    except OSError:
        return physical
    return min(physical, int(limit)) if limit.isdigit() else physical


def device_bytes() -> int | None:
    """Memory of one GPU of this machine; None where it has none."""
    import torch

    if not torch.cuda.is_available():
        return None
    return int(torch.cuda.get_device_properties(0).total_memory)


def _available(recipe: Recipe, placement: Placement) -> int | None:
    """None where the run is on machines that this one knows nothing of."""
    if recipe.cluster.address is not None or placement.num_nodes > 1:
        return None
    if placement.device == "cpu":
        return host_bytes()
    each = device_bytes()
    config = select_backend(recipe.policy).config
    if each is None or (isinstance(config, DTensorConfig) and config.cpu_offload):
        return None
    return each * placement.slots_per_node


def _weight_bytes(config: DTensorConfig | MegatronConfig) -> int:
    """Of one parameter that an engine gets."""
    if isinstance(config, MegatronConfig):
        return 2 if config.precision == "bfloat16" else 4
    return 4 if config.lora_cfg is None else config.lora_cfg.torch_base_dtype.itemsize


def _takes_turns(recipe: Recipe, placement: Placement) -> bool:
    return placement.colocated and placement.device == "cuda" and recipe.cluster.runtime == "ray"


def _copies(config: DTensorConfig | MegatronConfig, ranks: int) -> int:
    """How many whole copies of the state there are over all ranks, at least."""
    if isinstance(config, DTensorConfig):
        return config.data_parallel_replicate_size
    return max(1, ranks // config.data_multiple) if not config.use_distributed_optimizer else 1


def _optimizer_bytes(recipe: Recipe, config: DTensorConfig | MegatronConfig) -> int:
    if isinstance(config, MegatronConfig):
        return 12 if config.precision == "bfloat16" else 8
    names = {stage.optimizer.name for stage in recipe.stages.values()}
    return 8 if "adamw" in names else 2


def _engine_item(recipe: Recipe, policy_bytes: int) -> int:
    generation = recipe.policy.generation
    if generation.backend == "vllm" and generation.vllm_cfg.precision in {"bfloat16", "float16", "half"}:
        return 2
    return policy_bytes


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"


def check_prompt_format(recipe: Recipe) -> None:
    """Refuse chat with a tokenizer that has no chat template; one that a function makes is not asked for.

    Raises:
        Refusal: naming both keys.
    """
    policy = recipe.policy
    if recipe.data.prompt_format != "chat" or is_import_string(policy.model_name):
        return
    try:
        tokenizer = load_tokenizer(
            policy.model_name, revision=policy.revision, trust_remote_code=policy.trust_remote_code
        )
    except ModelError:
        return  # a folder of a configuration alone can be explained; loading says what it lacks
    if not tokenizer.chat_template:
        raise Refusal(
            f"data.prompt_format=chat needs a tokenizer with a chat template, and that of policy.model_name="
            f"{policy.model_name} has none; say data.prompt_format=plain (text as it is, no roles), or give the "
            f"tokenizer a template"
        )


def check_rows(recipe: Recipe, objects: Objects = NO_OBJECTS) -> None:
    """Read the rows on this machine, and refuse bad ones, and a reward with an argument that is not a column.

    An environment of several turns is not made: it asks nothing of the rows before an episode begins.

    Raises:
        ValueError: naming file, line and field; or the reward's argument, and the columns that there are.
    """
    source = recipe.data.source
    if objects.data is None and not is_import_string(source) and not Path(source).expanduser().exists():
        return
    has_reward = recipe.env is not None and recipe.env.environment is None
    judge = load_environment(recipe.env, objects) if has_reward else None
    dataset, _ = load_dataset(recipe, objects)
    if judge is not None:
        judge.check(columns_of(dataset))


def check(recipe: Recipe, *, new_run: bool) -> None:
    """Refuse what `recipe` asks for in vain; seconds, whatever the size of the model.

    Args:
        recipe: valid by itself.
        new_run: a run directory will be made: it must not be there, and its disk must have room.

    Raises:
        ValueError: the first reason, with the key and what to do.
    """
    check_files(recipe, new_run=new_run)
    placement = plan_placement(recipe)
    model = known_policy(recipe.policy)
    if model is None:
        return
    check_memory(recipe, model=model, placement=placement)
    check_prompt_format(recipe)
    if new_run:
        check_disk(recipe, model=model)


def explained(recipe: Recipe) -> str | None:
    """As `check` of a run that is not begun, for who wants to see why: what `check_memory` refuses is returned.

    Raises:
        ValueError: any other reason.
    """
    check_files(recipe, new_run=False)
    placement = plan_placement(recipe)
    model = known_policy(recipe.policy)
    if model is None:
        return None
    check_prompt_format(recipe)
    return lacking_memory(recipe, model=model, placement=placement)
