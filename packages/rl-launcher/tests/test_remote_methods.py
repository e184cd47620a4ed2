"""The table of remote methods: what it covers, what ranks get and return, and which phase each method enters."""

import dataclasses
import pickle
from types import SimpleNamespace

import pytest
import torch

from rl_algorithms import contracts
from rl_backends import DTensorBackend, MegatronBackend, OptimizerConfig
from rl_backends.backend import TrainingBackend
from rl_backends.packed_batch import pack, unpack
from rl_launcher.ray.colocation import ColocatedModel
from rl_launcher.ray.policy import RayModel, RayPolicy
from rl_launcher.ray.remote_methods import POLICY_METHODS, RemoteCall
from rl_launcher.ray.training_worker import POLICY, TrainingWorker


def methods_of(*protocols):
    return {name for each in protocols for name in vars(each) if callable(vars(each)[name]) and name[0] != "_"}


def test_every_method_that_the_launcher_calls_on_a_policy_has_a_row():
    wanted = methods_of(
        TrainingBackend, contracts.Policy, contracts.EntropyPolicy, contracts.Student, contracts.Teacher
    )
    assert wanted - set(vars(RayPolicy)) <= POLICY_METHODS.keys()
    assert {"logp", "forward_backward", "optim_step", "save_checkpoint"} <= wanted


def test_every_method_of_a_frozen_model_has_a_row_that_frozen_models_have():
    frozen = {name for name, method in POLICY_METHODS.items() if method.of == "any"}
    assert methods_of(contracts.Reference, contracts.Teacher) <= frozen


@pytest.mark.parametrize("backend", [DTensorBackend, MegatronBackend])
def test_every_row_is_a_method_of_who_runs_it(backend):
    for name, method in POLICY_METHODS.items():
        owner = TrainingWorker if method.runs == "worker" else backend
        assert callable(getattr(owner, name, None)), f"{owner.__name__} has no {name}"


@dataclasses.dataclass(frozen=True)
class Batch:
    tokens: torch.Tensor
    weights: torch.Tensor
    name: str = "a batch"


def batch():
    return Batch(tokens=torch.arange(6).view(2, 3), weights=torch.tensor([0.5, 1.5], dtype=torch.bfloat16))


def test_a_batch_travels_as_arrays_and_arrives_bit_for_bit():
    sent = batch()
    arrived = unpack(pickle.loads(pickle.dumps(pack(sent))))
    assert torch.equal(arrived.tokens, sent.tokens)
    assert torch.equal(arrived.weights, sent.weights)
    assert (arrived.weights.dtype, arrived.name) == (torch.bfloat16, "a batch")


class BackendDouble:
    """Records what it is called with; `learning_rate` as the backends', which refuse before there is an optimizer."""

    def __init__(self, calls, name):
        self.calls, self.name, self.version, self.rate = calls, name, 0, None

    @property
    def learning_rate(self):
        if self.rate is None:
            raise RuntimeError("there is no optimizer yet")
        return self.rate

    def __getattr__(self, method):
        def call(*arguments, **options):
            self.calls.append((self.name, method, arguments, options))
            if method == "start_training":
                self.rate = 0.25
            if method == "freeze_reference":
                return BackendDouble(self.calls, "reference")
            return f"{method} of {self.name}"

        return call


class ActorDouble:
    """A rank in this process, behind what `RayPolicy` uses of an actor."""

    def __init__(self, calls, rank):
        self.worker = TrainingWorker.__new__(TrainingWorker)
        self.worker._rank, self.worker._models = rank, {POLICY: BackendDouble(calls, f"rank {rank}")}
        self.worker.dtypes = lambda: {f"weight {rank}": "float32"}

    def submit(self, method, *arguments, **options):
        return SimpleNamespace(value=getattr(self.worker, method)(*arguments, **options))


