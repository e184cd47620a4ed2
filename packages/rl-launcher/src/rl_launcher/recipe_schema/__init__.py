"""What a recipe may say: sections made of the dataclasses of the packages that obey them.

Adds only what no package can know alone: which model, which data, which reward, which machines, and in what order
stages run.
"""

from rl_launcher.recipe_schema.checkpointing import CheckpointingConfig, HealthConfig
from rl_launcher.recipe_schema.cluster import ClusterConfig
from rl_launcher.recipe_schema.data import DataConfig, EnvironmentConfig, EvaluationConfig
from rl_launcher.recipe_schema.generation import ColocatedConfig, GenerationConfig, ResourcesConfig, VllmConfig
from rl_launcher.recipe_schema.logger import LoggerConfig
from rl_launcher.recipe_schema.policy import PolicyConfig
from rl_launcher.recipe_schema.recipe import HEADLINES, HOW_TO_JUDGE, STAGES, Recipe
from rl_launcher.recipe_schema.stages import (
    AsyncConfig,
    DistillStage,
    DPOStage,
    GRPOStage,
    SFTStage,
    TeacherConfig,
)

__all__ = [
    "HEADLINES",
    "HOW_TO_JUDGE",
    "STAGES",
    "AsyncConfig",
    "CheckpointingConfig",
    "ClusterConfig",
    "ColocatedConfig",
    "DPOStage",
    "DataConfig",
    "DistillStage",
    "EnvironmentConfig",
    "EvaluationConfig",
    "GRPOStage",
    "GenerationConfig",
    "HealthConfig",
    "LoggerConfig",
    "PolicyConfig",
    "Recipe",
    "ResourcesConfig",
    "SFTStage",
    "TeacherConfig",
    "VllmConfig",
]
