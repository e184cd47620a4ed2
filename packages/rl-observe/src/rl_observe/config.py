"""Where the figures of a run go, and how closely it is watched.

It does not know the clients that send them; `observe.trackers` does.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

STRICT: dict[str, object] = {"extra": "forbid", "use_attribute_docstrings": True}

__all__ = ["HealthConfig", "LoggerConfig", "MlflowConfig", "ProfilerConfig", "TrackioConfig", "WandbConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig:
    """Weights & Biases. Its key comes from `wandb login` or `WANDB_API_KEY` and never from a recipe."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    project: str = "rl-stack"
    """The project that the run is listed in."""

    name: str | None = None
    """What the run is called there; null takes the name of the run directory."""

    entity: str | None = None
    """The team or user whose project it is; null takes the one that the key belongs to."""

    mode: Literal["online", "offline"] = "online"
    """`offline` sends nothing and keeps all in `run_dir/wandb`, for `wandb sync`."""

    def __post_init__(self) -> None:
        _refuse_empty(self, "project")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig:
    """MLflow. Credentials of its server come from its own variables, as `MLFLOW_TRACKING_TOKEN`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    experiment_name: str = "rl-stack"
    """The experiment that the run is listed in; made where there is none."""

    run_name: str | None = None
    """What the run is called there; null takes the name of the run directory."""

    tracking_uri: str | None = None
    """Address of the server, or `sqlite:///file`; null is `MLFLOW_TRACKING_URI`, or else `run_dir/mlflow.db`."""

    def __post_init__(self) -> None:
        _refuse_empty(self, "experiment_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioConfig:
    """Trackio, which keeps runs on this machine, for `trackio show`."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    project: str = "rl-stack"
    """The project that the run is listed in."""

    name: str | None = None
    """What the run is called there; null takes the name of the run directory."""

    def __post_init__(self) -> None:
        _refuse_empty(self, "project")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig:
    """What `torch.profiler` records of some steps: one file a rank of the trainer in `profile`, for ui.perfetto.dev."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    first_step: int = 3
    """The first optimizer step that is recorded, from 1. The first ones compile and allocate, and show little else."""

    num_steps: int = 2
    """Steps that are recorded. A file holds every operator call, so that each step costs megabytes and time."""

    stage: str | None = None
    """The stage whose steps are counted, as `grpo`; null takes the first that comes to `first_step`."""

    with_stack: bool = False
    """Record the lines of Python that called each operator. Slower, and larger files."""

    record_shapes: bool = False
    """Record the shapes of each operator's inputs."""

    profile_memory: bool = False
    """Record what each operator allocates."""

    def __post_init__(self) -> None:
        _refuse_below(self, first_step=1, num_steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig:
    """Beside `metrics.jsonl` and `report.html`, which are always written."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    tensorboard_enabled: bool = True
    """Write TensorBoard events into `run_dir/tensorboard`."""

    wandb_enabled: bool = False
    """Send the figures and the resolved recipe to Weights & Biases. Needs `rl-launcher[wandb]`."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Where to, if they are sent."""

    mlflow_enabled: bool = False
    """Send them to MLflow. Needs `rl-launcher[mlflow]`."""

    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """Where to, if they are sent."""

    trackio_enabled: bool = False
    """Give them to trackio. Needs `rl-launcher[trackio]`."""

    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Where to, if they are given."""

    num_samples_with_tokens: int = 4
    """Held-out answers, before and after, of which the report shows every token with its log-probability."""

    trace: bool = False
    """Write `run_dir/trace.json` at the end, for ui.perfetto.dev: what each process did, and when."""

    profiler: ProfilerConfig | None = None
    """Record some steps operator by operator; null records none."""

    def __post_init__(self) -> None:
        _refuse_below(self, num_samples_with_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig:
    """Conditions that a run notices by itself, by name, and what it does then."""

    __pydantic_config__: ClassVar[dict[str, object]] = STRICT

    on_reward_collapse: Literal["stop", "warn", "ignore"] = "warn"
    """`reward_collapse`: the mean reward of `reward_collapse_steps` logged steps is below `reward_collapse_share` of
    the best such mean before. `stop` saves and ends the run."""

    reward_collapse_steps: int = 20
    """Logged steps that are looked at together. Fewer notice sooner, and are fooled by noise."""

    reward_collapse_share: float = 0.5
    """Share of the best mean below which a reward has collapsed."""

    on_logp_mismatch: Literal["stop", "warn", "ignore"] = "warn"
    """`logp_mismatch`: `token_mult_prob_error` is above `max_token_mult_prob_error`: engine and trainer do not hold the
    same model."""

    max_token_mult_prob_error: float = 1.05
    """What engine and trainer may differ by; 1 is perfect."""

    def __post_init__(self) -> None:
        _refuse_below(self, reward_collapse_steps=1, max_token_mult_prob_error=1)
        if not 0.0 < self.reward_collapse_share < 1.0:
            raise ValueError(f"reward_collapse_share={self.reward_collapse_share} must be between 0 and 1")


def _refuse_below(section: object, **least: float) -> None:
    for name, bound in least.items():
        if not getattr(section, name) >= bound:
            raise ValueError(f"{name}={getattr(section, name)} must be >= {bound}")


def _refuse_empty(section: object, name: str) -> None:
    if not getattr(section, name).strip():
        raise ValueError(f"{name}={getattr(section, name)!r} must not be empty")
