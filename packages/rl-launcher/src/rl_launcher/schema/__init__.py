"""The schema of a recipe: dataclasses, many of which belong to the packages that they configure.

The launcher adds what no package can know alone: which model, data, reward and nodes, and the order of stages.
"""

from rl_algorithms.data.config import DataConfig
from rl_algorithms.environments.config import EnvironmentConfig
from rl_algorithms.evaluation import EvaluationConfig
from rl_algorithms.staleness import AsyncConfig
from rl_generation.training_engine import VllmConfig
from rl_launcher.schema.policy import ColocatedConfig, GenerationConfig, PolicyConfig, RemoteConfig, ResourcesConfig
from rl_launcher.schema.recipe import HEADLINES, HOW_TO_JUDGE, STAGES, Recipe
from rl_launcher.schema.running import CheckpointingConfig, ClusterConfig
from rl_launcher.schema.stages import (
    CriticConfig,
    DistillStage,
    DPOStage,
    GRPOStage,
    KTOStage,
    ORPOStage,
    PPOStage,
    RewardModelStage,
    SFTStage,
    TeacherConfig,
    steps_of_epochs,
)
from rl_observe import HealthConfig
from rl_observe.config import LoggerConfig

__all__ = [
    "HEADLINES",
    "HOW_TO_JUDGE",
    "STAGES",
    "AsyncConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "CriticConfig",
    "DPOStage",
    "DataConfig",
    "DistillStage",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GRPOStage",
    "GenerationConfig",
    "HealthConfig",
    "KTOStage",
    "LoggerConfig",
    "ORPOStage",
    "PPOStage",
    "PolicyConfig",
    "Recipe",
    "RemoteConfig",
    "ResourcesConfig",
    "RewardModelStage",
    "SFTStage",
    "TeacherConfig",
    "VllmConfig",
    "steps_of_epochs",
]
