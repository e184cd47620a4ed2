"""`Recipe`: a whole recipe, made of sections, and the rules that hold between them."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rl_algorithms import presets
from rl_algorithms.data.config import DataConfig
from rl_algorithms.environments.config import EnvironmentConfig
from rl_algorithms.evaluation import EvaluationConfig
from rl_algorithms.objective import Objective
from rl_backends import select_backend
from rl_launcher.recipe_files.dataclass_schema import STRICT, to_plain
from rl_launcher.recipe_files.nodes import Node, merge, node_of
from rl_launcher.recipe_files.problems import Problem, RecipeError
from rl_launcher.schema.policy import PolicyConfig
from rl_launcher.schema.running import CheckpointingConfig, ClusterConfig
from rl_launcher.schema.stages import (
    MOST_STEPS,
    DistillStage,
    DPOStage,
    GRPOStage,
    KTOStage,
    ORPOStage,
    PPOStage,
    RewardModelStage,
    SFTStage,
)
from rl_observe import HealthConfig
from rl_observe.config import LoggerConfig

HEADLINES = ("grpo", "ppo", "dpo", "kto", "orpo", "distill")
STAGES = ("sft", "reward_model", *HEADLINES)
"""All stages in the order in which they run; a run has at most one of the headlines."""
TAKE_REWARD_MODEL = ("grpo", "ppo")
"""The stages whose responses the reward model of an earlier stage can score."""

HOW_TO_JUDGE = (
    'write env: {reward: "reward.py:score"}, a file and a function in it, or env: {environment: "file.py:name"}'
)
HELD_OUT_LOSS = "held_out_loss"
METRICS_OF_REWARDS = ("held_out_greedy", "held_out_sampled", "held_out_pass@")


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A run. Its stages are the sections that are present: `sft`, then `reward_model`, then one of the others."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    foreign_keys: ClassVar[Path] = Path(__file__).parent / "foreign_keys.yaml"
    """Keys of TRL, verl and OpenRLHF with ours; `load_recipe` answers an unknown key from it."""

    expanded_keys: ClassVar[Mapping[type, Mapping[str, str]]] = {
        Objective: {
            key: f"Argument of preset={', '.join(name for name in names if key in presets.preset_arguments(name))}."
            for names in [presets.preset_names()]
            for key in dict.fromkeys(argument for name in names for argument in presets.preset_arguments(name))
        }
    }
    """Keys that `adjust` replaces by others, for editors: the arguments of presets."""

    run_dir: str
    """Directory for everything that the run writes. It must not exist yet."""

    seed: int = 0
    """Seed of initial weights, data order and sampling. The same recipe and seed give the same run on one machine."""

    cpu_threads: int | None = None
    """Threads that torch uses on the CPU; null leaves it to torch. Tiny models are fastest with 1."""

    policy: PolicyConfig
    """The model that is trained and the engine that samples from it."""

    data: DataConfig
    """The prompts."""

    env: EnvironmentConfig | None = None
    """The reward function or environment. Null for stages that have no rewards, such as sft or dpo on given pairs;
    held-out rows then measure the loss. Beside a `reward_model` that scores the responses of training, it scores the
    held-out ones."""

    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    """How the policy is measured on held-out prompts."""

    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    """Processes and nodes."""

    checkpointing: CheckpointingConfig = field(default_factory=CheckpointingConfig)
    """When checkpoints are written and which are kept."""

    health: HealthConfig = field(default_factory=HealthConfig)
    """Which signs of trouble are watched for."""

    logger: LoggerConfig = field(default_factory=LoggerConfig)
    """Where metrics are sent."""

    sft: SFTStage | None = None
    """Supervised fine-tuning, before any other stage; null leaves it out."""

    reward_model: RewardModelStage | None = None
    """A reward model, trained after sft; it scores the responses of a grpo or ppo stage that follows. Null leaves it
    out."""

    grpo: GRPOStage | None = None
    """Reinforcement learning with GRPO; null leaves it out."""

    ppo: PPOStage | None = None
    """Reinforcement learning with PPO and a critic; null leaves it out."""

    dpo: DPOStage | None = None
    """Preference learning with DPO; null leaves it out."""

    kto: KTOStage | None = None
    """Preference learning from single good and bad responses with KTO; null leaves it out."""

    orpo: ORPOStage | None = None
    """Preference learning on given pairs with ORPO; null leaves it out."""

    distill: DistillStage | None = None
    """On-policy distillation from a teacher; null leaves it out."""

    def __post_init__(self) -> None:
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be >= 0")
        if self.cpu_threads is not None and self.cpu_threads < 1:
            raise ValueError(f"cpu_threads={self.cpu_threads} must be null or >= 1")
        if len(given := [name for name in HEADLINES if name in self.stages]) > 1:
            raise ValueError(f"{' and '.join(given)} are given, and a run has only one of them; set the others to null")
        for name, stage in self.stages.items():
            if stage.max_num_epochs is not None and not 0 < stage.max_num_epochs < float("inf"):
                raise ValueError(f"{name}.max_num_epochs={stage.max_num_epochs} must be null or > 0")
            optimizers = {f"{name}.optimizer": stage.optimizer}
            if isinstance(stage, PPOStage):
                optimizers["ppo.critic.optimizer"] = stage.critic.optimizer
            for key, optimizer in optimizers.items():
                if (warmup := optimizer.warmup_steps) >= stage.max_num_steps:
                    raise ValueError(
                        f"{key}.warmup_steps={warmup} must be less than {name}.max_num_steps={stage.max_num_steps}, or "
                        f"the learning rate never reaches its peak; set {key}.warmup_steps="
                        f"{max(stage.max_num_steps // 2, 0)}"
                    )
        if self.policy.generation.remote is not None and self.cluster.runtime != "in_process":
            shares = (
                " (SGLang never shares the trainer's GPUs)" if self.policy.generation.remote.kind == "sglang" else ""
            )
            raise ValueError(
                f"policy.generation.remote is for a policy in this process, and cluster.runtime={self.cluster.runtime} "
                f"starts engines of its own{shares}; set cluster.runtime=in_process, or policy.generation.remote=null"
            )
        _check_reward_model(self)
        if self.env is None and not self.is_judged_by_model:
            _refuse_what_needs_rewards(self)
        if self.grpo is not None and (self.env is not None or self.is_judged_by_model):
            _check_grpo(self.grpo, None if self.is_judged_by_model else self.env, self.policy)
        if self.grpo is not None and self.grpo.max_turns > 1:
            _check_turns("grpo", self.grpo.max_turns, self.env, judged_by_model=self.is_judged_by_model)
        if self.ppo is not None and self.ppo.max_turns > 1:
            _check_turns("ppo", self.ppo.max_turns, self.env, judged_by_model=self.is_judged_by_model)
        if self.dpo is not None and self.dpo.max_turns > 1:
            _check_turns("dpo", self.dpo.max_turns, self.env, judged_by_model=False)
        for name, rl in (("grpo", self.grpo), ("ppo", self.ppo)):
            if rl is not None and self.policy.generation.cuts and rl.objective.ratio.proximal == "sampler":
                cut = ", ".join(f"{key}={value:g}" for key, value in self.policy.generation.cuts.items())
                raise ValueError(
                    f"policy.generation has {cut}, so that the engine reports probabilities among the tokens that are "
                    f"left, and {name}.objective.ratio.proximal=sampler compares them with the policy's among all; "
                    f"set {name}.objective.ratio.proximal=recomputed, or cut for evaluation alone (evaluation.top_p)"
                )
        fewest, most = self.policy.generation.min_new_tokens, self.evaluation.max_new_tokens
        if most is not None and most < fewest:
            raise ValueError(
                f"evaluation.max_new_tokens={most} is less than policy.generation.min_new_tokens={fewest}; raise the "
                f"one, or lower the other"
            )
        greedy = self.evaluation.greedy or self.evaluation.while_training == "greedy"
        if (best := self.checkpointing).keep_top_k and best.metric_name == "held_out_greedy" and not greedy:
            raise ValueError(
                f"checkpointing.keep_top_k={best.keep_top_k} keeps the best by metric_name=held_out_greedy, and "
                f"evaluation.greedy=false with while_training=sampled never measures it; set metric_name="
                f"held_out_sampled"
            )
        saved = self.checkpointing
        if saved.keep_top_k and saved.metric_name == HELD_OUT_LOSS and saved.higher_is_better:
            raise ValueError(
                f"checkpointing.keep_top_k={saved.keep_top_k} would keep the highest {saved.metric_name}, and the "
                f"lowest is the best; set checkpointing.higher_is_better=false"
            )

    @property
    def stages(self) -> dict[str, Any]:
        """The sections that are present, by name, in the order in which they run."""
        return {name: stage for name in STAGES if (stage := getattr(self, name)) is not None}

    @property
    def is_judged_by_model(self) -> bool:
        """Whether the reward model of this recipe scores the responses of its last stage."""
        return self.reward_model is not None and self.headline != "reward_model"

    @property
    def form(self) -> Literal["preferences", "labelled"] | None:
        """What the rows of `data` are: pairs, labelled responses, or None for prompts and conversations."""
        if self.kto is not None:
            return "labelled"
        given = self.orpo is not None or (self.dpo is not None and self.dpo.pairs == "data")
        is_last = self.reward_model is not None and self.headline == "reward_model"
        return "preferences" if given or (is_last and self.reward_model.data is None) else None  # type: ignore[union-attr]

    @property
    def sampled_by(self) -> str | None:
        """The stage that samples responses to the prompts of `data`; None if there is none."""
        return None if self.form else next((name for name in HEADLINES if name in self.stages), None)

    @property
    def generates(self) -> bool:
        """Whether the run holds an engine: a stage samples, `env` scores responses, or `samples` asks for them."""
        return self.sampled_by is not None or self.env is not None or bool(self.evaluation.samples)

    @property
    def has_local_engine(self) -> bool:
        """Whether the run makes that engine; `policy.generation.remote` names engines elsewhere instead."""
        return self.generates and self.policy.generation.remote is None

    @property
    def num_samples(self) -> int:
        """Held-out responses that are kept for the report: `evaluation.samples`, or what its null stands for."""
        if self.evaluation.samples is not None:
            return self.evaluation.samples
        return 12 if self.generates else 0

    @property
    def headline(self) -> str:
        """The last stage, which the run is about: "before" and "after" mean before and after this stage.

        Raises:
            ValueError: there is no stage.
        """
        if not self.stages:
            raise ValueError(
                f"{', '.join(STAGES)} are all absent, so there is nothing to train; give at least one of them "
                f"(rl-launcher evaluate needs none)"
            )
        return [*self.stages][-1]

    @classmethod
    def adjust(cls, recipe: Node) -> tuple[Node, list[str]]:
        """Expand the presets of objectives, and fit what a recipe inherits into other data and a shorter run.

        What a shipped recipe says of its own data set does not apply to another one.

        A run takes at least the optimizer steps of one batch of rollouts, and a warm-up longer than the run is
        shortened to half of it. What the user set beside the number of steps stays as it is, and is refused.
        """
        backend, named = recipe.find(("policy", "generation", "backend"))
        if named and backend.value == "sglang":
            problem = Problem(
                key="policy.generation.backend",
                where=backend.where,
                message="a run starts no engine of SGLang, colocated or not: it takes servers that you have started",
                hint="leave backend out, and write policy.generation.remote: {kind: sglang, address: ..., folder: ...}",
            )
            raise RecipeError("the recipe", [problem])
        recipe, notes = _expand_preset(recipe, "grpo")
        recipe, more = _expand_preset(recipe, "ppo", default="ppo")
        notes += more
        source, has_source = recipe.find(("data", "source"))
        if has_source and not source.key.is_shipped:
            left_out = []
            for name in OF_A_DATA_SET:
                node, found = recipe.find(("data", name))
                if not found or not node.key.is_shipped:
                    continue
                left_out.append((f"data.{name}", node.key))
                # An override of one column is merged into the shipped ones.
                own = {str(key): child for key, child in node.children() if not child.key.is_shipped}
                kept = replace(node, value=own) if isinstance(node.value, dict) and own else None
                recipe = recipe.with_value(("data", name), kept)
            if left_out:
                keys, where = ", ".join(name for name, _ in left_out), left_out[0][1]
                notes.append(f"{keys} ({where}) are of another data set than data.source ({source.key}): left out")

        def is_inherited(key: Node, beside: Node) -> bool:
            was_overridden = beside.key.override is not None and key.key.override is None
            return was_overridden or (key.key.is_shipped and not beside.key.is_shipped)

        for name in STAGES:
            recipe = _steps_of_epochs_alone(recipe, name)
            steps, has_steps = recipe.find((name, "max_num_steps"))
            if not has_steps or type(steps.value) is not int or steps.value < 1:
                continue
            given = f"{name}.max_num_steps={steps.value} ({steps.key})"
            batch, has_batch = recipe.find((name, "steps_per_generation"))
            if has_batch and type(batch.value) is int and batch.value > steps.value and is_inherited(batch, steps):
                notes.append(f"{given} is raised to {batch.value}, the optimizer steps of one batch of rollouts")
                steps = replace(steps, value=batch.value)
                recipe = recipe.with_value((name, "max_num_steps"), steps)
            for path in ((name, "optimizer", "warmup_steps"), (name, "critic", "optimizer", "warmup_steps")):
                warmup, has_warmup = recipe.find(path)
                is_int = has_warmup and type(warmup.value) is int
                if is_int and warmup.value >= steps.value and is_inherited(warmup, steps):  # type: ignore[operator]
                    half = steps.value // 2  # type: ignore[operator]
                    was = f"{'.'.join(path)}={warmup.value} ({warmup.key})"
                    notes.append(f"{was} is shortened to {half}, since {given}")
                    recipe = recipe.with_value(path, replace(steps, value=half))
        return recipe, notes


OF_A_DATA_SET = (
    "split",
    "name",
    "revision",
    "columns",
    "held_out",
    "held_out_split",
    "mix",
    "mix_splits",
    "mix_weights",
)
"""Keys of `data` that describe one data set."""


def _steps_of_epochs_alone(recipe: Node, name: str) -> Node:
    """Give a stage that says `max_num_epochs` alone more steps than these can be."""
    epochs, found = recipe.find((name, "max_num_epochs"))
    if not found or epochs.value is None or recipe.find((name, "max_num_steps"))[1]:
        return recipe
    each, has_each = recipe.find((name, "steps_per_generation"))
    size = each.value if has_each and type(each.value) is int and each.value > 0 else 4 if name == "ppo" else 1
    section, _ = recipe.find((name,))
    steps = replace(epochs, value=MOST_STEPS // size * size)
    children = {str(key): child for key, child in section.children()}
    return recipe.with_value((name,), replace(section, value={**children, "max_num_steps": steps}))


def _expand_preset(recipe: Node, stage: str, *, default: str | None = None) -> tuple[Node, list[str]]:
    """Replace `preset` and its arguments in a stage's `objective` by the fields of that objective; other keys win.

    Args:
        recipe: of the run.
        stage: `grpo` or `ppo`.
        default: the preset that an objective without one starts from; None leaves it as it is.

    Raises:
        RecipeError: there is no such preset, or it refuses an argument.
    """
    path = (stage, "objective")
    section, found = recipe.find(path)
    if not found or not isinstance(section.value, dict):
        return recipe, []
    children = dict(section.value)
    named = children.pop("preset", None)
    is_given = named is not None and named.value is not None
    if not is_given and default is None:
        return recipe, []
    name = str(named.value) if named is not None and is_given else str(default)
    where = named if named is not None and is_given else section
    try:
        arguments = presets.preset_arguments(name)
        given = {each: children.pop(each).plain() for each in arguments if each in children}
        surrogate, is_another = section.find(("ratio", "surrogate"))
        made = presets.preset(name, **given)
        made = presets.with_surrogate(made, str(surrogate.value) if is_another else None)
    except (TypeError, ValueError) as error:
        problem = Problem(
            key=f"{stage}.objective.preset",
            where=where.where,
            message=str(error),
            hint="`rl-algorithms explain` lists the presets, and `rl-algorithms explain NAME` prints one",
        )
        raise RecipeError("the recipe", [problem]) from error
    base = node_of(to_plain(made), where.origin)
    expanded = merge(base, replace(section, value=children))
    note = f"{stage}.objective starts from the preset {name} ({where.where})"
    if children:
        note += f", and {', '.join(f'{stage}.objective.{each}' for each in children)} change it"
    return recipe.with_value(path, expanded), [note] if is_given else []


def _refuse_what_needs_rewards(recipe: Recipe) -> None:
    needs = dict.fromkeys(TAKE_REWARD_MODEL, "learns from rewards")
    needs["distill"] = "logs the rewards of its rollouts"
    if recipe.dpo is not None and recipe.dpo.pairs != "data":
        needs["dpo"] = "pairs its own responses by their rewards (dpo.pairs=data takes given pairs)"
    for name in recipe.stages:
        if name in needs:
            trained = ", or add a stage reward_model" if name in TAKE_REWARD_MODEL else ""
            raise ValueError(f"{name} {needs[name]}, and env is missing; {HOW_TO_JUDGE}{trained}")
    saved = recipe.checkpointing
    if saved.keep_top_k and (saved.metric_name == "reward" or saved.metric_name.startswith(METRICS_OF_REWARDS)):
        pairs = recipe.form == "preferences"
        other = "held_out_pair_accuracy" if pairs else f"{HELD_OUT_LOSS} with higher_is_better=false"
        raise ValueError(
            f"checkpointing.keep_top_k={saved.keep_top_k} keeps the best by metric_name={saved.metric_name}, and "
            f"without env no response gets a reward; set metric_name={other}, or keep_top_k=0"
        )
    for each in fields(EvaluationConfig):
        value = getattr(recipe.evaluation, each.name)
        if each.name in {"samples_per_prompt", "pass_at", "pass_reward"} and value != each.default:
            raise ValueError(
                f"evaluation.{each.name}={value} concerns responses with rewards, and env is missing; leave the key "
                f"out, or {HOW_TO_JUDGE}"
            )


def _check_reward_model(recipe: Recipe) -> None:
    stage = recipe.reward_model
    if recipe.ppo is not None and recipe.ppo.critic.start_from == "reward_model" and stage is None:
        raise ValueError(
            "ppo.critic.start_from=reward_model, and this recipe has no stage reward_model; add one, or set "
            "ppo.critic.start_from=policy"
        )
    owned = [name for name in ("reward_model", "ppo") if name in recipe.stages]
    if owned and select_backend(recipe.policy).adapters is not None:
        raise ValueError(
            f"{' and '.join(owned)} train all weights of a model beside the policy, and lora_cfg is for policies that "
            f"cannot be trained whole; leave policy's lora_cfg out"
        )
    if stage is None:
        return
    if recipe.headline == "reward_model":
        if stage.data is not None:
            raise ValueError(
                "reward_model.data is for a recipe that goes on with grpo or ppo, whose prompts are in data; here "
                "reward_model is the last stage: move its keys to data"
            )
        if recipe.env is not None:
            raise ValueError(
                "env scores responses, and a recipe that ends with reward_model samples none; set env=null, or go on "
                "with grpo or ppo"
            )
        return
    if recipe.headline not in TAKE_REWARD_MODEL:
        raise ValueError(
            f"reward_model scores responses for {' or '.join(TAKE_REWARD_MODEL)}, and {recipe.headline} has no use for "
            f"it; set {recipe.headline}=null or reward_model=null"
        )
    if stage.data is None:
        raise ValueError(
            f"reward_model.data is missing: data has the prompts of {recipe.headline}, and a reward model learns from "
            f"pairs; write reward_model: {{data: {{source: pairs.jsonl}}}}"
        )
    if recipe.grpo is not None and recipe.grpo.async_grpo is not None:
        raise ValueError(
            "grpo.async_grpo samples and scores while the policy trains, and the reward model is on the ranks that "
            "train; set grpo.async_grpo=null, or score with env and leave reward_model out"
        )


def _check_turns(name: str, max_turns: int, env: EnvironmentConfig | None, *, judged_by_model: bool) -> None:
    if judged_by_model or env is None or env.environment is None:
        judge = "the reward model" if judged_by_model else "a reward function"
        raise ValueError(
            f"{name}.max_turns={max_turns} needs an environment that replies to a response, and {judge} ends every "
            f"conversation; name one by env.environment{' and leave reward_model out' * judged_by_model}"
        )


def _check_grpo(stage: GRPOStage, env: EnvironmentConfig | None, policy: PolicyConfig) -> None:
    advantage, generation = stage.objective.advantage, policy.generation
    if advantage.normalize_each_reward:
        compared = [name for name in env.rewards if env.weights.get(name, 1.0)] if env else []
        if not compared:
            raise ValueError(
                "grpo.objective.advantage.normalize_each_reward=true compares rewards by name, and env names none; "
                "give env.rewards={name: function, ...} instead of env.reward"
            )
        if unknown := sorted(set(advantage.reward_weights) - set(compared)):
            raise ValueError(
                f"grpo.objective.advantage.reward_weights names {', '.join(unknown)}, and the rewards that count "
                f"are {', '.join(compared)}"
            )
    takes_weights_in_flight = generation.backend == "vllm" and generation.vllm_cfg.async_engine
    if stage.async_grpo is not None and stage.async_grpo.weights == "in_flight" and not takes_weights_in_flight:
        if generation.remote is not None and generation.remote.kind == "sglang":
            raise ValueError(
                "grpo.async_grpo.weights=in_flight changes weights in the middle of responses, and how SGLang numbers "
                "their tokens then was never tried (policy.generation.remote.kind=sglang); set weights=between_calls"
            )
        raise ValueError(
            f"grpo.async_grpo.weights=in_flight changes weights in the middle of responses, and policy.generation."
            f"backend={generation.backend} with vllm_cfg.async_engine={str(generation.vllm_cfg.async_engine).lower()} "
            f"changes them between calls; set backend=vllm and async_engine=true, or weights=between_calls"
        )
