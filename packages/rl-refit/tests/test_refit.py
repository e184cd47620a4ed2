from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from rl_refit import (
    CoverageError,
    DigestError,
    ModuleSink,
    ModuleSource,
    PoisonedError,
    Refit,
    RefitError,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8, torch.bool]


class Model(nn.Module):
    """Every kind of tensor: tied, buffers, scalars, empty, non-contiguous, several dtypes, larger than a bucket."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def random(*shape):
            return torch.randn(shape, generator=generator)

        self.embed = nn.Embedding(64, 24, _weight=random(64, 24))  # 6,144 bytes: six buckets of 1 KiB
        self.head = nn.Linear(24, 64, bias=False)
        self.head.weight = self.embed.weight
        self.turned = nn.Parameter(random(7, 5).t())
        self.long_row = nn.Parameter(random(2, 1, 600))  # one row is more than a bucket of 1 KiB
        self.empty = nn.Parameter(torch.empty(3, 0))
        for dtype in DTYPES:
            name = str(dtype).replace("torch.", "as_")
            self.register_buffer(name, (100 * random(9, 3)).to(dtype), persistent=dtype is torch.int8)
        self.register_buffer("count", torch.randint(99, (), generator=generator))


def snapshot(model):
    """The bytes of every tensor."""
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().contiguous().view(-1).view(torch.uint8).clone() for name, tensor in tensors}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("mode", ["staged", "swap"])
def test_every_byte_of_every_tensor_arrives(mode):
    policy, engine = Model(0), Model(1)
    report = Refit(ModuleSource(policy), ModuleSink(engine, mode=mode))(version=0)
    assert same(snapshot(policy), snapshot(engine))
    assert engine.head.weight is engine.embed.weight
    assert report.bytes == sum(raw.numel() for raw in snapshot(policy).values())
    assert report.tensors == len(snapshot(policy))


def test_there_and_back_again():
    first, second, engine = Model(0), Model(1), Model(2)
    sink = ModuleSink(engine)
    digests = [Refit(ModuleSource(model), sink)(version=v).digest for v, model in enumerate([first, second, first])]
    assert same(snapshot(first), snapshot(engine))
    assert digests[0] == digests[2] != digests[1]


def test_an_optimizer_step_arrives_with_its_version():
    policy, engine, heard = nn.Linear(3, 2), nn.Linear(3, 2), []
    refit = Refit(ModuleSource(policy), ModuleSink(engine, on_commit=heard.append))
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.5)
    for version in (1, 2, 5):
        policy(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert refit(version=version).version == version
        assert same(snapshot(policy), snapshot(engine))
    assert heard == [1, 2, 5]


def test_the_report_says_what_was_done():
    policy, engine = Model(0), Model(1)
    sink = ModuleSink(engine)
    report = Refit(ModuleSource(policy), sink)(version=7)
    assert report.buckets == 1
    assert report.extra_bytes == 0
    assert report.transport == "in process"
    assert report.verified == "every byte"
    assert report.unreadable == ()
    assert report.manifest_hash == ModuleSource(policy).manifest().hash()
    assert list(report.seconds) == ["prepare", "transfer", "verify", "commit"]
    assert report.total_seconds == sum(report.seconds.values())
    assert report.explain().startswith(f"version 7: 11 tensors, {report.bytes:,} bytes in process, ")
    assert report.explain().endswith(f"verified every byte, digest {report.digest[:12]}")


def test_without_verify_the_report_says_so():
    policy, engine = Model(0), Model(1)
    report = Refit(ModuleSource(policy), ModuleSink(engine), verify="off")(version=1)
    assert report.digest is None
    assert report.explain().endswith("verified nothing (100 % not compared)")
    assert same(snapshot(policy), snapshot(engine))


def test_the_plan_can_be_read_before_anything_moves():
    engine = Model(1)
    before, sink = snapshot(engine), ModuleSink(engine)
    refit = Refit(ModuleSource(Model(0)), sink)
    assert refit.explain() == refit.plan.explain()
    assert "11 tensors fed, 1 tied" in refit.explain()
    assert same(snapshot(engine), before)
    refit(version=1)


def test_a_missing_tensor_is_named_before_anything_moves():
    engine = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    before = snapshot(engine)
    with pytest.raises(CoverageError) as caught:
        Refit(ModuleSource(nn.Sequential(nn.Linear(3, 2))), ModuleSink(engine))(version=1)
    assert caught.value.unfed == ("1.weight", "1.bias")
    (note,) = caught.value.__notes__
    assert note.startswith(
        "refit to version 1 aborted in phase prepare: the old weights and the old version are intact"
    )
    assert same(snapshot(engine), before)


@pytest.mark.parametrize("version", [-1, 1.0, True, "3", None])
def test_a_version_is_a_number_of_optimizer_steps(version):
    with pytest.raises(RefitError, match=r"an int ≥ 0; got version="):
        Refit(ModuleSource(Model(0)), ModuleSink(Model(1)))(version=version)


def test_a_version_must_be_newer_than_the_sinks_whoever_committed_that():
    sink = ModuleSink(Model(1))
    Refit(ModuleSource(Model(0)), sink)(version=57)
    another = Refit(ModuleSource(Model(2)), sink)
    for version in (56, 57):
        with pytest.raises(RefitError, match=f"version {version} is not newer than the sink's 57") as caught:
            another(version=version)
        assert caught.value.phase == "prepare"
    assert another(version=58).version == 58


def test_a_manifest_that_changed_since_the_plan_is_refused():
    policy, engine = nn.Linear(3, 2), nn.Linear(3, 2)
    refit = Refit(ModuleSource(policy), ModuleSink(engine))
    refit(version=1)
    policy.bias = None
    with pytest.raises(RefitError, match=r"manifest of the source is not the one that was planned.*changed: bias"):
        refit(version=2)
    policy.bias = nn.Parameter(torch.zeros(2))
    engine.double()
    with pytest.raises(RefitError, match=r"manifest of the sink .* changed: bias, weight"):
        refit(version=2)


def test_sides_that_read_the_manifest_differently_are_refused():
    class Deaf(Delegate):
        def prepare(self, manifest):
            return self.sink.prepare(type(manifest)(manifest.tensors[1:]))

    with pytest.raises(RefitError, match="the sides disagree on the manifest"):
        Refit(ModuleSource(Model(0)), Deaf(Model(1)))(version=1)


class Delegate:
    """A `ModuleSink` whose methods a test may bend."""

    def __init__(self, model):
        self.sink = ModuleSink(model)

    def prepare(self, manifest):
        return self.sink.prepare(manifest)

    def stage(self, region, tensor, *, stays=False):
        self.sink.stage(region, tensor, stays=stays)

    def digest(self, regions=None):
        return self.sink.digest(regions)

    def ready(self, version):
        self.sink.ready(version)

    def commit(self, version):
        self.sink.commit(version)

    def abort(self):
        self.sink.abort()

    def poison(self, reason):
        self.sink.poison(reason)

    def repeat(self):
        self.sink.repeat()

    def rewind(self, version):
        self.sink.rewind(version)

    def check(self):
        self.sink.check()

    @property
    def device(self):
        return self.sink.device


def bend_row(tensor):
    """Exchange the first and the last element."""
    flat = tensor.view(-1)
    flat[[0, -1]] = flat[[-1, 0]]


CORRUPTIONS = {
    "a flipped bit": lambda tensor: tensor.view(-1).view(torch.uint8)[-1].bitwise_xor_(64),
    "a zeroed piece": lambda tensor: tensor.zero_(),
    "exchanged elements": bend_row,
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("name", ["embed.weight", "turned", "as_bfloat16"])
def test_a_corrupted_tensor_is_named_and_the_old_weights_stay(corruption, name):
    class Corrupting(Delegate):
        def stage(self, region, tensor, *, stays=False):
            if region.name == name:
                tensor, stays = tensor.clone(memory_format=torch.contiguous_format), False
                CORRUPTIONS[corruption](tensor)
            super().stage(region, tensor, stays=stays)

    engine = Model(1)
    before, sink = snapshot(engine), Corrupting(engine)
    with pytest.raises(DigestError, match=f"1 tensors are not staged as source 0 sent them:\n  {name}: ") as caught:
        Refit(ModuleSource(Model(0)), sink)(version=1)
    assert caught.value.tensors == (name,)
    assert caught.value.phase == "verify"
    assert same(snapshot(engine), before)
    assert sink.sink.version is None


class Fault:
    """Counts every call on both sides of a refit, and raises `error` at call number `at`."""

    def __init__(self, error=None, at=math.inf):
        self.error, self.at, self.calls = error, at, 0

    def tick(self):
        self.calls += 1
        if self.calls == self.at:
            raise self.error


class FaultySource:
    device = torch.device("cpu")

    def __init__(self, model, fault):
        self.source, self.fault = ModuleSource(model), fault

    def manifest(self):
        self.fault.tick()
        return self.source.manifest()

    def shards(self, names):
        for shard in self.source.shards(names):
            self.fault.tick()
            yield shard


class FaultySink(Delegate):
    """Ticks before and after each of the sink's methods, and in the commit, after the copy, as an engine might."""

    def __init__(self, model, fault):
        self.sink, self.fault = ModuleSink(model, on_commit=lambda _: fault.tick()), fault

    def prepare(self, manifest):
        self.fault.tick()
        coverage = super().prepare(manifest)
        self.fault.tick()
        return coverage

    def stage(self, region, tensor, *, stays=False):
        self.fault.tick()
        super().stage(region, tensor, stays=stays)
        self.fault.tick()

    def digest(self, regions=None):
        self.fault.tick()
        return super().digest(regions)

    def commit(self, version):
        self.fault.tick()
        super().commit(version)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt, RefitError, MemoryError])
