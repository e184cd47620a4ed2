"""The ways of weights between GPUs, on faked ones: every byte arrives, and a wait orders whatever must be in order."""

import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch

from rl_refit import gpu

WAYS = ("gpus of one host", "gpus of two hosts", "gpus far apart", "gpus of two containers", "one gpu", "some gpus")
PROGRAMS = Path(__file__).parent / "programs"


def load(name):
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


races = load("gpu_order").races


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    running = load("pg_world").World(tmp_path_factory.mktemp("world"))
    yield running
    running.close()


def in_order(recorded):
    """Pass if all that processes recorded is ordered by waits."""
    events = [event for process in recorded for event in process]
    assert any(event[2] == "run" for event in events)
    found = races(events)
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("way", WAYS)
def test_every_byte_arrives_once_between_gpus_in_any_world(world, way):
    found = world.run("gpu_worlds", processes=4, way=way, seeds=[400, 405])
    assert sum(count for count, _ in found) >= 5
    in_order(recorded for _, recorded in found)


@pytest.mark.parametrize(
    ("way", "sources", "sinks", "options", "media"),
    [
        ("gpus of two hosts", ("fsdp", 2), ("fsdp", 3), {}, {"CUDA IPC and NCCL", "NCCL and CUDA IPC"}),
        ("gpus far apart", ("fsdp", 4), ("whole", 1), {}, {"NCCL"}),
        ("gpus of two hosts", ("tp", 2), ("fsdp", 3), {}, {"CUDA IPC and NCCL", "NCCL and CUDA IPC"}),
        ("gpus of one host", ("fsdp", 3), ("tp", 2), {"arena": True}, {"CUDA IPC"}),
        ("gpus far apart", ("fsdp", 2), ("whole", 2), {"verify": "off", "mode": "swap"}, {"NCCL"}),
        ("gpus of two hosts", ("whole", 1), ("tp", 4), {}, {"CUDA IPC", "NCCL"}),
        ("gpus of two hosts", ("fsdp", 2), ("tp", 2), {"colocated": True}, {"NCCL"}),
        ("gpus of two containers", ("fsdp", 2), ("fsdp", 3), {}, {"shared memory and gloo", "gloo and shared memory"}),
    ],
    ids=str,
)
def test_engines_get_the_weights_of_trainers_of_other_ranks_and_every_stream_waits_for_what_it_needs(
    world, way, sources, sinks, options, media
):
    processes = sinks[1] if options.get("colocated") else sources[1] + sinks[1]
    found = world.run("gpu_refits", processes=processes, way=way, sources=sources, sinks=sinks, **options)
    assert [wrong for wrong, *_ in found] == [[]] * processes
    assert {medium for _, medium, _ in found} & media
    in_order(recorded for *_, recorded in found)


@pytest.mark.parametrize("victim", ["source 0", "sink 0", "sink 1"])
def test_messages_to_a_gpu_whose_process_dies_are_aborted_and_the_dead_is_named(world, victim):
    number = ("source 0", "sink 0", "sink 1").index(victim)
    death = {"transport": "gpus far apart", "victim": victim, "deed": "kill", "at": 8}
    found = world.run("gpu_death", processes=3, dying=[number], **death)
    survivors = [process for process in found if process is not None]
    assert len(survivors) == 2
    for process, _, recorded in survivors:
        kind, message, peer = process["errors"][0]
        assert (kind, peer) == ("PeerError", victim), message
        assert process["party"] == "source 0" or process["wrong"] == []
        assert any(event[2] == "free" for event in recorded)
        in_order([recorded])
    assert any(aborted for _, aborted, _ in survivors)


def test_an_error_of_nccl_names_who_was_at_the_other_end_and_aborts_the_communicator(world):
    death = {"of": "bare", "transport": "gpus far apart", "victim": "sink 0", "deed": "kill", "at": 4}
    (_, errors), aborted, _ = world.run("gpu_death", processes=2, dying=[1], sees_deaths=True, **death)[0]
    kind, message, peer, _ = errors[0]
    assert (kind, peer, aborted) == ("PeerError", "sink 0", 1)
    assert re.search(r"lost the connection to sink 0 at bucket \d+ \(NCCL error: remote process exited", message)


