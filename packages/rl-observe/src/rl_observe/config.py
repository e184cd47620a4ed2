"""The settings of logging, trackers, profiler and health conditions, as plain dataclasses."""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

Reaction = Literal["stop", "warn", "ignore"]


class _Section:
    """What all settings share."""

    __slots__ = ()
    # For programs that validate these dataclasses with pydantic, as rl-launcher does.
    __pydantic_config__: ClassVar[dict[str, object]] = {"extra": "forbid"}

    def _refuse_below(self, **least: float) -> None:
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"{name}={getattr(self, name)} must be >= {bound}")

    def _refuse_empty(self, name: str) -> None:
        if not getattr(self, name).strip():
            raise ValueError(f"{name}={getattr(self, name)!r} must not be empty")


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbConfig(_Section):
    """Weights & Biases. The key comes from `wandb login` or `WANDB_API_KEY`, never from a recipe."""

    project: str = "rl-stack"
    """The project that lists the run."""

    name: str | None = None
    """The name of the run there; null uses the name of the run directory."""

    entity: str | None = None
    """The team or user that owns the project; null uses the owner of the key."""

    mode: Literal["online", "offline"] = "online"
    """`offline` sends nothing and keeps everything in `run_dir/wandb`, for `wandb sync`."""

    def __post_init__(self) -> None:
        self._refuse_empty("project")


@dataclass(frozen=True, slots=True, kw_only=True)
class MlflowConfig(_Section):
    """MLflow. Credentials come from MLflow's own environment variables, such as `MLFLOW_TRACKING_TOKEN`."""

    experiment_name: str = "rl-stack"
    """The experiment that lists the run; created if it does not exist."""

    run_name: str | None = None
    """The name of the run there; null uses the name of the run directory."""

    tracking_uri: str | None = None
    """Address of the server, or `sqlite:///file`; null uses `MLFLOW_TRACKING_URI`, or else `run_dir/mlflow.db`."""

    def __post_init__(self) -> None:
        self._refuse_empty("experiment_name")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrackioConfig(_Section):
    """Trackio, which keeps runs on this machine, for `trackio show`."""

    project: str = "rl-stack"
    """The project that lists the run."""

    name: str | None = None
    """The name of the run there; null uses the name of the run directory."""

    def __post_init__(self) -> None:
        self._refuse_empty("project")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig(_Section):
    """Steps to record with `torch.profiler`: one file per trainer rank in `profile`, for ui.perfetto.dev."""

    first_step: int = 3
    """The first optimizer step to record, from 1. The first two mostly show compilation and allocation."""

    num_steps: int = 2
    """Steps to record. Every operator call is written, so each step costs megabytes and time."""

    stage: str | None = None
    """The stage to record, such as `grpo`; null records the first stage that reaches `first_step`."""

    with_stack: bool = False
    """Record the Python lines that called each operator. Slower, and larger files."""

    record_shapes: bool = False
    """Record the shapes of each operator's inputs."""

    profile_memory: bool = False
    """Record the memory that each operator allocates."""

    def __post_init__(self) -> None:
        self._refuse_below(first_step=1, num_steps=1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStepsConfig(_Section):
    """Steps that are recorded token by token in `run_dir/steps`, for `rl-observe show`, `replay` and `diagnose`."""

    last: int = 4
    """The newest steps, which are always kept; 0 keeps none."""

    every: int = 0
    """Keep every k-th step for good as well; 0 keeps none."""

    around_events: int = 2
    """Keep so many recorded steps before and after each event of `events.jsonl`; not above `last`."""

    max_bytes: int = 1 << 30
    """What all recorded steps may take on disk together. Beyond it the oldest are deleted, those around events last."""

    def __post_init__(self) -> None:
        self._refuse_below(last=0, every=0, around_events=0, max_bytes=1)
        if self.around_events > self.last > 0:
            raise ValueError(
                f"around_events={self.around_events} keeps steps before an event, and last={self.last} has deleted "
                f"them by then; raise last"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerConfig(_Section):
    """Where metrics go in addition to `metrics.jsonl` and `report.html`, which are always written."""

    tensorboard_enabled: bool = True
    """Write TensorBoard events into `run_dir/tensorboard`."""

    wandb_enabled: bool = False
    """Send metrics and the resolved recipe to Weights & Biases. Needs `rl-observe[wandb]`."""

    wandb: WandbConfig = field(default_factory=WandbConfig)
    """Settings of Weights & Biases."""

    mlflow_enabled: bool = False
    """Send metrics and the resolved recipe to MLflow. Needs `rl-observe[mlflow]`."""

    mlflow: MlflowConfig = field(default_factory=MlflowConfig)
    """Settings of MLflow."""

    trackio_enabled: bool = False
    """Send metrics and the resolved recipe to trackio. Needs `rl-observe[trackio]`."""

    trackio: TrackioConfig = field(default_factory=TrackioConfig)
    """Settings of trackio."""

    num_samples_with_tokens: int = 4
    """Held-out responses, before and after training, that the report shows token by token with log-probabilities."""

    recorded_steps: RecordedStepsConfig = field(default_factory=RecordedStepsConfig)
    """Which steps are recorded token by token."""

    trace: bool = False
    """Write `run_dir/trace.json` at the end, for ui.perfetto.dev: what each process did, and when."""

    profiler: ProfilerConfig | None = None
    """Record some steps operator by operator; null records none."""

    def __post_init__(self) -> None:
        self._refuse_below(num_samples_with_tokens=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthConfig(_Section):
    """Conditions that a run detects in its own log, and how it reacts."""

    on_no_signal: Reaction = "warn"
    """`no_signal`: for `no_signal_batches` batches in a row, no group had rewards that differ, so that nothing was
    learned. `stop` saves and ends the run."""

    no_signal_batches: int = 10
    """Consecutive batches without a signal before `no_signal` is reported."""

    on_reward_collapse: Reaction = "warn"
    """`reward_collapse`: the mean reward of `reward_collapse_steps` logged steps is below `reward_collapse_share` of
    the best earlier mean. `stop` saves and ends the run."""

    reward_collapse_steps: int = 20
    """Logged steps to average over. Fewer steps notice a collapse sooner, and mistake noise for one more often."""

    reward_collapse_share: float = 0.5
    """Fraction of the best mean below which the reward has collapsed."""

    on_logp_mismatch: Reaction = "warn"
    """`logp_mismatch`: `token_mult_prob_error` is above `max_token_mult_prob_error`: engine and trainer do not hold the
    same model. `stop` saves and ends the run."""

    max_token_mult_prob_error: float = 1.05
    """The largest accepted `token_mult_prob_error`; 1 is perfect agreement."""

    def __post_init__(self) -> None:
        self._refuse_below(no_signal_batches=1, reward_collapse_steps=1, max_token_mult_prob_error=1)
        if not 0.0 < self.reward_collapse_share < 1.0:
            raise ValueError(f"reward_collapse_share={self.reward_collapse_share} must be between 0 and 1")
