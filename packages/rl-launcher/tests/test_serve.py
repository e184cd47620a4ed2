"""Claims about engines elsewhere: `rl-launcher serve` in processes of its own, and runs that sample and refit there."""

import json
import re
import subprocess
import sys

import pytest

pytest.importorskip("starlette", reason="rl-generation[server] is not installed")
pytest.importorskip("httpx", reason="rl-generation[remote] is not installed")

from rl_launcher.checks.explain import explain
from rl_launcher.errors import Refusal, RunStoppedError
from rl_launcher.recipe_files import load_recipe
from rl_launcher.run import run
from rl_launcher.schema import Recipe
from rl_refit import Refit, RefitError

TOKEN = "a token of the control port"


@pytest.fixture
def serve(recipe, tmp_path):
    """Start a server of the recipe's engine; what is left of it at the end is killed."""
    started = []
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)

    def start(*options):
        ports = ["--port", "0", "--control-port", "0", "--token-file", str(token)]
        command = [sys.executable, "-m", "rl_launcher", "serve", str(recipe), *ports, *options]
        log = tmp_path / f"server{len(started)}.log"
        with log.open("w") as output:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=output, text=True)
        started.append(process)
        line = process.stdout.readline()
        found = re.fullmatch(r"engine: (\S+)   control: (\S+)\n", line)
        assert found, line + log.read_text()
        return process, found[1], found[2]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def load(recipe, tmp_path):
    """The recipe with engines at some servers, and a directory of its own."""

    def load(name, servers, *overrides, token=None):
        urls, controls = ([server[place] for server in servers] for place in (1, 2))
        asked = [f"run_dir={tmp_path / name}", *overrides]
        if servers:
            remote = {"urls": urls, "control_urls": controls, "token_file": str(token or tmp_path / "token")}
            asked.append(f"policy.generation.remote={json.dumps(remote)}")
        return load_recipe(recipe, schema=Recipe, overrides=asked)

    return load


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_run_learns_from_a_served_engine_what_it_learns_from_its_own_and_the_next_run_takes_it_over(
    serve, load, tmp_path
):
    server = serve()
    run(load("own", []))
    for name in ("first", "second"):  # the second brings older weights than the first has left there
        run(load(name, [server]))
        for ours, theirs in zip(
            lines(tmp_path / "own" / "metrics.jsonl"), lines(tmp_path / name / "metrics.jsonl"), strict=True
        ):
            for figure in ours.keys() & {"reward", "loss", "held_out_sampled", "response_length", "grad_norm"}:
                assert theirs[figure] == pytest.approx(ours[figure], rel=1e-3, abs=1e-6), figure
        refits = lines(tmp_path / name / "refits.jsonl")
        assert [each["version"] for each in refits] == [
            each["version"] for each in lines(tmp_path / "own" / "refits.jsonl")
        ]


@pytest.mark.slow
def test_a_server_that_is_killed_costs_no_step_and_is_named(serve, load, tmp_path, monkeypatch):
    from rl_launcher.build.remote_engines import RemoteWeightSync

    servers = [serve(), serve()]
    refit = RemoteWeightSync.__call__

    def kill_before_the_fourth(sync, *, version):
        if sync.count == 3:
            servers[0][0].kill()
            servers[0][0].wait()
        return refit(sync, version=version)

    monkeypatch.setattr(RemoteWeightSync, "__call__", kill_before_the_fourth)
    summary = run(load("run", servers))
    assert summary["steps"] == 14
    events = [event["name"] for event in lines(tmp_path / "run" / "events.jsonl")]
    assert "engine_absent" in events
    assert lines(tmp_path / "run" / "metrics.jsonl")[-1]["engines_absent"] == 1.0


def test_what_does_not_fit_is_refused_by_name(serve, load, tmp_path):
    server = serve("--weights-dtype", "bfloat16")
    with pytest.raises(Refusal, match=r"sends .* in float32.* made for bfloat16.*--weights-dtype float32"):
        run(load("dtype", [server]))
    wrong = tmp_path / "wrong"
    wrong.write_text("another token")
    wrong.chmod(0o600)
    with pytest.raises(Refusal, match="answers 401"):
        run(load("refused", [server], token=wrong))
    with pytest.raises(ValueError, match=r"policy\.generation\.remote is for a policy in this process"):
        load("ray", [server], "cluster.runtime=ray")
    server[0].kill()
    server[0].wait()
    with pytest.raises(Refusal, match=r"no engine is there .*rl-launcher serve"):
        run(load("gone", [server]))


def test_servers_that_wait_for_a_refit_are_told_when_the_trainer_itself_is_refused(serve, load, monkeypatch):
    """And not after their deadline of 600 seconds, for which the run would wait, too."""
    from rl_launcher.build.remote_engines import RemoteWeightSync

    server, told = serve(), []
    receive = RemoteWeightSync._receive

    def refused(_refit, _version):
        raise RefitError("its weights cannot be sent")

    with monkeypatch.context() as patch:
        patch.setattr(Refit, "__call__", refused)
        patch.setattr(RemoteWeightSync, "_receive", lambda sync, url, **how: told.append(receive(sync, url, **how)))
        with pytest.raises(RunStoppedError, match="its weights cannot be sent"):
            run(load("refused", [server]))
    assert told == ["the trainer has left: its weights cannot be sent"]
    assert run(load("after", [server]))["steps"] == 14


def test_explain_counts_no_engine_here_and_says_where_they_are(load):
    text = explain(load("run", [(None, "http://10.0.0.2:8000", "http://10.0.0.2:8001")])).text()
    assert "none here: rl-launcher serve runs them at http://10.0.0.2:8000" in text
    assert "each a rank of the sink" in text


def test_an_address_that_nobody_can_send_to_and_a_recipe_without_an_engine_are_refused(recipe, load):
    from rl_launcher.serve import serving

    for overrides, host, why in (
        ([], "0.0.0.0", "no address that a trainer can send weights to"),
        (["grpo=null", "env=null", "evaluation.samples=0"], "127.0.0.1", "nothing in this recipe samples"),
    ):
        resolved = load_recipe(recipe, schema=Recipe, overrides=overrides)
        with pytest.raises(Refusal, match=why), serving(resolved.value, token=TOKEN, host=host):
            pass
