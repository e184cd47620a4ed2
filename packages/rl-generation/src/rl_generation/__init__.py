"""Generate rollouts with the log-probabilities that they were sampled from.

Knows language models, sampling and token ids. Does not know rewards, training or how new weights arrive.
"""

from rl_generation.chat import decode_rollout, encode_chat, encode_text, with_required_prefix
from rl_generation.engine import Engine, EngineMetrics, RequestEngine, RolloutDelta, StreamingEngine
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
    TimedOutSample,
)
from rl_generation.loading import EngineSpec, load_engine, load_transformers_engine
from rl_generation.memory import EngineMemory, estimate_memory
from rl_generation.model_flags import MODEL_FLAGS, ModelFlag, ModelQuirk, flags_for
from rl_generation.remote import RemoteEngine
from rl_generation.requests import Limits, Request, Sampling, make_requests
from rl_generation.rollout import Rollout, VersionSpan
from rl_generation.training_engine import EngineConfig, TrainingEngineSpec, VllmConfig, make_training_engine
from rl_generation.transformers_engine import TransformersEngine
from rl_generation.verify import (
    AgreementError,
    AgreementMonitor,
    Coverage,
    LogpAgreement,
    TokenDifference,
    compare_logp,
    verify_logp,
)
from rl_generation.vllm import LoraAdapter, VllmEngine, VllmOptions

__all__ = [
    "MODEL_FLAGS",
    "AgreementError",
    "AgreementMonitor",
    "Coverage",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineMemory",
    "EngineMetrics",
    "EngineOptionError",
    "EngineSpec",
    "Limits",
    "LogpAgreement",
    "LogpError",
    "LoraAdapter",
    "ModelError",
    "ModelFlag",
    "ModelQuirk",
    "PromptError",
    "RemoteEngine",
    "Request",
    "RequestEngine",
    "Rollout",
    "RolloutDelta",
    "SampleTimeoutError",
    "Sampling",
    "StreamingEngine",
    "TimedOutSample",
    "TokenDifference",
    "TrainingEngineSpec",
    "TransformersEngine",
    "VersionSpan",
    "VllmConfig",
    "VllmEngine",
    "VllmOptions",
    "compare_logp",
    "decode_rollout",
    "encode_chat",
    "encode_text",
    "estimate_memory",
    "flags_for",
    "load_engine",
    "load_transformers_engine",
    "make_requests",
    "make_training_engine",
    "verify_logp",
    "with_required_prefix",
]