@pytest.fixture
def ranks(monkeypatch):
    """A `RayPolicy` over two ranks in this process, and the calls that their backends got."""
    calls, puts = [], []
    runtime = SimpleNamespace(
        config=SimpleNamespace(call_timeout_s=60, start_timeout_s=60, hang_timeout_s=60),
        put=lambda value: puts.append(value) or value,
    )
    monkeypatch.setattr("rl_launcher.ray.policy.gather", lambda pendings, **_: [each.value for each in pendings])
    return RayPolicy(runtime, [ActorDouble(calls, 0), ActorDouble(calls, 1)]), calls, puts


def test_all_ranks_get_the_arguments_of_the_backend_and_the_driver_gets_rank_0s_result(ranks):
    policy, calls, _ = ranks
    assert policy.optim_step() == "optim_step of rank 0"
    assert calls == [("rank 0", "optim_step", (), {}), ("rank 1", "optim_step", (), {})]


def test_a_batch_is_put_once_and_unpacked_on_every_rank(ranks):
    policy, calls, puts = ranks
    assert policy.forward_backward(batch(), "the loss", output="logp") == "forward_backward of rank 0"
    assert len(puts) == 1
    for _, _, (arrived, loss), options in calls:
        assert torch.equal(arrived.tokens, batch().tokens)
        assert (loss, options) == ("the loss", {"output": "logp"})


def test_a_folder_is_made_absolute_and_nothing_is_returned(ranks, tmp_path, monkeypatch):
    policy, calls, _ = ranks
    monkeypatch.chdir(tmp_path)
    assert policy.save_checkpoint("here", weights=False) is None
    assert calls[0] == ("rank 0", "save_checkpoint", (str(tmp_path / "here"),), {"weights": False})


def test_dicts_of_all_ranks_are_merged(ranks):
    assert ranks[0].dtypes() == {"weight 0": "float32", "weight 1": "float32"}


def test_version_and_learning_rate_travel_with_every_call(ranks):
    policy, _, _ = ranks
    policy.explain()
    with pytest.raises(RuntimeError, match="no optimizer yet"):
        _ = policy.learning_rate
    policy.version = 7
    policy.start_training(OptimizerConfig(lr=0.25), num_steps=2)
    assert (policy.version, policy.learning_rate) == (7, 0.25)
    assert [actor.worker._models[POLICY].version for actor in policy._actors] == [7, 7]


def test_a_reference_stays_on_the_ranks_until_its_handle_is_gone(ranks):
    policy, calls, _ = ranks
    reference = policy.freeze_reference()
    assert isinstance(reference, RayModel)
    assert reference.logp(batch()) == "logp of reference"
    held = [set(actor.worker._models) for actor in policy._actors]
    assert held == [{POLICY, reference.number}] * 2
    del reference
    policy.report()
    assert [set(actor.worker._models) for actor in policy._actors] == [{POLICY}] * 2
    assert {name for name, *_ in calls} == {"rank 0", "rank 1", "reference"}


def test_what_is_not_in_the_table_is_refused_by_name(ranks):
    policy, _, _ = ranks
    with pytest.raises(AttributeError, match=r"no method 'frobnicate'; it has start_training, logp"):
        policy.frobnicate()
    with pytest.raises(AttributeError, match="a frozen model on Ray has no method 'optim_step'"):
        policy.freeze_reference().optim_step()


def test_a_colocated_policy_enters_the_phase_that_each_row_needs(ranks):
    policy, calls, _ = ranks
    entered = []
    colocation = SimpleNamespace(enter=entered.append, explain=lambda: "alternately")
    colocated = ColocatedModel(policy, colocation, offload_references=True)
    colocated.metrics()
    colocated.version = 3
    assert (colocated.version, entered) == (3, [])
    reference = colocated.freeze_reference()
    assert calls[-1][3] == {"offload": True}
    reference.logp(batch())
    colocated.entropy(batch())
    assert entered == ["training"] * 3
    colocated.freeze_reference(without_adapters=True)
    assert calls[-1][3] == {"without_adapters": True}
    assert colocated.explain().endswith("alternately")


def test_a_call_crosses_processes():
    call = RemoteCall(method="logp", model=POLICY, result=None, version=3, forgotten=(1, 2))
    assert pickle.loads(pickle.dumps(call)) == call
