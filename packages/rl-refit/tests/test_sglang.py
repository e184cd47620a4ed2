"""A server of SGLang as a sink, against a server that answers as SGLang's does: by real HTTP, from real files."""

import contextlib
import http.server
import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from rl_refit import ModuleSource, Refit, Rendezvous, StateDictSource
from rl_refit.errors import CoverageError, DigestError, PoisonedError, RefitError
from rl_refit.sglang import SglangSink

KEY = "a-key-of-the-server"
PROGRAM = Path(__file__).parent / "programs" / "sglang_sink.py"


class Server:
    """Loads folders as SGLang does: whole, or it goes back to what it had; and says what it was asked, in order."""

    def __init__(self, model_path):
        self.start(model_path)
        self.asked, self.paused, self.refuses, self.takes_versions, self.silent = [], False, None, True, False
        owner = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_GET(self):
                self.do_POST()

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
                status, answer = 401, None
                if self.headers.get("Authorization") == f"Bearer {KEY}":
                    status, answer = owner.answer(self.path, body)
                data = b"denied" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def start(self, model_path):
        """As the program does: weights of the folder, under SGLang's own label."""
        self.model_path, self.label = model_path, "default"
        self.weights = load_file(Path(model_path) / "model.safetensors")

    def answer(self, path, body):
        self.asked.append((path, body))
        if path == "/model_info":
            return 200, {"model_path": str(self.model_path), "weight_version": self.label}
        if path == "/pause_generation":
            self.paused = body["mode"]
            return 200, {"status": "ok"}
        if path == "/continue_generation":
            self.paused = False
            return 200, {"status": "ok"}
        if path != "/update_weights_from_disk":
            return 404, {"detail": "Not Found"}
        assert self.paused
        assert body["flush_cache"]
        if self.refuses is not None:
            self.weights = load_file(Path(self.model_path) / "model.safetensors")  # "rolling back": it must be there
            return 400, {"success": False, "message": self.refuses}
        assert json.loads((Path(body["model_path"]) / "config.json").read_text()) == {"model_type": "tiny"}
        self.weights, self.model_path = load_file(Path(body["model_path"]) / "model.safetensors"), body["model_path"]
        if self.takes_versions:
            self.label = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}


