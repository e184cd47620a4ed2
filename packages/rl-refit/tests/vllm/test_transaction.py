"""Real vLLM in one process: a refit that fails changes nothing, or poisons; what depends on weights goes with them."""

import gc
import os
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path

import pytest

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: nox runs these tests in the cell that has it", allow_module_level=True)

import faulty_worker
import psutil
import tiny
import torch

from rl_refit.errors import CoverageError, PoisonedError, RefitError
from rl_refit.refit import Refit
from rl_refit.rendezvous import Rendezvous
from rl_refit.source import StateDictSource
from rl_refit.transports.stream import SlotStream
from rl_refit.vllm import WORKER_EXTENSION, VllmSink, reload

OLD, NEW = 0, 1


@pytest.fixture(scope="module")
def llm(checkpoints, served):
    served("qwen3", OLD), served("qwen3", NEW)  # one engine at a time: the groups of processes are one process's
    with tiny.engine(checkpoints("qwen3", OLD), block_size=32, worker_extension_cls=WORKER_EXTENSION) as llm:
        yield llm


@pytest.fixture
def sink(llm):
    """A sink that has committed version 0: the old weights."""
    sink = VllmSink(llm)
    Refit(source(OLD), sink)(version=0)
    yield sink
    sink.close()


def source(seed):
    return tiny.source(tiny.policy("qwen3", seed))


class BreakingOff:
    """A source that fails after some of its tensors."""

    device = torch.device("cpu")

    def __init__(self, seed, after):
        self.source, self.after = source(seed), after

    def manifest(self):
        return self.source.manifest()

    def shards(self, names):
        for number, shard in enumerate(self.source.shards(names)):
            if number == self.after:
                raise OSError("the trainer's disk is full")
            yield shard


def worker_sink(llm):
    """The worker's own sink, which lives in this process."""
    return llm.collective_rpc(lambda worker: worker._rl_refit_sink)[0]


def test_a_bit_that_flips_between_verify_and_commit_is_found_and_poisons(llm, sink, served):
    refit, staged = Refit(source(NEW), sink), worker_sink(llm)
    ready = staged.ready

    def flip(version):
        del staged.ready
        ready(version)
        staged._bank["model.norm.weight"][0][1].view(torch.int32)[5] ^= 1

    staged.ready = flip
    told = r"sink 0: DigestError: 1 tensors are not in the engine after the commit.*\n  model\.norm\.weight"
    with pytest.raises(RefitError, match=told):
        refit(version=1)
    with pytest.raises(PoisonedError, match="could not be confirmed after the commit"):
        sink.check()
    refit(version=2)
    sink.check()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW), tolerance=0)


@pytest.mark.parametrize("after", [0, 9])
def test_a_refit_that_is_given_up_changes_nothing(llm, sink, served, after):
    with pytest.raises(OSError, match="disk is full"):
        Refit(BreakingOff(NEW, after), sink)(version=1)
    sink.check()
    assert sink.version == 0
    assert tiny.same(tiny.generate(llm), served("qwen3", OLD), tolerance=0)


def test_the_worker_receives_what_its_parameters_hold_and_hashes_it_before_the_pause(llm, sink, monkeypatch):
    from rl_refit import staged
    from rl_refit.vllm import worker

    hashed, digest_held = [], staged.digest_held
    engine, paused = sink._engine, []
    pause, resume = engine.pause, engine.resume
    monkeypatch.setattr(engine, "pause", lambda: (paused.append(True), pause()))
    monkeypatch.setattr(engine, "resume", lambda: (paused.clear(), resume()))
    for module in (staged, worker):  # before the commit, and after it
        monkeypatch.setattr(
            module, "digest_held", lambda *arguments: (hashed.append(bool(paused)), digest_held(*arguments))[1]
        )
    refit = Refit(source(NEW), sink, verify="full")
    refit(version=1)
    assert worker_sink(llm).received == refit.plan.lower_bound(0) == refit.plan.bytes_received(0)
    assert hashed
    assert not any(hashed)
    hashed.clear()
    assert Refit(source(OLD), sink, verify="off")(version=2).uncompared == 1.0
    assert not hashed


