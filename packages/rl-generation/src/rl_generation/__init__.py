"""Generate rollouts with the log-probabilities that they were sampled from.

Knows language models, sampling and token ids. Does not know rewards, training or how new weights arrive.
"""

from rl_generation.agreement import AgreementError, AgreementMonitor, LogpAgreement, TokenDifference
from rl_generation.engine import Engine, EngineMetrics, RolloutDelta, SteppingEngine, StreamingEngine
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
    TimedOutSample,
)
from rl_generation.requests import Limits, Request, make_requests
from rl_generation.rollout import Rollout, RolloutTiming, VersionSpan
from rl_generation.sampling import Sampling
from rl_generation.streaming import Streamer
from rl_generation.verify import compare_logp, verify_logp
from rl_generation.transformers_engine import TransformersEngine
from rl_generation.vllm import VllmAsyncEngine, VllmEngine, VllmOptions
