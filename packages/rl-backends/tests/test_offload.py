"""Claims about offloading: the memory is really gone, comes back bit for bit, and nothing runs without it meanwhile."""

import copy
import importlib.util
import resource
from pathlib import Path

import jaxtyping
import pytest
import torch
from torch import nn

from rl_backends.metrics.memory import memory_by_category
from rl_backends.offload import PARTS, DiskStore, HostStore, Offloader

PROGRAM = Path(__file__).parent / "programs" / "offload.py"


def trained(world, **overrides):
    """A model with tied weights, an optimizer with a state, and a gradient."""
    model = world.make_model("Qwen2", tie_word_embeddings=True, **overrides)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    run(model).backward()
    optimizer.step()
    return model, optimizer


def run(model):
    return model(input_ids=torch.arange(6)[None]).logits.logsumexp(-1).sum()


def contents(model, optimizer):
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    tensors |= {f"{name}.grad": p.grad for name, p in model.named_parameters() if p.grad is not None}
    for number, state in enumerate(optimizer.state.values()):
        tensors |= {f"{number}.{name}": value for name, value in state.items()}
    return copy.deepcopy(tensors)


def files(folder):
    return sorted(Path(folder).rglob("bytes"))


def test_everything_comes_back_bit_for_bit_in_the_same_objects(world, tmp_path):
    model, optimizer = trained(world)
    before, objects = contents(model, optimizer), list(model.parameters())
    views = [parameter.detach()[:2] for parameter in objects]
    offloader = Offloader(model, directory=tmp_path)
    held = memory_by_category(model, [optimizer])
    left = offloader.offload([optimizer])
    assert offloader.away == PARTS
    total = held.total() - held.category("buffers")
    assert sum(left.bytes_moved.values()) == total
    assert memory_by_category(model, [optimizer]).total() == held.category("buffers")
    assert all(storage_bytes(parameter) == 0 for parameter in objects)
    assert files(tmp_path)
    assert next(tmp_path.iterdir()).stat().st_mode & 0o077 == 0  # nobody else's to read
    back = offloader.onload()
    assert offloader.away == ()
    assert not list(tmp_path.iterdir())
    assert sum(back.bytes_moved.values()) == total
    torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)
    assert all(new is old for new, old in zip(model.parameters(), objects, strict=True))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(torch.equal(view, parameter[:2]) for view, parameter in zip(views, objects, strict=True))


def storage_bytes(tensor):
    return tensor.untyped_storage().nbytes()


def test_training_goes_on_as_if_nothing_had_happened(world, tmp_path):
    finals = []
    for offloads in (False, True):
        model, optimizer = trained(world)
        if offloads:
            offloader = Offloader(model, directory=tmp_path)
            for parts in (PARTS, ("optimizer",), ("weights", "gradients")):
                offloader.offload([optimizer], parts=parts)
                offloader.onload()
        run(model).backward()
        optimizer.step()
        finals.append(contents(model, optimizer))
    torch.testing.assert_close(*finals, rtol=0, atol=0)


def test_parts_move_apart_from_one_another(world, tmp_path):
    model, optimizer = trained(world)
    before = contents(model, optimizer)
    offloader = Offloader(model, directory=tmp_path)
    held = memory_by_category(model, [optimizer])
    offloader.offload([optimizer], parts=("optimizer",))
    left = memory_by_category(model, [optimizer])
    assert left.category("optimizer state") == 0
    assert left.category("parameters") == held.category("parameters") > 0
    run(model)  # the weights are here
    offloader.offload([optimizer], parts=("weights",))
    report = offloader.offload([optimizer], parts=("gradients", "weights"))
    assert report.notes == ("weights was away already",)
    assert list(report.bytes_moved) == ["gradients"]
    assert report.bytes_moved["gradients"] > 0
    assert memory_by_category(model, [optimizer]).total() == held.category("buffers")
    offloader.onload(("weights",))
    run(model)
    with pytest.raises(RuntimeError, match=r"step of AdamW needs gradients and optimizer state, offloaded to the disk"):
        optimizer.step()
    assert offloader.onload().notes == ("weights was here already",)
    torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)
    optimizer.step()


def test_what_needs_a_part_that_is_away_is_told_to_call_onload(world, tmp_path):
    model, optimizer = trained(world)
    offloader = Offloader(model, directory=tmp_path)
    offloader.require("forward_backward")
    offloader.offload([optimizer])
    everything = "weights and gradients and optimizer state"
    with pytest.raises(RuntimeError, match=rf"forward_backward needs {everything}, .*; call onload\(\) first"):
        offloader.require("forward_backward")
    with pytest.raises(RuntimeError, match=r"the forward of Qwen2ForCausalLM needs weights, .*; call onload\(\) first"):
        run(model)
    with pytest.raises(RuntimeError, match=r"the forward of Qwen2RMSNorm needs weights"):
        model.model.norm(torch.ones(1, 32))
    with pytest.raises(RuntimeError, match=r"state_dict of Qwen2ForCausalLM needs weights"):
        model.state_dict()
    with pytest.raises(RuntimeError, match=r"step of AdamW needs"):
        optimizer.step()
    with pytest.raises(RuntimeError, match=r"close\(\) needs"):
        offloader.close()
    # Whoever walks over the module, such as a refit, finds names and shapes without values.
    assert all(p.is_meta for p in model.parameters())
    assert len(list(model.parameters())) == len(list(trained(world)[0].parameters()))
    offloader.onload()
    run(model)
    model.state_dict()
    optimizer.step()


