"""The ranks of a trainer over Ray: what they compute, and what is reported when one fails, dies or hangs."""

from importlib.util import find_spec

import pytest

if find_spec("ray") is None:
    pytest.skip("Ray is not installed: nox -s integration-vllm runs these tests", allow_module_level=True)

import dataclasses
import gzip
import os
import re
import signal
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch
from launched_run import gone
from safetensors.torch import load_file
from trainer_examples import (
    ToldExamples,
    examples,
    loss,
    loss_that_fails_on_rank_1,
    loss_that_hangs_on_rank_1,
    loss_that_kills_rank_1,
    recipe,
)

from rl_backends import DTensorBackend, DTensorConfig, ModelError, OptimizerConfig
from rl_backends.checkpoints.folders import probe_file, require_shared
from rl_launcher.quickstart.tiny_model import build
from rl_launcher.ray.cluster import ClusterError, RayRuntime
from rl_launcher.ray.placement import plan_placement
from rl_launcher.ray.policy import start_trainers, who_sees
from rl_launcher.ray.training_worker import TrainerSpec
from rl_launcher.ray.worker_failures import RemoteFailedError, RemoteTimeoutError, TrainerDiedError
from rl_observe.config import ProfilerConfig

OPTIMIZER = OptimizerConfig(lr=0.1, eps=1.0, max_grad_norm=1.0)  # eps so large makes a step nearly the gradient itself
STANDS_STILL = b"I stand still"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainers")
    model, tokenizer = build(0)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@contextmanager
def trainers(folder, *overrides, model="model", ranks=2, **spec):
    """A policy over ranks, and its runtime."""
    asked = recipe(folder, *overrides, ranks=ranks)
    placement = plan_placement(asked)
    runtime = RayRuntime.start(asked.cluster, placement, run_dir=Path(asked.run_dir))
    made = TrainerSpec(policy=asked.policy, model_name=str(folder / model), num_ranks=ranks, seed=0, threads=1, **spec)
    try:
        yield start_trainers(runtime, placement, made), runtime
    finally:
        runtime.close()


@pytest.fixture(scope="module")
def two_ranks(ray_cluster, folder):
    """FSDP2 over two ranks, which survive what the tests below do to them."""
    with trainers(folder) as (policy, runtime):
        yield policy, runtime


def in_one_process(folder):
    torch.set_num_threads(1)
    return DTensorBackend.from_pretrained(str(folder / "model"), DTensorConfig())


