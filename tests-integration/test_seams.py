"""The packages never import one another; here mypy and a run see that they fit all the same.

Each assignment holds a class of one package to the protocol of another. `nox -s typecheck` checks them without running.
"""

import importlib.util
import inspect
from typing import TYPE_CHECKING, get_type_hints

import pytest

from rl_algorithms import contracts, distill, dpo, grpo, kto, orpo, sft
from rl_algorithms.environments import RewardFunctionEnvironment
from rl_algorithms.preferences import scored
from rl_backends import DTensorBackend, ReferenceModel, TokenBatch
from rl_backends.backend import Backend, TrainingBackend
from rl_backends.selection import BackendConfigs
from rl_generation import (
    RemoteEngine,
    Rollout,
    Sampling,
    StreamingEngine,
    TransformersEngine,
    VllmEngine,
)
from rl_generation.engine import RequestEngine
from rl_launcher.build.parts import RunEngine
from rl_launcher.build.remote_engines import RemoteWeightSync, ServedEngines
from rl_launcher.quickstart.tiny_model import character_tokenizer
from rl_launcher.ray.dispatch import RayEngine
from rl_launcher.ray.refit import RayWeightSync
from rl_launcher.schema import PolicyConfig
from rl_observe.log_files import RefitFigures
from rl_observe.samples import text_pieces
from rl_refit import CountedRefit, ModuleSink, ModuleSource, RefitReport, ReplicasReport, WeightSink, WeightSource
from rl_refit.refit import CountedWeightSync

if TYPE_CHECKING:
    from rl_backends import MegatronBackend

    def policies_of(
        a: DTensorBackend, b: MegatronBackend, c: Backend
    ) -> tuple[contracts.Policy, contracts.Policy, contracts.Policy]:
        return a, b, c

    def backend_configs_of(policy: PolicyConfig) -> BackendConfigs:
        return policy

    def engines_of(
        a: TransformersEngine, b: VllmEngine, c: RemoteEngine
    ) -> tuple[contracts.Engine[Sampling], contracts.Engine[Sampling], contracts.Engine[Sampling]]:
        return a, b, c

    def streaming_of(a: TransformersEngine, b: VllmEngine) -> tuple[StreamingEngine, StreamingEngine]:
        return a, b

    def rollout_of(rollout: Rollout) -> contracts.Rollout:
        return rollout

    def weight_sync_of(weight_sync: CountedRefit) -> contracts.WeightSync:
        return weight_sync

    def engines_of_runs(
        a: RayEngine, b: RunEngine
    ) -> tuple[contracts.RequestEngine[Sampling], contracts.RequestEngine[Sampling]]:
        return a, b

    def engine_of_seeded_batches(engine: RunEngine) -> contracts.SeededBatchEngine[Sampling]:
        return engine

    def engines_of_requests(
        a: TransformersEngine, b: VllmEngine, c: RemoteEngine
    ) -> tuple[contracts.RequestEngine[Sampling], contracts.RequestEngine[Sampling], contracts.RequestEngine[Sampling]]:
        return a, b, c

    def weight_sync_over_ray(a: RayWeightSync) -> contracts.WeightSync:
        return a

    def parts_in_process(
        a: DTensorBackend, b: MegatronBackend, c: TransformersEngine, d: CountedRefit
    ) -> tuple[TrainingBackend, TrainingBackend, RequestEngine, CountedWeightSync]:
        return a, b, c, d

    def parts_over_ray(a: RayEngine, b: RayWeightSync) -> tuple[RequestEngine, CountedWeightSync]:
        return a, b

    def report_of(report: RefitReport) -> tuple[contracts.RefitReport, RefitFigures]:
        return report, report

    def report_of_replicas(report: ReplicasReport) -> tuple[contracts.RefitReport, RefitFigures]:
        return report, report

    def parts_elsewhere(a: ServedEngines, b: RemoteWeightSync) -> tuple[RequestEngine, CountedWeightSync]:
        return a, b

    def environment_of(environment: RewardFunctionEnvironment) -> contracts.Environment:
        return environment

    def batches_of(
        a: sft.Examples, b: grpo.Examples, c: dpo.Examples
    ) -> tuple[TokenBatch, TokenBatch, TokenBatch, contracts.TokenBatch]:
        return a, b, c, a

    def batches_of_other_pages(
        a: kto.Examples, b: orpo.Examples, c: scored.PairExamples, d: distill.Examples
    ) -> tuple[TokenBatch, TokenBatch, TokenBatch, TokenBatch]:
        return a, b, c, d

    def those_with_entropies(a: DTensorBackend, b: MegatronBackend) -> tuple[contracts.EntropyPolicy, ...]:
        return a, b

    def students_of(a: DTensorBackend, b: MegatronBackend) -> tuple[contracts.Student, contracts.Student]:
        return a, b

    def teachers_of(
        a: DTensorBackend, b: MegatronBackend, c: ReferenceModel
    ) -> tuple[contracts.Teacher, contracts.Teacher, contracts.Teacher]:
        return a, b, c

    def references_of(a: ReferenceModel, b: DTensorBackend) -> tuple[contracts.Reference, contracts.Reference]:
        return a, b

    def critics_of(a: DTensorBackend) -> tuple[contracts.ValueModel, contracts.ScoreModel]:
        return a, a

    def source_of(source: ModuleSource) -> WeightSource:
        return source

    def sink_of(sink: ModuleSink) -> WeightSink:
        return sink


def test_a_backend_is_a_policy_at_run_time_too() -> None:
    names = {name for name in vars(contracts.Policy) if not name.startswith("_")}
    assert names == {"logp", "forward_backward", "optim_step"}
    assert all(callable(getattr(DTensorBackend, name)) for name in names)


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed")
def test_megatron_is_a_policy_with_the_arguments_of_dtensor() -> None:
    from rl_backends import MegatronBackend

    for name in ("logp", "forward_backward", "optim_step", "save_checkpoint", "load_checkpoint", "save_pretrained"):
        ours, theirs = getattr(MegatronBackend, name), getattr(DTensorBackend, name)
        assert list(inspect.signature(ours).parameters) == list(inspect.signature(theirs).parameters), name


def test_the_log_keeps_what_a_refit_reports() -> None:
    logged = {name for name, value in vars(RefitFigures).items() if isinstance(value, property)}
    assert logged
    assert logged <= set(get_type_hints(RefitReport))


def test_the_pieces_of_a_real_tokenizer_make_up_its_text() -> None:
    tokenizer = character_tokenizer()
    tokens = tokenizer("4+0=4").input_ids
    pieces = text_pieces(tokens, lambda ids: str(tokenizer.decode(ids)))
    assert "".join(pieces) == tokenizer.decode(tokens)