IPC, NCCL, HOSTS = "gpus of one host", "gpus far apart", "one gpu"
STEP, FORWARD = "an optimizer step writes", "a forward reads"
FILL, READ = "copy_ writes", "copy_ reads"


@pytest.mark.parametrize(
    ("left_out", "way", "options", "earlier", "later"),
    [  # a function of the package whose waits are left out, or one of `FAULTS`
        ("send", IPC, {}, FILL, READ),
        ("send", HOSTS, {}, FILL, "send reads"),
        ("receive", IPC, {}, READ, FILL),
        ("receive", HOSTS, {}, READ, "recv writes"),
        ("run", IPC, {}, STEP, READ),
        ("run", NCCL, {}, STEP, READ),
        ("_begin_writing", IPC, {}, FORWARD, FILL),
        ("_hand_over", IPC, {"arena": True, "verify": "off"}, READ, FILL),
        ("_hand_over", NCCL, {"verify": "off"}, FILL, FORWARD),
        ("transfer", IPC, {"gives_up": 5}, READ, FILL),
        ("slots are filled again at once", IPC, {}, READ, FILL),
        ("slots are filled again at once", NCCL, {}, "send reads", FILL),
        ("slots are read before they are full", IPC, {}, READ, FILL),
        ("messages are over at once", NCCL, {}, "recv writes", "tolist reads"),
        ("slots are filled in another stream", IPC, {}, FILL, READ),
        ("slots are read in another stream", IPC, {}, READ, FILL),
    ],
)
def test_a_wait_that_is_left_out_and_a_wrong_stream_are_found_by_the_two_works_that_they_let_race(
    world, left_out, way, options, earlier, later
):
    sides = {"sources": ("whole", 1), "sinks": ("whole", 1)}
    found = world.run("gpu_refits", processes=2, way=way, fault=left_out, **sides, **options)
    lines = races(event for *_, recorded in found for event in recorded)
    assert any(re.search(rf"{earlier}.*, and .*{later} .*, and nothing orders them", line) for line in lines), lines


def test_memory_that_goes_while_it_is_copied_is_found(world):
    sides = {"sources": ("whole", 1), "sinks": ("whole", 1)}
    found = world.run("gpu_refits", processes=2, way=IPC, fault="transfer", gives_up=5, refits=1, **sides)
    lines = races(event for *_, recorded in found for event in recorded)
    assert any(re.search(r"copy_ reads, and host of process 1 frees", line) for line in lines), lines


def test_a_gpu_that_hangs_ends_the_refit_at_its_deadline_and_breaks_the_transport(world):
    sides = {"sources": ("whole", 1), "sinks": ("whole", 1)}
    found = world.run("gpu_refits", processes=2, way=IPC, fault="the GPU hangs", refits=2, **sides)
    first, second = found[0][0]
    assert re.search(r"DeadlineError: phase transfer, bucket 0.*waiting for this process's own GPU", first)
    assert "copies under way cannot be called back; make a new Refit" in second


def test_the_fake_has_all_that_is_asked_of_a_gpu_and_no_other_module_asks_one():
    source = Path(gpu.__file__).parent
    asking = [path.name for path in source.rglob("*.py") if "torch.cuda" in path.read_text()]
    assert sorted(asking) == ["gpu.py", "machine_check.py"]  # which tries a machine before any refit
    fake = (PROGRAMS / "fake_gpus.py").read_text()
    for name in gpu.__all__:
        arguments = ", ".join(("self", *inspect.signature(getattr(gpu, name)).parameters))
        assert f"def {name}({arguments}):" in fake


def test_what_the_cpu_was_given_is_over_at_once():
    cpu = torch.device("cpu")
    assert gpu.record(cpu)()
    gpu.synchronize(cpu, 1.0)
    gpu.use(cpu)
    assert gpu.empty(3, cpu).shape == (3,)