def assert_same_steps(policy, folder, *, steps=3):
    """Log-probabilities, sums, norms and weights are those of one process."""
    batch, plain = examples(), in_one_process(folder)
    for each in (policy, plain):
        each.start_training(OPTIMIZER, num_steps=steps, temperature=0.8)
    for _ in range(steps):
        torch.testing.assert_close(policy.logp(batch), plain.logp(batch), rtol=0, atol=1e-5)
        sums, theirs = policy.forward_backward(batch, loss), plain.forward_backward(batch, loss)
        assert sums["rows"] == theirs["rows"] == len(batch.tokens)
        torch.testing.assert_close(sums["loss"], theirs["loss"], rtol=1e-5, atol=0)
        assert policy.optim_step() == pytest.approx(plain.optim_step(), rel=1e-5)
        assert policy.learning_rate == plain.learning_rate
    assert policy.version == plain.version
    out = folder / f"saved-{time.monotonic_ns()}"
    policy.save_pretrained(out / "ranks")
    plain.save_pretrained(out / "plain")
    ours, theirs = (load_file(out / name / "model.safetensors") for name in ("ranks", "plain"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=0, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    plain.close()


def test_two_ranks_take_the_steps_of_one_process(two_ranks, folder):
    policy, _ = two_ranks
    assert_same_steps(policy, folder)


def most_rows_of(runtime, *, before):
    """The most rows that each rank has held at a time since its log was `before` bytes long."""
    logs = [
        Path(actor.who.log).read_bytes()[start:].decode() for actor, start in zip(runtime.actors, before, strict=True)
    ]
    return [max(map(int, re.findall(r"made of (\d+) rows", log)), default=0) for log in logs]


def lengths_of_logs(runtime):
    return [len(Path(actor.who.log).read_bytes()) for actor in runtime.actors]


def test_each_rank_receives_its_own_rows_alone_and_results_have_the_order_of_the_batch(two_ranks, folder):
    policy, runtime = two_ranks
    policy.save_pretrained(folder / "before")  # other tests have trained it
    torch.set_num_threads(1)
    plain = DTensorBackend.from_pretrained(str(folder / "before"), DTensorConfig())
    batch = ToldExamples(**vars(examples(rows=17, width=24)))
    for each in (policy, plain):
        each.start_training(OPTIMIZER, num_steps=1)
    dealt = policy.row_dealing()[0].deal(batch)
    own = [len(each.rows) for each in dealt]
    assert sum(own) <= 18, "one row may be repeated to keep the ranks in step"
    tokens = [int(each.examples.lengths.sum()) for each in dealt]
    assert max(tokens) < 1.2 * min(tokens)
    for name, call in {
        "logp": lambda each: each.logp(batch),
        "entropy": lambda each: each.entropy(batch),
        "topk": lambda each: each.topk_logits(batch, 3).token_ids,
        "forward_backward": lambda each: each.forward_backward(batch, loss)["loss"],
    }.items():
        before = lengths_of_logs(runtime)
        ours = call(policy)
        assert most_rows_of(runtime, before=before) == own, name
        torch.testing.assert_close(
            ours, call(plain), rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
    assert policy.optim_step() == pytest.approx(plain.optim_step(), rel=1e-5)
    plain.close()


def test_tensor_parallel_ranks_take_the_steps_of_one_process(ray_cluster, folder):
    with trainers(folder, "policy.dtensor_cfg.tensor_parallel_size=2") as (policy, runtime):
        assert "tp" in policy.explain()
        assert_same_steps(policy, folder)
        assert [dealing.rank for dealing in policy.row_dealing()] == [0, 0]
        before, batch = lengths_of_logs(runtime), ToldExamples(**vars(examples()))
        policy.logp(batch)
        assert most_rows_of(runtime, before=before) == [len(batch.tokens)] * 2, "each needs all rows"


@pytest.mark.skipif(find_spec("megatron") is None, reason="megatron-core is not installed beside Ray and vLLM")
def test_megatron_ranks_take_the_steps_of_one_process(ray_cluster, folder):
    megatron = "policy.megatron_cfg."
    overrides = [f"{megatron}enabled=true", f"{megatron}pipeline_model_parallel_size=2"]
    with trainers(folder, *overrides) as (policy, _):
        assert_same_steps(policy, folder)


def test_a_reference_stays_as_the_policy_was(two_ranks):
    policy, _ = two_ranks
    batch = examples()
    policy.start_training(OPTIMIZER, num_steps=2)
    before, reference = policy.logp(batch), policy.freeze_reference()
    policy.forward_backward(batch, loss)
    policy.optim_step()
    assert torch.equal(reference.logp(batch), before)
    assert not torch.equal(policy.logp(batch), before)
    assert reference.topk_logits(batch, 3).token_ids.shape == (*batch.tokens.shape, 3)


def test_what_two_ranks_saved_one_goes_on_with(two_ranks, folder, tmp_path):
    policy, _ = two_ranks
    batch, plain = examples(), in_one_process(folder)
    for each in (policy, plain):
        each.start_training(OPTIMIZER, num_steps=4)
    policy.forward_backward(batch, loss)
    policy.optim_step()
    policy.save_checkpoint(tmp_path / "checkpoint")
    plain.load_checkpoint(tmp_path / "checkpoint")
    assert plain.version == policy.version
    for each in (policy, plain):
        each.forward_backward(batch, loss)
    assert policy.optim_step() == pytest.approx(plain.optim_step(), rel=1e-5)
    policy.version = 40
    policy.load_checkpoint(tmp_path / "checkpoint")
    assert policy.version == plain.version - 1
    plain.close()


def test_a_loss_that_fails_on_one_rank_names_it_and_leaves_a_fresh_start(two_ranks):
    policy, runtime = two_ranks
    batch = examples()
    policy.start_training(OPTIMIZER, num_steps=2)
    with pytest.raises(KeyError) as caught:
        policy.forward_backward(batch, loss_that_fails_on_rank_1)
    error = caught.value
    assert isinstance(error, RemoteFailedError)
    assert (error.who.role, error.who.index, error.who.pid) == ("trainer", 1, runtime.actors[1].who.pid)
    assert "trainer rank 1" in str(error)
    assert "no such column" in str(error)
    assert "loss_that_fails_on_rank_1" in str(error), "the line that raised"
    first = policy.forward_backward(batch, loss)
    assert policy.optim_step() > 0
    assert first["rows"] == len(batch.tokens)


def test_what_is_there_is_written_down(two_ranks):
    import json

    _, runtime = two_ranks
    runtime.write_processes()
    entries = json.loads((Path(runtime.actors[0].who.log).parent.parent / "processes.json").read_text())
    assert [(entry["role"], entry["index"]) for entry in entries] == [("driver", 0), ("trainer", 0), ("trainer", 1)]
    assert entries[0]["pid"] == os.getpid()
    assert all(Path(f"/proc/{entry['pid']}").is_dir() for entry in entries)


def test_a_rank_that_does_not_see_the_run_directory_is_named(two_ranks, tmp_path):
    _, runtime = two_ranks
    with probe_file(tmp_path) as (path, token):
        require_shared(tmp_path, who_sees(runtime.actors, path, token))
        one_sees = f"/proc/self/task/{runtime.actors[0].who.pid}/cgroup"  # no such thread in the other process
        seen = who_sees(runtime.actors, one_sees, Path(f"/proc/{runtime.actors[0].who.pid}/cgroup").read_text())
        assert list(seen.values()) == [True, False]
        with pytest.raises(ValueError, match=r"is not the same folder for trainer rank 1 \(") as caught:
            require_shared(tmp_path, seen)
    assert "rank 0" not in str(caught.value)


def test_each_rank_records_its_own_steps(ray_cluster, folder, tmp_path):
    asked = {"profiler": ProfilerConfig(first_step=2, num_steps=1), "profile_folder": str(tmp_path)}
    with trainers(folder, **asked) as (policy, runtime):
        policy.start_training(OPTIMIZER, num_steps=3)
        policy.reached("grpo", 0)
        for step in (1, 2, 3):
            policy.forward_backward(examples(), loss)
            policy.optim_step()
            policy.reached("grpo", step)
        pids = [actor.who.pid for actor in runtime.actors]
    names = [f"grpo-steps-2-to-2-rank-{rank}-{pid}.trace.json.gz" for rank, pid in enumerate(pids)]
    assert sorted(path.name for path in tmp_path.iterdir()) == names
    for name in names:
        assert b"backward" in gzip.decompress((tmp_path / name).read_bytes()).lower()


def test_a_killed_rank_ends_the_call_and_the_others(ray_cluster, folder):
    with trainers(folder) as (policy, runtime):
        policy.start_training(OPTIMIZER, num_steps=2)
        pids = [actor.who.pid for actor in runtime.actors]
        with pytest.raises(
            TrainerDiedError, match=rf"trainer rank 1 \(.*pid {pids[1]}\) died during forward_backward"
        ) as caught:
            policy.forward_backward(examples(), loss_that_kills_rank_1)
        assert caught.value.who.index == 1
        assert "these are my last words" in caught.value.log_tail
        assert gone(pids) == []
        with pytest.raises(TrainerDiedError):
            policy.optim_step()


def test_a_rank_that_stands_still_is_named_and_ended(ray_cluster, folder):
    with trainers(folder) as (policy, runtime):
        policy.start_training(OPTIMIZER, num_steps=2)
        policy.logp(examples())
        runtime.config = dataclasses.replace(runtime.config, call_timeout_s=10.0)  # by then both stand where they will
        pids = [actor.who.pid for actor in runtime.actors]
        with pytest.raises(
            RemoteTimeoutError, match=r"has not answered forward_backward within cluster\.call_timeout_s=10"
        ) as caught:
            policy.forward_backward(examples(), loss_that_hangs_on_rank_1)
        first, second = str(caught.value).split("Where they hang")[1].split("  trainer rank ")[1:]
        assert first.startswith("0 (")
        assert "collective" in first or "distributed" in first, "it waits for the other in a collective"
        assert second.startswith("1 (")
        assert second.splitlines()[1].endswith("in loss_that_hangs_on_rank_1")
        assert gone(pids) == []


@pytest.fixture
def heard():
    """SIGINT, which a process that a shell has begun in the background ignores, and so do all that it begins."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupted_call_beside_a_rank_that_stands_still_holds_nobody_up(ray_cluster, folder, heard):
    with trainers(folder) as (policy, runtime):
        policy.start_training(OPTIMIZER, num_steps=2)
        policy.forward_backward(examples(), loss)
        policy.optim_step()
        runtime.config = dataclasses.replace(runtime.config, call_timeout_s=300.0)
        log, pids = Path(runtime.actors[1].who.log), [actor.who.pid for actor in runtime.actors]
        said_before = log.read_bytes().count(STANDS_STILL)
        ended = threading.Event()

        def interrupt():
            while log.read_bytes().count(STANDS_STILL) == said_before and not ended.wait(0.02):
                pass
            while not ended.is_set():  # a signal that falls into a finalizer is lost
                os.kill(os.getpid(), signal.SIGINT)
                ended.wait(10.0)

        def call_and_interrupt():
            interrupting = threading.Thread(target=interrupt, daemon=True)
            interrupting.start()
            try:
                policy.forward_backward(examples(), loss_that_hangs_on_rank_1)
            finally:
                ended.set()
                interrupting.join()  # or its last signal might come when nobody expects it any more

        with pytest.raises(KeyboardInterrupt):
            call_and_interrupt()
        began = time.monotonic()
        assert policy.version == 1, "as far as anybody knows: who stands still is not asked"
        policy.close()
        assert time.monotonic() - began < 120
        assert gone(pids) == []


def test_a_model_that_ranks_cannot_load_is_refused_as_in_one_process(ray_cluster, folder):
    with pytest.raises(ModelError, match="trainer rank"), trainers(folder, model="nothing"):
        pass


def test_a_start_for_which_there_is_no_room_is_refused_in_time(ray_cluster, folder):
    overrides = ["cluster.cpus_per_rank=16", "cluster.start_timeout_s=3"]
    refused = pytest.raises(ClusterError, match=r"32 CPUs each .*start_timeout_s=3 .* 8 CPUs\), is 24 CPUs short")
    with refused, trainers(folder, *overrides):
        pass
