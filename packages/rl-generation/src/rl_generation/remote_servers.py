"""What is sent to servers elsewhere, and what is read of their answers. Does not send anything.

Three kinds of servers are spoken to, each in the one interface of its own that takes token ids and gives them back:

    rl-generation   POST /v1/completions, whose answer also holds `weight_versions`
    vllm            POST /v1/completions with `return_token_ids` and `logprobs`
    sglang          POST /generate with `input_ids` and `return_logprob`

Text never crosses the wire as a prompt, and the text of an answer is not read: the tokens of a rollout are the ids that
the server sampled, or the answer is an error.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, cast, get_args

from rl_generation.errors import LogpError, ModelError, PromptError
from rl_generation.requests import MAX_SEED, Limits, Request
from rl_generation.rollout import FinishReason, LogpOf, Rollout, TopLogp, VersionSpan
from rl_generation.vllm.samples import EMBEDDED_ONLY, check_for_vllm, refuse_fields

ServerKind = Literal["rl-generation", "vllm", "sglang"]
"""Which server answers: `rl-generation serve`, `vllm serve`, or SGLang's `python -m sglang.launch_server`."""

LOWEST_LOGP = -9999.0
"""vLLM sends this for minus infinity, and SGLang the lowest number of the dtype; no sampled token is that unlikely."""