def test_on_a_cpu_nothing_moves_to_the_host_and_the_rules_are_the_same(world):
    model, optimizer = trained(world)
    before, addresses = contents(model, optimizer), [p.data_ptr() for p in model.parameters()]
    offloader = Offloader(model)
    report = offloader.offload([optimizer])
    assert report.bytes_moved == dict.fromkeys(PARTS, 0)
    assert report.host_bytes == 0
    assert report.notes == ("device is cpu: everything is in host memory already, and nothing was moved or freed",)
    with pytest.raises(RuntimeError, match=r"offloaded to the host; call onload\(\) first"):
        run(model)
    offloader.onload()
    torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)
    assert [p.data_ptr() for p in model.parameters()] == addresses


def test_what_is_on_a_gpu_is_freed_after_its_copies_have_ended_and_used_after_it_is_back(world):
    """On memory that says it is a GPU's: pinned memory and streams are a GPU's own, and have a test of theirs below."""
    spec = importlib.util.spec_from_file_location("offload_program", PROGRAM)
    program = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(program)
    model, optimizer = trained(world)
    before = contents(model, optimizer)
    offloader, kept = Offloader(model), set()
    with program.fake_gpu() as events:
        for _ in range(2):
            events.clear()
            left = offloader.offload([optimizer])
            total = sum(left.bytes_moved.values())
            assert total >= 4 * sum(parameter.nbytes for parameter in model.parameters())
            assert left.notes == ()
            assert events == [("wait", total), *[("copy", total)] * 3, ("wait", total), ("give back", 0)]
            kept.add(left.host_bytes)
            with pytest.raises(RuntimeError, match=r"needs weights, .*offloaded to the host; call onload\(\) first"):
                run(model)
            offloader.onload(("weights",))
            run(model)
            with pytest.raises(RuntimeError, match=r"step of AdamW needs gradients and optimizer state"):
                optimizer.step()
            offloader.onload()
            assert events[-1] == ("wait", total)
            torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)
    assert len(kept) == 1  # the same host memory, used again
    offloader.close()
    assert offloader.offload(parts=()).host_bytes == 0


def test_a_full_disk_changes_nothing(world, tmp_path):
    model, optimizer = trained(world)
    before = contents(model, optimizer)
    offloader = Offloader(model, directory=tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"bytes could not be written"):
            offloader.offload([optimizer])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert offloader.away == ()
    assert not list(tmp_path.iterdir())
    torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)
    run(model)
    optimizer.step()
    offloader.offload([optimizer])
    offloader.onload()


def test_a_damaged_copy_is_refused_and_everything_stays_away(world, tmp_path):
    model, optimizer = trained(world)
    before = contents(model, optimizer)
    offloader = Offloader(model, directory=tmp_path)
    offloader.offload([optimizer])
    path = files(tmp_path)[-1]
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    with pytest.raises(RuntimeError, match=r"is not what was written to it") as refused:
        offloader.onload()
    assert "still offloaded to the disk; make room and call onload() again" in refused.value.__notes__[0]
    assert offloader.away == PARTS
    assert memory_by_category(model, [optimizer]).category("parameters") == 0
    with pytest.raises(RuntimeError, match=r"needs weights"):
        run(model)
    path.write_bytes(whole)
    offloader.onload()
    torch.testing.assert_close(contents(model, optimizer), before, rtol=0, atol=0)


def resident():
    return memory_by_category(nn.Module()).resident


def test_resident_memory_really_drops_and_comes_back(world, tmp_path):
    model = nn.Linear(4096, 6144, bias=False)  # 96 MiB
    before = model.weight.detach().clone()
    offloader = Offloader(model, directory=tmp_path)
    size = model.weight.nbytes
    files = [world.mapped_file_bytes()]
    used = [resident()]
    left = offloader.offload(parts=("weights",))
    used.append(resident())
    files.append(world.mapped_file_bytes())
    assert left.bytes_moved == {"weights": size}
    assert 0.9 * size < (used[0] - used[1]) - (files[0] - files[1]) < 1.1 * size
    offloader.onload()
    used.append(resident())
    files.append(world.mapped_file_bytes())
    assert -1.1 * size < (used[1] - used[2]) - (files[1] - files[2]) < -0.9 * size
    assert torch.equal(model.weight, before)


