"""The table of remote methods: what it covers, what ranks get and return, and which phase each method enters."""

import dataclasses
import pickle
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from rl_algorithms import contracts
from rl_backends import DTensorBackend, MegatronBackend, OptimizerConfig
from rl_backends.backend import TrainingBackend
from rl_backends.batching.dealing import DealtRows, RowDealing
from rl_backends.errors import BatchError
from rl_launcher.ray.colocation import ColocatedModel
from rl_launcher.ray.policy import RayModel, RayPolicy
from rl_launcher.ray.remote_methods import POLICY_METHODS, RemoteCall, packed, unpacked
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
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor
    weights: torch.Tensor


def batch():
    """Of two long rows and two short ones."""
    lengths = torch.tensor([3, 3, 2, 2])
    return Batch(
        tokens=torch.arange(12).view(4, 3),
        lengths=lengths,
        trainable=(torch.arange(3) > 0) & (torch.arange(3) < lengths[:, None]),
        weights=torch.tensor([0.5, 1.5, 2.5, 3.5], dtype=torch.bfloat16),
    )


def test_a_batch_travels_as_arrays_and_arrives_bit_for_bit():
    sent = batch()
    [dealt] = RowDealing(rank=0, num_ranks=1, micro_batch_size=4).deal(sent)
    travelled = unpacked(pickle.loads(pickle.dumps(packed(dealt))), writable=False)
    assert (type(travelled), travelled.rows.tolist()) == (DealtRows, [0, 1, 2, 3])
    arrived = travelled.examples
    assert torch.equal(arrived.tokens, sent.tokens)
    assert torch.equal(arrived.weights, sent.weights)
    assert (arrived.weights.dtype, type(arrived)) == (torch.bfloat16, Batch)


class BackendDouble:
    """Records what it is called with; `learning_rate` as the backends', which refuse before there is an optimizer."""

    def __init__(self, calls, name, *, dealt_to=0, num_ranks=2):
        self.calls, self.name, self.version, self.rate = calls, name, 0, None
        self.dealt_to, self.num_ranks = dealt_to, num_ranks

    def row_dealing(self):
        options = {"micro_batch_size": 1, "token_multiple": 1, "vocabulary_size": 12}
        return RowDealing(rank=self.dealt_to, num_ranks=self.num_ranks, **options)

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
                return BackendDouble(self.calls, "reference", dealt_to=self.dealt_to, num_ranks=self.num_ranks)
            if method in {"logp", "entropy"}:
                return arguments[0].examples.tokens.float()
            return f"{method} of {self.name}"

        return call


class ActorDouble:
    """A rank in this process, behind what `RayPolicy` uses of an actor."""

    def __init__(self, calls, rank, **rows):
        self.worker = TrainingWorker.__new__(TrainingWorker)
        self.worker._rank, self.worker._models = rank, {POLICY: BackendDouble(calls, f"rank {rank}", **rows)}
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
    return RayPolicy(runtime, [ActorDouble(calls, rank, dealt_to=rank) for rank in range(2)]), calls, puts


def test_all_ranks_get_the_arguments_of_the_backend_and_the_driver_gets_rank_0s_result(ranks):
    policy, calls, _ = ranks
    assert policy.optim_step() == "optim_step of rank 0"
    assert [call for call in calls if call[1] != "metrics"] == [
        ("rank 0", "optim_step", (), {}),
        ("rank 1", "optim_step", (), {}),
    ]


def test_a_step_brings_along_what_is_logged_of_it(ranks):
    policy, calls, _ = ranks
    assert policy.metrics(memory=False) is None
    policy.optim_step()
    assert calls[1] == ("rank 0", "metrics", (), {"memory": False})
    before = len(calls)
    assert policy.metrics(memory=False) == "metrics of rank 0"
    assert len(calls) == before, "the ranks were asked once more"
    policy.metrics()  # with the account of memory as it is now
    assert len(calls) == before + 2


def test_each_rank_is_given_its_rows_alone_and_what_it_reads_of_them_comes_back_in_order(ranks):
    policy, calls, puts = ranks
    assert policy.forward_backward(batch(), "the loss", output="logp") == "forward_backward of rank 0"
    assert len(puts) == 2
    for rank, (_, _, (arrived, loss), options) in enumerate(calls):
        assert torch.equal(arrived.examples.tokens, batch().tokens[arrived.rows])
        assert arrived.lengths.tolist() == [3, 3, 2, 2]
        assert arrived.rows.tolist() == [[0, 2], [1, 3]][rank], "a long row and a short one each"
        assert (loss, options) == ("the loss", {"output": "logp"})
    assert torch.equal(policy.logp(batch()), batch().tokens.float())