SGLANG_HARMLESS = {"skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "stream_interval"}
"""Sampling parameters of SGLang that cannot change the tokens of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What replicas must have in common."""

    kind: ServerKind
    model: str
    max_length: int | None
    vocab_size: int
    seeded: bool = True
    """Whether the server keeps the seeds of requests."""

    def difference(self, other: "ServerFacts") -> str | None:
        """The first thing in which two servers differ, in words."""
        pairs = ((each.name, getattr(other, each.name), getattr(self, each.name)) for each in fields(self))
        return next((f"{name} is {theirs!r} and {ours!r}" for name, theirs, ours in pairs if theirs != ours), None)

    def requests(self, request: Request, *, limits: Limits, logp_of: LogpOf) -> list[Request]:
        """What is sent for a request; PromptError for what this server would not do, or ignore."""
        if self.kind == "sglang":
            return _sglang_requests(request, logp_of=logp_of, seeded=self.seeded)
        if self.kind == "vllm":
            check_for_vllm(request, limits)
        elif any(math.isinf(bias) for _, bias in request.sampling.logit_bias):
            raise PromptError(
                f"prompt {request.prompt_index} asks for a logit_bias of -inf, which JSON cannot hold: use -100"
            )
        return [request]

    def question(self, request: Request) -> tuple[str, dict[str, Any]]:
        """Where a request is sent, and its body."""
        if self.kind == "sglang":
            return "/generate", _sglang_body(request, self)
        return "/v1/completions", _completion_body(request, self)

    def rollouts(self, answer: Any, request: Request, *, logp_of: LogpOf, version: int) -> tuple[list[Rollout], bool]:
        """Return the rollouts of an answer, and whether it says which weights made them; else they are of `version`.

        Errors, which go on from "the answer to …": LogpError where it is not exact, ModelError where it was cut off.
        """
        said = _read_sglang(answer, request) if self.kind == "sglang" else _read_completions(answer, request)
        made = [
            _rollout(request, each, index=index, logp_of=logp_of, version=version) for index, each in enumerate(said)
        ]
        return made, bool(said[0].versions)


VERSIONS: Mapping[ServerKind, str] = {
    "rl-generation": "reported with each token",
    "vllm": "committed here: plain vLLM reports none",
    "sglang": "reported by SGLang where its label is a number, and else committed here",
}
"""Who says which weights made a rollout."""

SAMPLING_FIELDS = (
    *("n", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "stop_token_ids", "bad_words", "ignore_eos"),
)
"""Of Sampling, which `/v1/completions` calls by the same names."""


def _completion_body(request: Request, facts: ServerFacts) -> dict[str, Any]:
    """A request to `/v1/completions`. All that a generation config of the server could fill in is said."""
    sampling = request.sampling
    body: dict[str, Any] = {
        "model": facts.model,
        "prompt": request.prompt,
        "max_tokens": sampling.max_new_tokens,
        **{name: getattr(sampling, name) for name in SAMPLING_FIELDS},
        "logprobs": sampling.top_logp,  # with 0, of the sampled token alone
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": False,
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if facts.kind == "rl-generation":  # for the others they were refused before
        if sampling.logit_bias:
            body["logit_bias"] = {str(token): bias for token, bias in sampling.logit_bias}
        if sampling.min_new_tokens:
            body["min_tokens"] = sampling.min_new_tokens
        for name, kind in (("json_schema", "json"), ("regex", "regex")):
            if getattr(sampling, name) is not None:
                body["structured_outputs"] = {kind: getattr(sampling, name)}
    return body


def _read_completions(answer: Any, request: Request) -> "list[_Said]":
    """What an answer of `/v1/completions` says; LogpError if it is not exact."""
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    if len(choices) != request.sampling.n:
        raise LogpError(f"holds {len(choices)} answers of n={request.sampling.n}")
    found = []
    for choice in choices:
        if choice.get("token_ids") is None or choice.get("prompt_token_ids") is None:
            raise LogpError(
                "ignores return_token_ids, and so has not the tokens that were sampled: vLLM has it since 0.10.2"
            )
        if not (given := choice.get("logprobs")):
            raise LogpError("ignores logprobs=0, which asks for the logp of the sampled token")
        if tuple(choice["prompt_token_ids"]) != request.prompt:
            raise LogpError(f"is to another prompt, of {len(choice['prompt_token_ids'])} tokens")
        found.append(
            _Said(
                tokens=choice["token_ids"],
                logp=given["token_logprobs"],
                finish_reason=choice["finish_reason"],
                stop_reason=choice["stop_reason"],
                versions=tuple(VersionSpan(**span) for span in choice.get("weight_versions") or ()),
                top_logp=_top_logp(given, request.sampling.top_logp),
                logp_of=answer.get("logp_of"),
            )
        )
    return found


def _top_logp(given: Mapping[str, Any], count: int) -> TopLogp:
    """The likeliest tokens of each place, of a mapping that also holds the sampled one, wherever it ranks."""
    if not count:
        return ()
    places = []
    for sampled, values in zip(given["tokens"], given["top_logprobs"], strict=True):
        # Of two that are equally likely, the sampled one may be there only because it was sampled.
        ranked = sorted(values.items(), key=lambda pair: (-pair[1], pair[0] == sampled))
        places.append(tuple((int(name.removeprefix("token_id:")), value) for name, value in ranked[:count]))
    return tuple(places)


def _sglang_requests(request: Request, *, logp_of: LogpOf, seeded: bool) -> list[Request]:
    """One request for each of the `n` answers, since SGLang would answer all of one alike; refuses what it ignores."""
    asked, index = request.sampling, request.prompt_index
    refuse_fields(
        request,
        ("bad_words", *EMBEDDED_ONLY),
        "which SGLang does not do as the embedded engine does: leave it out, or use a server of rl-generation",
    )
    if asked.ignore_eos and asked.stop_token_ids:
        raise PromptError(
            f"prompt {index} asks for stop_token_ids={asked.stop_token_ids!r} beside ignore_eos, with which SGLang "
            f"ignores them too"
        )
    cut = {"top_p": asked.top_p != 1.0, "top_k": asked.top_k != 0, "min_p": asked.min_p != 0.0}
    if logp_of == "sampled" and not asked.greedy and any(cut.values()):
        names = ", ".join(f"{name}={getattr(asked, name)}" for name, given in cut.items() if given)
        raise PromptError(
            f"prompt {index} asks for {names}, and SGLang's logp are those before the cut, not of what was drawn from: "
            f"leave it out, or take logp_of='raw' of a server started with SGLANG_RETURN_ORIGINAL_LOGPROB=1"
        )
    seed = asked.seed
    if seed is not None and not asked.greedy and not seeded:
        raise PromptError(
            f"prompt {index} asks for seed={seed}, which SGLang ignores unless it is started with "
            f"--enable-deterministic-inference"
        )
    if seed is None and seeded:  # a deterministic SGLang would take the same seed for all requests
        seed = secrets.randbelow(MAX_SEED - asked.n)
    seeds = [None if seed is None else seed + sample for sample in range(asked.n)]
    return [
        replace(request, sampling=replace(asked, n=1, seed=own), sample_index=sample)
        for sample, own in enumerate(seeds)
    ]


def _sglang_body(request: Request, facts: ServerFacts) -> dict[str, Any]:
    """A request to SGLang's `/generate`. All that `--preferred-sampling-params` could fill in is said."""
    sampling = request.sampling
    same = ("max_new_tokens", "n", "temperature", "top_p", "min_p", "ignore_eos", "min_new_tokens")
    penalties = ("presence_penalty", "frequency_penalty", "repetition_penalty")  # others were refused before
    parameters: dict[str, Any] = {
        **{name: getattr(sampling, name) for name in (*same, *penalties)},
        "top_k": sampling.top_k or -1,
        "stop": sampling.stop or None,
        "stop_token_ids": sampling.stop_token_ids or None,
    }
    if facts.seeded and sampling.seed is not None:
        parameters["sampling_seed"] = sampling.seed
    return {"input_ids": request.prompt, "sampling_params": parameters, "return_logprob": True, "stream": False}


def _read_sglang(answer: Any, request: Request) -> "list[_Said]":
    """What an answer of SGLang's `/generate` says; LogpError if it is not exact."""
    said = answer["meta_info"]
    if said["prompt_tokens"] != len(request.prompt):
        raise LogpError(f"is to another prompt, of {said['prompt_tokens']} tokens: is --allow-auto-truncate set?")
    if (pairs := said.get("output_token_logprobs")) is None:
        raise LogpError("ignores return_logprob, and has no output_token_logprobs")
    # The ids beside the logp are what was sampled, with the stop token; output_ids may lack it.
    if len(pairs) != said["completion_tokens"]:
        raise LogpError(f"has {said['completion_tokens']} tokens and {len(pairs)} logp")
    reason = said["finish_reason"]
    if reason.get("matched") == "NaN happened":  # what SGLang calls an id outside of the vocabulary
        raise LogpError("was ended by NaN in the logits: look for it in the weights")
    return [
        _Said(
            tokens=[pair[1] for pair in pairs],
            logp=[pair[0] for pair in pairs],
            finish_reason=reason["type"],
            stop_reason=reason.get("matched"),
            versions=_sglang_versions(said),
        )
    ]


def _sglang_versions(said: Mapping[str, Any]) -> tuple[VersionSpan, ...]:
    """Which weights made which token, by SGLang's labels; nothing where one is no number of optimizer steps.

    Newer releases have a span for each label in `weight_versions`, older ones the label at the end alone.
    """
    whole = [{"version": said.get("weight_version"), "start": 0, "end": said["completion_tokens"]}]
    spans = said.get("weight_versions") or whole
    if not all(str(span["version"]).isdecimal() for span in spans):
        return ()
    found = [VersionSpan(version=int(each["version"]), start=each["start"], end=each["end"]) for each in spans]
    made = tuple(span for span in found if span.start < span.end)
    if [span.start for span in made] != [0, *(span.end for span in made[:-1])] or made[-1].end != whole[0]["end"]:
        raise LogpError(f"has weight_versions {spans}, which do not cover its {whole[0]['end']} tokens in order")
    return made


@dataclass(frozen=True, slots=True, kw_only=True)
class _Said:
    """One answer, as a server says it."""

    tokens: Sequence[int]
    logp: Sequence[float | None]
    finish_reason: str
    stop_reason: int | str | None
    versions: tuple[VersionSpan, ...]
    """Empty where it does not say them."""

    top_logp: TopLogp = ()
    logp_of: str | None = None
    """As our server says it."""


def _rollout(request: Request, said: _Said, *, index: int, logp_of: LogpOf, version: int) -> Rollout:
    """One rollout, or why it cannot be one: after `the answer to prompt 3 (…)`; of `version` where nobody says it."""
    tokens, logp, finish_reason, stop_reason = said.tokens, said.logp, said.finish_reason, said.stop_reason
    if said.logp_of not in (None, logp_of):
        raise LogpError(f"has logp of the distribution {said.logp_of!r}, and not {logp_of!r}: its engine changed")
    if len(tokens) != len(logp):
        raise LogpError(f"has {len(tokens)} tokens and {len(logp)} logp")
    for place, (token, value) in enumerate(zip(tokens, logp, strict=True)):
        if value is None or not LOWEST_LOGP < value < math.inf:
            raise LogpError(f"has logp={value} at token {place}, id {token}")
        if value > 1e-3:
            raise LogpError(
                f"has {value} as a log-probability, which is a logit: start vLLM with --logprobs-mode "
                f"{'processed_logprobs' if logp_of == 'sampled' else 'raw_logprobs'}"
            )
    if finish_reason not in get_args(FinishReason):
        raise ModelError(f"ended for the reason {finish_reason!r}, which is none of {get_args(FinishReason)}")
    most = request.sampling.max_new_tokens
    if len(tokens) > most or (finish_reason == "length" and len(tokens) < most):
        raise ModelError(
            f"was cut off after {len(tokens)} tokens, by a limit of the server's own: at vLLM, max_new_tokens of the "
            f"generation config (--generation-config vllm ignores it)"
        )
    if finish_reason == "stop" and stop_reason is None:  # vLLM does not repeat an eos token here
        stop_reason = tokens[-1]
    return Rollout(
        tokens=tuple(tokens),
        logp=tuple(float(value) for value in logp if value is not None),
        logp_of=logp_of,
        finish_reason=cast("FinishReason", finish_reason),
        stop_reason=stop_reason if finish_reason == "stop" else None,
        versions=said.versions or (VersionSpan(version=version, start=0, end=len(tokens)),),
        top_logp=said.top_logp,
        prompt_index=request.prompt_index,
        sample_index=request.sample_index + index,
    )
