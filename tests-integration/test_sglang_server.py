"""A policy of rl-backends, a server that speaks SGLang's HTTP, and an engine far away that samples from each step.

The server stands in for SGLang, which needs a GPU: it loads folders with transformers, and generates with the embedded
engine. What the packages send, write and read is what SGLang would be sent, load and answer.
"""

import dataclasses
import http.server
import json
import threading
from typing import ClassVar

import pytest
import torch
import transformers

from rl_backends import DTensorBackend, DTensorConfig, OptimizerConfig
from rl_generation import RemoteEngine, Sampling, TransformersEngine
from rl_refit import Refit, StateDictSource
from rl_refit.sglang import SglangSink

VOCABULARY = 67


@dataclasses.dataclass(frozen=True)
class Examples:
    rows_per_unit: ClassVar[int] = 1
    tokens: torch.Tensor
    lengths: torch.Tensor
    trainable: torch.Tensor


class Server:
    """The part of SGLang's server that the two packages ask for."""

    def __init__(self, folder):
        self.lock, self.label = threading.Lock(), "default"
        self.load(folder)
        self.http = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self))
        self.url = f"http://127.0.0.1:{self.http.server_port}"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def load(self, folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = TransformersEngine(model, stop_token_ids=[], pad_token_id=0)

    def answer(self, path, body):
        with self.lock:
            if path == "/v1/models":
                return {"object": "list", "data": [{"id": "toy", "owned_by": "sglang", "max_model_len": 64}]}
            if path in {"/model_info", "/get_model_info"}:
                return {"model_path": "toy", "weight_version": self.label, "preferred_sampling_params": None}
            if path == "/get_server_info":
                return {"model_path": "toy", "enable_deterministic_inference": True}
            if path == "/update_weights_from_disk":
                self.load(body["model_path"])
                self.label = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights."}
            return self.generate(body) if path == "/generate" else {}

    def generate(self, body):
        asked, prompt = body["sampling_params"], body["input_ids"]
        names = {"max_new_tokens": "max_new_tokens", "temperature": "temperature", "sampling_seed": "seed"}
        sampling = Sampling(**{ours: asked[theirs] for theirs, ours in names.items() if theirs in asked})
        (rollout,) = self.engine.generate([prompt], sampling)
        said = {
            "finish_reason": {"type": "length", "length": len(rollout.tokens)},
            "prompt_tokens": len(prompt),
            "completion_tokens": len(rollout.tokens),
            "weight_version": self.label,
            "output_token_logprobs": [[*pair, None] for pair in zip(rollout.logp, rollout.tokens, strict=True)],
        }
        if "token_ids_logprob" in body:
            with torch.no_grad():
                logits = self.engine.model(torch.tensor([prompt])).logits[0, -1]
            logp = (logits / asked["temperature"]).log_softmax(-1).tolist()
            said["output_token_ids_logprobs"] = [[[logp[each], each, None] for each in body["token_ids_logprob"]]]
        return {"output_ids": list(rollout.tokens), "meta_info": said}


def handler_of(server):
    """Answers with JSON, whatever is asked."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_):
            pass

        def do_GET(self):
            self.do_POST()

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
            data = json.dumps(server.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    return Handler


@pytest.fixture
def policy():
    config = transformers.Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    return DTensorBackend(transformers.Qwen3ForCausalLM(config), DTensorConfig())


def test_a_server_of_sglang_samples_from_each_step_and_says_which(policy, tmp_path):
    policy.save_pretrained(tmp_path / "untrained")
    server = Server(tmp_path / "untrained")
    policy.start_training(OptimizerConfig(lr=1e-2), num_steps=2)
    tokens = torch.randint(3, VOCABULARY, (4, 10), generator=torch.Generator().manual_seed(0))
    trainable = (torch.arange(10) > 2).expand(4, 10)
    examples = Examples(tokens=tokens, lengths=torch.full((4,), 10), trainable=trainable)
    sink = SglangSink(server.url, like=tmp_path / "untrained", folder=tmp_path / "versions")
    refit = Refit(StateDictSource.from_shards(policy.shards()), sink)
    prompts, sampling = tokens[:, :4].tolist(), Sampling(max_new_tokens=8, seed=3)
    try:
        with RemoteEngine(server.url, vocab_size=VOCABULARY) as engine:
            assert {rollout.version for rollout in engine.generate(prompts, sampling)} == {0}  # "default" is no number
            for step in (1, 2):
                policy.forward_backward(examples, lambda logp, rows: (-(logp * rows.trainable).sum() / 28, {}))
                policy.optim_step()
                refit(version=step)
                rollouts = engine.generate(prompts, sampling)
                assert {rollout.version for rollout in rollouts} == {step} == {engine.version}
                sampled = torch.tensor(
                    [[*prompt, *each.tokens] for prompt, each in zip(prompts, rollouts, strict=True)]
                )
                whole = Examples(
                    tokens=sampled, lengths=torch.full((4,), 12), trainable=(torch.arange(12) > 3).expand(4, 12)
                )
                found = torch.tensor([rollout.logp for rollout in rollouts])
                assert (policy.logp(whole)[:, 4:] - found).abs().max() < 1e-5
        sink.check()
    finally:
        server.http.shutdown()
        server.http.server_close()
        policy.close()