def test_ranks_that_share_rows_are_given_one_object_and_the_first_of_them_answers(monkeypatch):
    calls, puts = [], []
    runtime = SimpleNamespace(
        config=SimpleNamespace(call_timeout_s=60, start_timeout_s=60, hang_timeout_s=60),
        put=lambda value: puts.append(value) or value,
    )
    answered = []
    monkeypatch.setattr(
        "rl_launcher.ray.policy.gather",
        lambda pendings, **_: (
            answered.append([each.value.value is not None for each in pendings]) or [each.value for each in pendings]
        ),
    )
    actors = [ActorDouble(calls, rank, dealt_to=rank // 2) for rank in range(4)]  # tp2 x dp2
    assert torch.equal(RayPolicy(runtime, actors).logp(batch()), batch().tokens.float())
    assert len(puts) == 2
    assert [call[2][0].rank for call in calls] == [0, 0, 1, 1]
    assert answered[-1] == [True, False, True, False]


class KeepingLoss:
    """A loss that keeps columns of the rows it was called with, as an observed one; each rank has a copy."""

    def __init__(self):
        self.kept = []


@pytest.mark.parametrize("pipelined", [False, True])
def test_of_ranks_that_share_rows_one_returns_what_an_observed_loss_has_kept(monkeypatch, pipelined):
    """With a pipeline it is the last stage that calls the loss, and not the first rank of those with the same rows."""
    monkeypatch.setattr("rl_launcher.ray.policy.gather", lambda pendings, **_: [each.value for each in pendings])
    runtime = SimpleNamespace(
        config=SimpleNamespace(call_timeout_s=60, start_timeout_s=60, hang_timeout_s=60), put=lambda value: value
    )

    class Rank(ActorDouble):
        def submit(self, method, call, *arguments, **options):
            if call.method == "forward_backward":
                rows, loss = arguments[0], KeepingLoss()
                if not pipelined or self.worker._rank % 2:
                    logp = torch.full((2, 3), float(self.worker._rank), dtype=torch.bfloat16)
                    loss.kept.append((torch.from_numpy(rows.fields["rows"].array), {"logp": logp}))
                arguments = (rows, loss)
            return super().submit(method, call, *arguments, **options)

    actors = [Rank([], rank, dealt_to=rank // 2) for rank in range(4)]  # two ranks each share rows
    for actor in actors:
        actor.worker._is_pipelined = pipelined
    loss = KeepingLoss()
    RayPolicy(runtime, actors).forward_backward(batch(), loss)
    assert [rows.tolist() for rows, _ in loss.kept] == [[0, 2], [1, 3]]
    assert [columns["logp"].dtype for _, columns in loss.kept] == [torch.bfloat16] * 2
    assert [columns["logp"][0, 0].item() for _, columns in loss.kept] == ([1, 3] if pipelined else [0, 2])


def test_results_travel_as_arrays_and_arrive_as_tensors_that_may_be_written_to():
    value = {"loss": torch.tensor(1.5, dtype=torch.bfloat16), "of": (torch.arange(3), "text"), "none": None}
    sent = pickle.loads(pickle.dumps(packed(value)))
    assert not any(isinstance(each, torch.Tensor) for each in (sent["loss"], sent["of"][0]))
    sent["of"][0].array.setflags(write=False)  # as what Ray maps from its object store
    arrived = unpacked(sent)
    assert (arrived["loss"], arrived["loss"].dtype, arrived["of"][1]) == (1.5, torch.bfloat16, "text")
    arrived["of"][0][0] = 7
    assert sent["of"][0].array[0] == 0


def test_a_batch_that_no_rank_could_read_is_refused_before_it_is_sent(ranks):
    policy, calls, puts = ranks
    with pytest.raises(BatchError, match="row 3: token 2 has the id 99"):
        policy.logp(
            dataclasses.replace(
                batch(), tokens=torch.tensor([[0] * 3] * 3 + [[0, 0, 99]]), lengths=torch.tensor([3] * 4)
            )
        )
    assert (calls, puts) == ([], [])


def test_a_folder_is_made_absolute_and_nothing_is_returned(ranks, tmp_path, monkeypatch):
    policy, calls, _ = ranks
    monkeypatch.chdir(tmp_path)
    assert policy.save_checkpoint("here", asynchronous=True) is None
    assert calls[0] == ("rank 0", "save_checkpoint", (str(tmp_path / "here"),), {"asynchronous": True})


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
    assert torch.equal(reference.logp(batch()), batch().tokens.float())
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