def test_wherever_it_fails_the_old_weights_are_whole_or_the_sink_is_poisoned(error):
    policy, counting = Model(0), Fault()
    new = snapshot(policy)
    Refit(FaultySource(policy, counting), FaultySink(Model(1), counting))(version=1)
    poisoned = 0
    for at in range(1, counting.calls + 1):
        engine, fault = Model(1), Fault(error("injected"), at)
        old, sink = snapshot(engine), FaultySink(engine, fault)
        refit = Refit(FaultySource(policy, fault), sink)
        with pytest.raises(error, match="injected") as caught:
            refit(version=1)
        assert caught.value is fault.error
        assert "refit to version 1 aborted in phase" in caught.value.__notes__[-1]
        assert sink.sink.version is None
        if sink.sink.poisoned:
            poisoned += 1
            with pytest.raises(PoisonedError):
                sink.sink.check()
        else:
            assert same(snapshot(engine), old)
        refit(version=1)  # the same objects work again, and heal
        sink.sink.check()
        assert same(snapshot(engine), new)
    assert poisoned == 2  # the engine's own part of the commit, and the look at what it then has


def test_an_error_says_phase_and_tensor():
    class Refusing(Delegate):
        def stage(self, region, tensor, *, stays=False):
            if region.name == "turned":
                raise RefitError("no place")
            super().stage(region, tensor, stays=stays)

    with pytest.raises(RefitError, match="no place") as caught:
        Refit(ModuleSource(Model(0)), Refusing(Model(1)))(version=1)
    assert (caught.value.phase, caught.value.tensor) == ("transfer", "turned")
    (note,) = caught.value.__notes__
    assert note.startswith("refit to version 1 aborted in phase transfer, bucket 0, tensor 'turned': the old weights")


class Shards:
    """A source whose shards a test may change."""

    device = torch.device("cpu")

    def __init__(self, model, change):
        self.source, self.change = ModuleSource(model), change

    def manifest(self):
        return self.source.manifest()

    def shards(self, names):
        return iter(self.change(list(self.source.shards(names))))


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda shards: shards[:-1], "the source does not yield Region.name='bias'.*, which its manifest promises"),
        (lambda shards: shards[::-1], "the source does not yield Region.name='bias'"),
        (
            lambda shards: [(region, tensor.half()) for region, tensor in shards],
            "in torch.float16, where .* torch.float32",
        ),
        (lambda shards: [(region, tensor[:1]) for region, tensor in shards], r"as \[1, 3\]"),
    ],
)
def test_a_source_that_breaks_its_promise_is_refused(change, complaint):
    engine = nn.Linear(3, 2)
    before = snapshot(engine)
    with pytest.raises(RefitError, match=complaint):
        Refit(Shards(nn.Linear(3, 2), change), ModuleSink(engine))(version=1)
    assert same(snapshot(engine), before)