@pytest.mark.parametrize("after", [0, 1, 13])
def test_a_fault_in_the_middle_of_a_reload_poisons_until_a_refit_succeeds(llm, sink, served, after):
    [model] = llm.apply_model(lambda model: model)
    faulty_worker.break_loader(model, after)
    with pytest.raises(RefitError, match=f"OSError: a fault after {after} tensors"):
        Refit(source(NEW), sink)(version=1)
    assert sink.poisoned
    with pytest.raises(PoisonedError, match="the commit failed with RefitError: worker 0: OSError"):
        sink.check()
    assert not any(tensor.is_meta for tensor in model.parameters())
    Refit(source(NEW), sink)(version=1)
    sink.check()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_a_commit_forgets_what_was_cached_under_the_old_weights(llm, sink, served):
    cached = [(tiny.generate(llm), cached_tokens(llm))[1] for _ in range(2)][-1]
    assert cached >= 128
    Refit(source(NEW), sink)(version=1)
    assert cached_tokens(llm) == 0
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_without_resetting_the_prefix_cache_the_engine_would_be_wrong(llm, sink, served, monkeypatch):
    tiny.generate(llm)
    monkeypatch.setattr(sink._engine, "renew", lambda version: None)
    Refit(source(NEW), sink)(version=1)
    assert not tiny.same(tiny.generate(llm), served("qwen3", NEW), tolerance=0.1)
    assert llm.reset_prefix_cache()
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def cached_tokens(llm):
    from vllm import TokensPrompt

    prompt = TokensPrompt(prompt_token_ids=tiny.PROMPTS[0])
    (request,) = llm.generate([prompt], tiny.sampling(max_tokens=1), use_tqdm=False)
    return request.num_cached_tokens


def test_a_commit_is_refused_while_requests_are_unfinished(llm, sink, served):
    from vllm import TokensPrompt

    engine = llm.llm_engine
    engine.add_request("under way", TokensPrompt(prompt_token_ids=tiny.PROMPTS[0]), tiny.sampling())
    engine.step()
    refit = Refit(source(NEW), sink)
    with pytest.raises(RefitError, match="1 requests are unfinished"):
        refit(version=1)
    sink.check()
    while engine.has_unfinished_requests():
        (finished,) = engine.step()
    assert tiny.same([tiny.read(finished)], served("qwen3", OLD)[:1])
    refit(version=1)
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_a_commit_can_wait_for_another_thread_to_finish_its_requests(llm, served, monkeypatch):
    from vllm import TokensPrompt

    engine, sink = llm.llm_engine, VllmSink(llm, pause="wait")
    Refit(source(OLD), sink)(version=0)
    engine.add_request("under way", TokensPrompt(prompt_token_ids=tiny.PROMPTS[0]), tiny.sampling())
    monkeypatch.setattr(sink._engine, "_timeout_s", 2)
    with pytest.raises(RefitError, match=r"requests are still unfinished after timeout_s=2"):
        Refit(source(NEW), sink)(version=1)
    monkeypatch.undo()
    finished = []

    def generate():
        while engine.has_unfinished_requests():
            finished.extend(engine.step())

    thread = threading.Timer(0.2, generate)
    thread.start()
    Refit(source(NEW), sink)(version=1)
    thread.join()
    assert tiny.same([tiny.read(finished[-1])], served("qwen3", OLD)[:1])
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_thirty_refits_leave_no_memory_no_file_and_no_descriptor_behind(llm, sink):
    process = psutil.Process()
    refits = [Refit(source(seed), sink) for seed in (OLD, NEW)]
    for version in range(1, 11):
        refits[version % 2](version=version)
    gc.collect()  # what earlier engines left open closes now
    memory, files = process.memory_info().rss, (process.num_fds(), tiny.shared_files(process.pid))
    for version in range(11, 41):
        refits[version % 2](version=version)
    assert (process.num_fds(), tiny.shared_files(process.pid)) == files
    assert process.memory_info().rss - memory < 4 << 20


def test_a_version_that_is_no_newer_is_refused(llm, sink, served):
    with pytest.raises(RefitError, match="version 0 is not newer than the sink's 0"):
        Refit(source(NEW), sink)(version=0)
    assert tiny.same(tiny.generate(llm), served("qwen3", OLD), tolerance=0)


