"""Claims about engines elsewhere: `rl-launcher serve` in processes of its own, and runs that sample and refit there."""

import json
import re
import runpy
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("starlette", reason="rl-generation[server] is not installed")
pytest.importorskip("httpx", reason="rl-generation[remote] is not installed")

from rl_launcher.checks.explain import explain
from rl_launcher.checks.preflight import check_files
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import resume, run
from rl_launcher.schema import Recipe
from rl_refit import Refit, RefitError

TOKEN = "a token of the run"
SGLANG = Path(__file__).parent / "programs" / "sglang_server.py"


@pytest.fixture
def token(tmp_path):
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    return file


@pytest.fixture
def remote(token):
    """The section of a trainer at a free address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    return {"address": address, "token_file": str(token)}


@pytest.fixture
def start(tmp_path):
    """Start a process and read its first line; what is left of it at the end is killed."""
    started = []

    def start(*command):
        log = tmp_path / f"process{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen([sys.executable, *command], stdout=subprocess.PIPE, stderr=output, text=True)
        started.append(process)
        line = process.stdout.readline()
        assert line, log.read_text()
        return process, line

    yield start
    for process in started:
        kill(process)
        process.stdout.close()


@pytest.fixture
def serve(start, recipe, remote):
    """Start `rl-launcher serve`; the process and the URL."""

    def serve(*options, port=0, **changes):
        asked = [f"policy.generation.remote={json.dumps(remote | changes)}", "--port", str(port)]
        process, line = start("-m", "rl_launcher", "serve", str(recipe), *asked, *options)
        return process, re.fullmatch(r"engine: (\S+)\n", line)[1]

    return serve


@pytest.fixture
def load(recipe, tmp_path, remote):
    """The recipe with a directory of its own, and with engines of its own or served ones."""

    def load(name, *overrides, served=True, **changes):
        asked = [f"run_dir={tmp_path / name}", *overrides]
        if served:
            asked.append(f"policy.generation.remote={json.dumps(remote | changes)}")
        return load_recipe(recipe, schema=Recipe, overrides=asked)

    return load


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def same_curve(first, second):
    """Two runs have learned the same, step by step."""
    for ours, theirs in zip(lines(first / "metrics.jsonl"), lines(second / "metrics.jsonl"), strict=True):
        for figure in ours.keys() & {"reward", "loss", "held_out_sampled", "response_length", "grad_norm"}:
            assert theirs[figure] == pytest.approx(ours[figure], rel=1e-3, abs=1e-6), figure


def kill(process):
    process.kill()
    process.wait()


def test_a_run_learns_from_a_served_engine_what_it_learns_from_its_own_and_the_next_run_takes_it_over(
    serve, load, tmp_path
):
    _, url = serve()
    run(load("own", served=False))
    for name in ("first", "second"):  # the second brings older weights than the first has left there
        run(load(name))
        same_curve(tmp_path / "own", tmp_path / name)
        refits = lines(tmp_path / name / "refits.jsonl")
        brought = [each["version"] for each in lines(tmp_path / "own" / "refits.jsonl")]
        assert [(each["version"], each["versions"]) for each in refits] == [(each, {url: each}) for each in brought]
    rewound = [event["message"] for event in lines(tmp_path / "second" / "events.jsonl")]
    assert any(f"{url} had version {brought[-1]}, of an earlier run" in message for message in rewound)


def test_an_engine_that_is_killed_under_way_costs_no_step_and_serves_again_when_it_is_back(
    serve, load, tmp_path, monkeypatch
):
    from rl_launcher.build.remote_engines import RemoteWeightSync

    servers, refit = [serve(), serve()], RemoteWeightSync.__call__
    (first, url), (_, other) = servers

    def kill_and_start_again(sync, *, version):
        if sync.count == 2:
            kill(first)
        if sync.count == 4:
            servers.append(serve(port=int(url.rpartition(":")[2])))
            while url not in sync._replicas.joined():
                time.sleep(0.05)
        return refit(sync, version=version)

    monkeypatch.setattr(RemoteWeightSync, "__call__", kill_and_start_again)
    summary = run(load("run", at_least=1))
    assert summary["steps"] == 14
    refits = lines(tmp_path / "run" / "refits.jsonl")
    without = [each for each in refits if each["versions"].get(url) is None]
    died, back = without[0]["version"], refits[-1]["version"]
    assert [each["versions"] for each in without] == [
        {url: None, other: died},
        *({other: each["version"]} for each in without[1:]),
    ]
    assert refits[-1]["versions"] == {url: back, other: back}
    told = [(event["name"], event["message"]) for event in lines(tmp_path / "run" / "events.jsonl")]
    assert any(
        name == "engine_absent" and f"{url} has not taken version {died}: PeerError" in why for name, why in told
    )
    assert [name for name, why in told if url in why and name.startswith("engine_")][-1] == "engine_joined"
    assert {row.get("engines_absent") for row in lines(tmp_path / "run" / "metrics.jsonl")} >= {0.0, 1.0}


def test_a_run_that_resumes_from_before_what_the_engines_have_takes_them_back_and_says_so(
    serve, load, tmp_path, monkeypatch, stop_after
):
    _, url = serve()
    run(load("whole", served=False))
    with monkeypatch.context() as patch:
        stop_after(patch, 8)
        with pytest.raises(RunStoppedError):
            run(load("run"))
    had = lines(tmp_path / "run" / "refits.jsonl")[-1]["version"]
    run(load("between", "grpo.max_num_steps=10"))  # the engine serves others in between
    ahead = lines(tmp_path / "between" / "refits.jsonl")[-1]["version"]
    assert ahead > had
    assert resume(tmp_path / "run")["steps"] == 14
    told = [event["message"] for event in lines(tmp_path / "run" / "events.jsonl") if event["name"] == "engine_rewound"]
    assert told == [f"{url} had version {ahead}, of an earlier run or of steps that this one takes again"]
    same_curve(tmp_path / "whole", tmp_path / "run")


@pytest.fixture
def checkpoint(tmp_path, recipe):
    """The model of the recipe as a folder, as SGLang would be started with."""
    namespace = runpy.run_path(str(recipe.parent / "model.py"))
    model, tokenizer = namespace["build"](0)
    model.save_pretrained(tmp_path / "checkpoint")
    tokenizer.save_pretrained(tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def test_servers_of_sglang_are_sampled_and_refitted_and_one_that_is_killed_is_refitted_when_it_is_back(
    start, serve, load, checkpoint, tmp_path, monkeypatch
):
    from rl_launcher.build.remote_engines import RemoteWeightSync

    model = f"policy.model_name={checkpoint}"
    of_sglang = {"kind": "sglang", "folder": str(tmp_path / "versions")}

    def start_sglang(port=0):
        process, said = start(str(SGLANG), str(checkpoint), str(port))
        return process, int(said)

    servers = [start_sglang(), start_sglang()]
    urls = [serve(model, port=port, **of_sglang)[1] for _, port in servers]
    refit = RemoteWeightSync.__call__

    def kill_and_start_again(sync, *, version):
        if sync.count == 2:
            kill(servers[0][0])
        if sync.count == 4:
            start_sglang(servers[0][1])
        return refit(sync, version=version)

    monkeypatch.setattr(RemoteWeightSync, "__call__", kill_and_start_again)
    run(load("own", model, served=False))
    run(load("run", model, **of_sglang))
    same_curve(tmp_path / "own", tmp_path / "run")
    refits = lines(tmp_path / "run" / "refits.jsonl")
    without = [each for each in refits if each["versions"][urls[0]] is None]
    assert without
    assert all(each["versions"][urls[1]] == each["version"] for each in refits)
    assert refits[-1]["versions"] == dict.fromkeys(urls, refits[-1]["version"])
    told = [(event["name"], event["message"]) for event in lines(tmp_path / "run" / "events.jsonl")]
    assert any(
        name == "engine_absent" and f"{urls[0]} has not taken" in why and "is SGLang there" in why for name, why in told
    )


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"kind": "sglang"}, "kind=sglang needs folder"),
        ({"folder": "versions"}, "folder=versions is for kind=sglang"),
        ({"address": "http://10.0.0.1"}, "must be tcp://host:port"),
        ({"address": "tcp://0.0.0.0:29555"}, "no address that an engine can find"),
        ({"at_least": 0}, "at_least"),
    ],
)
def test_what_a_section_remote_cannot_mean_is_refused(load, asked, reason):
    with pytest.raises(ValueError, match=reason):
        load("run", **asked)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("policy.generation.top_p=0.9", "SGLang's log-probabilities are those before that"),
        ("policy.generation.backend=vllm", "remote.kind=sglang takes servers that you start"),
        ("cluster.runtime=ray", "SGLang never shares the trainer's GPUs"),
        ("grpo.async_grpo={weights: in_flight, max_staleness: 1}", "was never tried"),
    ],
)
def test_what_sglang_cannot_do_is_refused_by_name(load, override, reason):
    with pytest.raises(ValueError, match=reason):
        load("run", override, kind="sglang", folder="versions")


def test_an_engine_of_sglang_of_the_runs_own_is_refused_with_what_to_write_instead(load):
    with pytest.raises(ValueError, match=r"(?s)starts no engine of SGLang, colocated or not.*remote: \{kind: sglang"):
        load("run", "policy.generation.backend=sglang", served=False)


def test_explain_of_sglang_says_that_it_never_ran_and_preflight_asks_for_its_checkpoint(load):
    resolved = load("run", kind="sglang", folder="/dev/shm/versions")
    with pytest.raises(Refusal, match=r"remote\.checkpoint is missing, and policy\.model_name=.*model\.py:build is no"):
        check_files(resolved.value, new_run=False)
    text = explain(load("run", kind="sglang", folder="/dev/shm/versions", checkpoint="/models/toy")).text()
    assert "none here: servers of SGLang that rl-launcher serve brings to" in text
    assert "through /dev/shm/versions into SGLang (never tried with SGLang itself" in text


def test_what_does_not_fit_is_refused_by_name(serve, load, tmp_path):
    serve("--weights-dtype", "bfloat16")
    with pytest.raises(RunStoppedError, match=r"(?s)bfloat16.*the trainer has float32.*--weights-dtype"):
        run(load("dtype"))
    with pytest.raises(ValueError, match=r"policy\.generation\.remote is for a policy in this process"):
        load("ray", "cluster.runtime=ray")
    with (
        socket.create_server(("127.0.0.1", 0)) as taken,
        pytest.raises(Refusal, match=r"remote\.address=.*cannot host"),
    ):
        run(load("taken", address=f"tcp://127.0.0.1:{taken.getsockname()[1]}"))


def test_an_engine_that_was_invited_is_told_when_the_trainer_itself_is_refused_and_joins_the_next(
    serve, load, monkeypatch
):
    """And not after the deadline of 600 seconds."""
    serve()

    def refused(_refit, _version):
        raise RefitError("its weights cannot be sent")

    with monkeypatch.context() as patch:
        patch.setattr(Refit, "__call__", refused)
        with pytest.raises(RunStoppedError, match="its weights cannot be sent"):
            run(load("refused"))
    assert run(load("after"))["steps"] == 14


def test_an_engine_with_another_token_does_not_join_and_the_run_says_what_it_waits_for(serve, load, tmp_path):
    wrong = tmp_path / "wrong"
    wrong.write_text("another token")
    wrong.chmod(0o600)
    serve(token_file=str(wrong))
    with pytest.raises(RunStoppedError, match=r"0 replicas have joined"):
        run(load("refused", "policy.refit.deadline_s=3"))
    (told,) = [each for each in lines(tmp_path / "refused" / "events.jsonl") if each["name"] == "engines_awaited"]
    assert "start them with rl-launcher serve, this recipe and the same token" in told["message"]


def test_explain_counts_no_engine_here_and_says_where_they_are(load):
    text = explain(load("run", address="tcp://10.0.0.1:29555", at_least=2)).text()
    assert "none here: engines that rl-launcher serve brings to tcp://10.0.0.1:29555, 2 at least" in text
    assert "to each engine that has joined, in a transaction of its own" in text


def test_an_address_that_nobody_can_send_to_and_a_recipe_without_an_engine_are_refused(load):
    from rl_launcher.serve import serving

    for overrides, served, host, why in (
        ([], True, "0.0.0.0", "no address that a trainer can send weights to"),
        ([], False, "127.0.0.1", "policy.generation.remote is missing"),
        (["grpo=null", "env=null", "evaluation.samples=0"], True, "127.0.0.1", "nothing in this recipe samples"),
    ):
        resolved = load("run", *overrides, served=served)
        with pytest.raises(Refusal, match=why), serving(resolved.value, token=TOKEN, host=host):
            pass