class Policy(nn.Module):
    """An embedding with a head that is tied to it, as small models have; files hold it once."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.embed, self.norm, self.lm_head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7, bias=False)
        self.lm_head.weight = self.embed.weight
        self.bfloat16()

    def saved(self):
        return {name: each.detach().clone() for name, each in self.named_parameters()}


def same(tensors, others):
    return tensors.keys() == others.keys() and all(torch.equal(tensors[name], others[name]) for name in tensors)


@pytest.fixture
def like(tmp_path):
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "tiny"}))
    save_file(Policy(0).saved(), folder / "model.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"older weights")
    return folder


@pytest.fixture
def server(like):
    server = Server(like)
    yield server
    server.http.shutdown()
    server.http.server_close()


def versions_in(folder, server):
    """The versions that lie there for a server."""
    return sorted(
        each.name for each in (folder / "versions" / server.url.removeprefix("http://").replace(":", "-")).iterdir()
    )


def sink_of(server, like, tmp_path, **options):
    return SglangSink(server.url, like=like, folder=tmp_path / "versions", **{"api_key": KEY} | options)


def test_the_server_has_each_version_bit_for_bit_under_its_label_and_the_disk_only_the_last(server, like, tmp_path):
    sink = sink_of(server, like, tmp_path)
    for version in (1, 4):
        report = Refit(ModuleSource(policy := Policy(version)), sink)(version=version)
        assert same(server.weights, policy.saved())
        assert server.label == str(version) == str(sink.version)
        assert {*report.unreadable} == {*policy.saved()}  # nothing is said of what the server then holds
        assert versions_in(tmp_path, server) == [f"version-{version}"]
    sink.check()
    assert sorted(each.name for each in Path(server.model_path).iterdir()) == ["config.json", "model.safetensors"]
    paths = [path for path, _ in server.asked if path != "/model_info"]
    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"] * 2
    assert {body["mode"] for path, body in server.asked if path == "/pause_generation"} == {"retract"}


def test_a_version_that_the_server_does_not_load_poisons_the_sink_and_the_next_one_mends_it(server, like, tmp_path):
    sink = sink_of(server, like, tmp_path, requests="abort")
    Refit(ModuleSource(Policy(1)), sink)(version=1)
    server.refuses = "Failed to update weights: no room.\nRolling back to original weights."
    with pytest.raises(RefitError, match=r"did not load .*version-2: Failed to update weights: no room"):
        Refit(ModuleSource(Policy(2)), sink)(version=2)
    assert server.paused is False  # it goes on, with what it says that it went back to
    assert same(server.weights, Policy(1).saved())
    with pytest.raises(PoisonedError, match="the commit of version 2 failed with RefitError"):
        sink.check()
    assert versions_in(tmp_path, server) == ["version-1", "version-2"]  # it may have either
    server.refuses = None
    Refit(ModuleSource(Policy(3)), sink)(version=3)
    assert same(server.weights, Policy(3).saved())
    sink.check()
    assert versions_in(tmp_path, server) == ["version-3"]


def test_a_version_is_repeated_beside_the_folder_that_the_server_goes_back_to(server, like, tmp_path):
    sink = sink_of(server, like, tmp_path)
    Refit(ModuleSource(Policy(1)), sink)(version=1)
    for seed, name in ((2, "version-1-again"), (3, "version-1")):
        sink.repeat()
        Refit(ModuleSource(Policy(seed)), sink)(version=1)
        assert same(server.weights, Policy(seed).saved())
        assert versions_in(tmp_path, server) == [name]


def test_servers_that_share_a_folder_do_not_share_their_versions(server, like, tmp_path):
    other = Server(like)
    try:
        for number, each in enumerate((server, other), start=1):
            Refit(ModuleSource(Policy(number)), sink_of(each, like, tmp_path))(version=1)
        assert versions_in(tmp_path, server) == versions_in(tmp_path, other) == ["version-1"]
        assert same(load_file(Path(server.model_path) / "model.safetensors"), Policy(1).saved())
    finally:
        other.http.shutdown()
        other.http.server_close()


def test_several_servers_are_ranks_of_one_sink(server, like, tmp_path):
    other, address = Server(like), f"file://{tmp_path}/store"
    ranks = []
    try:
        for rank, each in enumerate((server, other)):
            task = {"url": each.url, "like": str(like), "folder": str(tmp_path / "versions"), "api_key": KEY}
            task |= {"address": address, "rank": rank}
            ranks.append(subprocess.Popen([sys.executable, str(PROGRAM), json.dumps(task)]))
        meeting = Rendezvous(address, num_sources=1, num_sinks=2, source_rank=0)
        policy = Policy(1)
        with contextlib.closing(Refit(ModuleSource(policy), rendezvous=meeting)) as refit:
            for version in (1, 2):
                with torch.no_grad():
                    policy.norm.bias += 1
                refit(version=version)
                assert same(server.weights, policy.saved())
                assert same(other.weights, policy.saved())
                assert server.label == other.label == str(version)
        assert [rank.wait(240) for rank in ranks] == [0, 0]
    finally:
        for rank in ranks:
            rank.kill()
        other.http.shutdown()
        other.http.server_close()


def test_a_refit_that_is_not_committed_does_not_reach_the_server(server, like, tmp_path, monkeypatch):
    sink = sink_of(server, like, tmp_path)
    source = StateDictSource(Policy(1).saved())
    sink.prepare(source.manifest())
    for region, tensor in source.shards(Policy(1).saved()):
        sink.stage(region, tensor)
    sink.ready(1)
    assert versions_in(tmp_path, server) == ["version-1"]
    sink.abort()
    assert versions_in(tmp_path, server) == []
    assert {path for path, _ in server.asked} == {"/model_info"}
    assert same(server.weights, Policy(0).saved())

    def tearing(tensors, path, **options):
        save_file({**tensors, "norm.bias": tensors["norm.bias"] + 1}, path, **options)

    monkeypatch.setattr("safetensors.torch.save_file", tearing)
    with pytest.raises(DigestError, match=r"version-1 does not hold what was written of norm\.bias"):
        Refit(ModuleSource(Policy(1)), sink)(version=1)
    assert {path for path, _ in server.asked} == {"/model_info"}
    assert versions_in(tmp_path, server) == []
    sink.check()


def test_a_server_that_was_started_anew_is_found_out(server, like, tmp_path):
    sink = sink_of(server, like, tmp_path)
    sink.check()  # nothing was promised yet
    Refit(ModuleSource(Policy(1)), sink)(version=1)
    server.start(like)
    with pytest.raises(PoisonedError, match="labelled 'default', and version 1 was committed: it was started anew"):
        sink.check()
    Refit(ModuleSource(Policy(2)), sink)(version=2)
    sink.check()
    assert same(server.weights, Policy(2).saved())


def test_a_server_that_does_not_take_versions_is_not_believed(server, like, tmp_path):
    sink = sink_of(server, like, tmp_path)
    server.takes_versions = False
    with pytest.raises(RefitError, match=r"says that it loaded .*, and labels its weights 'default'"):
        Refit(ModuleSource(Policy(1)), sink)(version=1)
    with pytest.raises(PoisonedError):
        sink.check()


def test_what_cannot_be_asked_is_refused_before_anybody_commits(server, like, tmp_path):
    with pytest.raises(RefitError, match=r"/model_info refuses the caller \(401\): give api_key=") as refused:
        Refit(ModuleSource(Policy(1)), sink_of(server, like, tmp_path, api_key="a-wrong-one"))(version=1)
    assert "a-wrong-one" not in str(refused.value)
    server.http.shutdown()
    server.http.server_close()
    sink = sink_of(server, like, tmp_path)
    with pytest.raises(RefitError, match=r"was not answered: ConnectionRefusedError: .*; is SGLang there\?"):
        Refit(ModuleSource(Policy(1)), sink)(version=1)
    assert not (tmp_path / "versions").exists()


def test_a_policy_of_other_tensors_and_a_folder_without_any_are_refused(server, like, tmp_path):
    with pytest.raises(CoverageError, match="scale"):
        Refit(StateDictSource(Policy(1).saved() | {"scale": torch.ones(1)}), sink_of(server, like, tmp_path))(version=1)
    with pytest.raises(RefitError, match="like= is the checkpoint folder that the server was started with"):
        SglangSink(server.url, like=tmp_path, folder=tmp_path)
    with pytest.raises(ValueError, match='requests must be "retract" or "abort"'):
        sink_of(server, like, tmp_path, requests="in_place")
    with pytest.raises(ValueError, match=r"without a password; got http://host$"):
        SglangSink("http://me:secret@host:1", like=like, folder=tmp_path)