def test_weights_that_lie_in_a_file_get_memory_of_their_own_first(tmp_path):
    from safetensors.torch import load_file, save_file

    save_file({"a": torch.randn(8, 8), "b": torch.randn(8)}, tmp_path / "model.safetensors")
    tensors = load_file(tmp_path / "model.safetensors")
    model = nn.Linear(8, 8)
    model.tied = nn.Module()
    model.weight, model.bias = nn.Parameter(tensors["a"]), nn.Parameter(tensors["b"])
    model.tied.weight = nn.Parameter(tensors["a"])
    assert not model.weight.untyped_storage().resizable()
    before = copy.deepcopy(list(model.parameters()))
    offloader = Offloader(model, directory=tmp_path)
    offloader.offload()
    assert all(storage_bytes(p.offloaded_parameter) == 0 for p in model.parameters())
    offloader.onload()
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    assert model.weight.data_ptr() == model.tied.weight.data_ptr()


def test_weights_that_other_processes_share_are_refused_by_name(tmp_path):
    model = nn.Linear(8, 8)
    model.share_memory()
    offloader = Offloader(model, directory=tmp_path)
    with pytest.raises(RuntimeError, match=r"weight lies in memory that is shared with other processes"):
        offloader.offload()
    assert offloader.away == ()
    model(torch.ones(8))


def test_host_memory_is_used_again_and_given_back():
    store = HostStore(pinned=False, chunk_bytes=64)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (10, 0, 130, 64, 1)]
    for _ in range(2):
        store.put(pieces)
        into = [torch.zeros_like(piece) for piece in pieces]
        store.get(into)
        store.clear()
        assert all(torch.equal(a, b) for a, b in zip(into, pieces, strict=True))
        assert store.host_bytes == 4 * 64


def test_pieces_lie_in_a_file_that_goes_with_the_store(tmp_path):
    store = DiskStore(tmp_path)
    pieces = [torch.randint(0, 256, (size,), dtype=torch.uint8) for size in (60, 40, 1, 300, 5)]
    store.put(pieces)
    assert [path.stat().st_size for path in files(tmp_path)] == [406]
    into = [torch.zeros_like(piece) for piece in pieces]
    store.get(into)
    assert all(torch.equal(a, b) for a, b in zip(into, pieces, strict=True))
    del store
    assert not list(tmp_path.iterdir())


def test_wrong_requests_are_refused(tmp_path, monkeypatch):
    model = nn.Linear(2, 2)
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no checks of types
    with pytest.raises(ValueError, match=r"parts=\('buffers',\): a sequence of 'weights', 'gradients', 'optimizer'"):
        Offloader(model).offload(parts=("buffers",))
    with pytest.raises(OSError, match=r"nowhere"):
        Offloader(model, directory=tmp_path / "nowhere").offload()
    assert Offloader(model).onload().notes == tuple(f"{part} was here already" for part in PARTS)


def test_shards_of_fsdp_leave_and_come_back_on_two_ranks(tmp_path, start_program):
    processes = [start_program(PROGRAM, {"rank": rank, "ranks": 2, "folder": str(tmp_path)}) for rank in range(2)]
    try:
        assert [process.wait(timeout=600) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    for rank in range(2):
        results = torch.load(tmp_path / f"rank{rank}.pt", weights_only=True)
        torch.testing.assert_close(results["disk"], results["never"], rtol=0, atol=0)
        torch.testing.assert_close(results["host"], results["never"], rtol=0, atol=0)
        torch.testing.assert_close(results["host of a fake GPU"], results["never"], rtol=0, atol=0)
        moved, back = results["disk: bytes"]
        weights = sum(tensor.nbytes for tensor in results["never"][1:])
        assert moved == back >= 3 * weights  # parameters and two moments, with FSDP's padding
        assert results["host: bytes"] == [0, 0]
        assert results["host of a fake GPU: bytes"] == results["disk: bytes"]
        assert "needs weights, offloaded to the disk; call onload() first" in results["disk: refusal"]
    assert not list(tmp_path.glob("rl-backends-offload-*"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="pinned host memory and the caching allocator need a GPU")
def test_a_gpu_gets_its_memory_back_through_pinned_host_memory(world):
    model = nn.Linear(4096, 6144, bias=False, device="cuda")  # 96 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 4096, device="cuda")).sum().backward()
    optimizer.step()
    before = contents(model, optimizer)
    before = {name: tensor.cpu() for name, tensor in before.items()}
    offloader = Offloader(model)
    for _ in range(2):
        reserved = torch.cuda.memory_reserved()
        left = offloader.offload([optimizer])
        moved = sum(left.bytes_moved.values())
        assert moved >= 4 * model.weight.numel() * 4
        assert reserved - torch.cuda.memory_reserved() >= 0.9 * moved
        assert left.host_bytes >= moved
        offloader.onload()
        after = {name: tensor.cpu() for name, tensor in contents(model, optimizer).items()}
        torch.testing.assert_close(after, before, rtol=0, atol=0)
    offloader.close()
    assert offloader.offload(parts=()).host_bytes == 0
