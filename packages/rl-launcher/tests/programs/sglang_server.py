"""A server that answers as SGLang's does, for runs that sample and refit there. argv: checkpoint folder, port.

It stands in for SGLang, which needs a GPU: it loads folders with transformers, and generates with the embedded engine.
"""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch
import transformers

from rl_generation import Sampling, TransformersEngine


class Server:
    """The part of SGLang's server that a run asks for."""

    def __init__(self, folder):
        self.lock, self.label = threading.Lock(), "default"
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.load(folder)

    def load(self, folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.engine = TransformersEngine(model, stop_token_ids=[], pad_token_id=0)

    def answer(self, path, body):
        with self.lock:
            if path == "/v1/models":
                return {"object": "list", "data": [{"id": "toy", "owned_by": "sglang", "max_model_len": 32}]}
            if path in {"/model_info", "/get_model_info"}:
                return {"model_path": "toy", "weight_version": self.label, "preferred_sampling_params": None}
            if path == "/get_server_info":
                return {"model_path": "toy", "enable_deterministic_inference": True}
            if path == "/tokenize":
                return {"tokens": self.tokenizer.encode(body["prompt"], add_special_tokens=False)}
            if path == "/update_weights_from_disk":
                self.load(body["model_path"])
                self.label = body["weight_version"]
                return {"success": True, "message": "Succeeded to update model weights."}
            return self.generate(body) if path == "/generate" else {}

    def generate(self, body):
        asked, prompt = body["sampling_params"], body["input_ids"]
        names = {"max_new_tokens": "max_new_tokens", "temperature": "temperature", "sampling_seed": "seed"}
        sampling = Sampling(
            **{ours: asked[theirs] for theirs, ours in names.items() if theirs in asked},
            stop_token_ids=tuple(asked["stop_token_ids"] or ()),
        )
        (rollout,) = self.engine.generate([prompt], sampling)
        stopped = rollout.finish_reason == "stop"
        reason = {"type": "stop", "matched": rollout.stop_reason} if stopped else {"type": "length"}
        said = {
            "finish_reason": reason,
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


class Handler(BaseHTTPRequestHandler):
    """Answers with JSON, whatever is asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        self.do_POST()

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))) or "null")
        data = json.dumps(SERVER.answer(self.path, body)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


if __name__ == "__main__":
    torch.set_num_threads(1)
    SERVER = Server(sys.argv[1])
    http = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Handler)
    print(http.server_port, flush=True)
    http.serve_forever()