def test_a_trainer_in_another_process_refits_the_engine(llm, served, tmp_path):
    sink, program = VllmSink(llm), Path(__file__).parent / "programs" / "trainer.py"
    command = [sys.executable, str(program), "qwen3", str(tmp_path / "store"), str(NEW), str(OLD)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=inherited()) as trainer:
        for version, seed in enumerate((NEW, OLD)):
            meeting = Rendezvous(f"file://{tmp_path}/store-{version}", num_sources=1, num_sinks=1, sink_rank=0)
            refit = Refit(sink=sink, transport=SlotStream(), rendezvous=meeting)
            report = refit.receive(timeout_s=120)
            refit.close()
            assert trainer.stdout.readline().strip() == report.digest
            assert tiny.same(tiny.generate(llm), served("qwen3", seed))


def inherited():
    """The environment, without what vLLM has put into it for processes of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    return {**kept, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def test_a_newer_sink_takes_the_engine_from_an_older_one(llm, sink, served):
    older = Refit(source(NEW), sink)
    older(version=1)
    Refit(source(OLD), VllmSink(llm))(version=5)
    with pytest.raises(RefitError, match="another sink has taken this engine"):
        older(version=2)
    assert not sink.poisoned
    assert tiny.same(tiny.generate(llm), served("qwen3", OLD), tolerance=0)


# -- Coverage, before the first byte -----------------------------------------------------------------------------


def changed(**changes):
    """The new weights as a state dict, with some exchanged; None takes one out."""
    weights = dict(tiny.policy("qwen3", NEW).state_dict())
    del weights["lm_head.weight"]
    weights |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    return StateDictSource({name: tensor for name, tensor in weights.items() if tensor is not None})


def refusal(llm, served, weights, **options):
    """What an engine of the old weights says to `weights`; it says nothing else afterwards."""
    sink = VllmSink(llm, **options)
    with pytest.raises(CoverageError) as caught:
        Refit(weights, sink)(version=100)
    sink.check()
    return caught.value


def test_an_engine_tensor_that_the_source_does_not_feed_is_named(llm, sink, served):
    error = refusal(llm, served, changed(model__layers__0__self_attn__k_proj__weight=None, model__norm__weight=None))
    assert set(error.unfed) == {
        "model.layers.0.self_attn.qkv_proj.weight: 4,096 of 12,288 elements are never written",
        "model.norm.weight: never written",
    }
    assert tiny.same(tiny.generate(llm), served("qwen3", OLD), tolerance=0)


def test_an_engine_tensor_may_be_declared_constant(llm, sink, served):
    sink = VllmSink(llm, constant=["model.norm.*"])
    Refit(changed(model__norm__weight=None), sink)(version=100)
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))  # both policies have norms of one


def test_a_source_tensor_without_a_place_is_named(llm, sink, served):
    error = refusal(llm, served, changed(value_head__weight=torch.ones(1, 64)))
    assert error.unmapped == ("value_head.weight",)
    assert "the load_weights of vLLM's Qwen3ForCausalLM refuses 'value_head.weight'" in str(error)


def test_an_untied_head_finds_no_place_in_an_engine_that_ties_it(llm, sink, served):
    error = refusal(llm, served, changed(lm_head__weight=torch.ones(260, 64)))
    assert error.unmapped + error.mismatched != ()
    assert "lm_head.weight" in str(error)


def test_nothing_is_cast_unless_asked_for(llm, sink, served):
    name = "model.layers.0.mlp.up_proj.weight"
    weights = changed(**{name.replace(".", "__"): tiny.policy("qwen3", NEW).state_dict()[name].double()})
    error = refusal(llm, served, weights)
    assert error.mismatched == (f"{name}: float64 in the source, float32 in the engine; cast=True allows it",)
    sink = VllmSink(llm, cast=True)
    Refit(weights, sink)(version=100)
    assert tiny.same(tiny.generate(llm), served("qwen3", NEW))


def test_a_release_of_which_nothing_is_known_is_refused_on_a_cpu(llm, sink, monkeypatch):
    monkeypatch.setattr(reload, "SEEN_IN", ("0.1", "0.2"))
    with pytest.raises(RefitError, match=r"reload of vLLM 0\.1 and 0\.2 leaves .* whether that of 0\.3.* is not known"):
        Refit(source(NEW), VllmSink(llm))(version=1)


def test_an_engine_without_the_worker_is_refused_with_what_to_do(checkpoints):
    with (
        tiny.engine(checkpoints("llama", OLD)) as other,
        pytest.raises(RefitError, match=r"make it with worker_extension_cls='rl_refit\.vllm\.worker\.RefitWorker'"),
    ):
        VllmSink(other)
