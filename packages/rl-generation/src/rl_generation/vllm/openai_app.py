"""vLLM's own OpenAI app over a `VllmEngine`: its parsers of tools and reasoning, its grammars, its Responses.

    client ── the routes below ── VllmApp ── vLLM's FastAPI app ── _ServedEngine ── VllmEngine
                                  |                                |
                                  reads what is ours in a body,    submits each answer as the engine submits its own:
                                  adds what is ours to an answer   its gate, stop tokens, deadline and weights' versions

Only the routes in `ROUTES` reach vLLM's app. Those that change weights, load adapters, put the engine to sleep, profile
it or reset its cache are not among them, whatever vLLM's environment variables say.

What is added to a response, and to the last chunk of each choice in a stream: `weight_versions` (which weights made
which of its tokens, `[start, end)`), `weight_version` (of the oldest) and `logp_of`. Log-probabilities are the engine's
own, and one that is not finite is an error. Token ids are vLLM's `return_token_ids`; in Responses, where vLLM has none,
they are added.
"""

import asyncio
import copy
import inspect
import json
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from rl_generation.chat import Message as ChatMessage
from rl_generation.chat import put_required_prefix
from rl_generation.detokenizer import INCOMPLETE, Tokenizer, answer_text, decode
from rl_generation.errors import (
    EngineDeadError,
    EngineOptionError,
    LogpError,
    ModelError,
    PromptError,
    SampleTimeoutError,
)
from rl_generation.model_flags import installed_version
from rl_generation.requests import Sampling, check_token_ids
from rl_generation.server.answers import to_json
from rl_generation.server.generation_request import Body, Flag, Integer, TokenIds, read_json
from rl_generation.server.guard import HttpError, ServerLimits, from_engine, internal, read_body
from rl_generation.server.tools import tool_format_of
from rl_generation.vllm.engine import VllmEngine
from rl_generation.vllm.options import nearest
from rl_generation.vllm.preparing import TESTED
from rl_generation.vllm.samples import Sample

if TYPE_CHECKING:
    from fastapi import FastAPI

LOG = logging.getLogger(__name__)

GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses")
ROUTES = (*GENERATING, "/tokenize", "/detokenize")
"""What reaches vLLM's app."""

PARSERS = {"hermes": "hermes", "llama": "llama3_json", "mistral": "mistral"}
"""vLLM's parser of each of the formats of calls that `tool_format_of` knows."""

OURS = (EngineDeadError, SampleTimeoutError, LogpError, ModelError, EngineOptionError, PromptError)
"""Errors of the engine; others are vLLM's, which knows how to answer them."""


@dataclass(slots=True, kw_only=True)
class _Exchange:
    """One request of a client, as the engine under vLLM's app and the HTTP around it share it."""

    path: str
    n: int = 1
    """Answers to each prompt."""

    required_prefix: tuple[int, ...] = ()
    token_ids: bool = False
    """Whether a response of the Responses API holds them."""

    prompts: list[list[int]] = field(default_factory=list)
    """Token ids, in the order in which vLLM submits them."""

    samples: dict[int, Sample] = field(default_factory=dict)
    """Of each choice that has begun."""

    failure: HttpError | None = None
    """Why the engine, or what is ours before it, did not answer."""


class OurFields(Body):
    """What is read here of a body; the rest is vLLM's."""

    n: Integer
    required_prefix_token_ids: TokenIds
    return_token_ids: Flag = False


_exchange: ContextVar[_Exchange] = ContextVar("rl_generation_exchange")


class VllmApp:
    """An ASGI application: vLLM's own, with what is ours before and behind it. The engine stays the caller's.

    Args:
        engine: Serves.
        tokenizer: Its chat template is used; its tokens are the engine's own tokenizer's.
        model_name: What clients must call the model.
        bounds: What one client may ask for.
        tool_parser: One of vLLM's parsers of tool calls, or "llama" for its "llama3_json"; None takes what the chat
            template or the vocabulary names.

    Raises:
        EngineOptionError: This vLLM has no such app or parser, or the engine has no tokenizer.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        tokenizer: Tokenizer,
        model_name: str,
        bounds: ServerLimits,
        tool_parser: str | None = None,
    ) -> None:
        if engine.limits.tokenizer is None:
            raise EngineOptionError("the engine has no tokenizer, which a server of texts needs: give tokenizer=…")
        self._engine, self._model_name, self._bounds = engine, model_name, bounds
        self._template = tokenizer.chat_template if isinstance(tokenizer.chat_template, str) else None
        self._tool_parser = PARSERS.get(tool_parser or tool_format_of(tokenizer) or "", tool_parser)
        self._known = _check_interface(self._tool_parser)
        self._building, self._llm = asyncio.Lock(), engine.vllm
        self._app = asyncio.run_coroutine_threadsafe(self._build(), engine.loop).result()

    def routes(self) -> list[Route]:
        """Return the routes that lead here."""
        return [Route(path, self, methods=["POST"]) for path in ROUTES]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"]
        exchange = _Exchange(path=path)
        fields = read_json(await read_body(Request(scope, receive), self._bounds))
        body = json.dumps(self._read(exchange, fields)).encode()
        headers = MutableHeaders(raw=list(scope["headers"]))
        headers["content-length"] = str(len(body))
        scope = {**scope, "headers": headers.raw}
        if path in GENERATING:
            try:
                self._engine.check_ready()  # while the answer still has a status
            except OURS as error:
                raise from_engine(error) from error
        given = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return given.pop() if given else await receive()

        _exchange.set(exchange)
        answer = _Answer(exchange, send, engine=self._engine)
        app = await self._current()
        try:
            await app(scope, replay, answer.send)
        except Exception as error:
            if not await answer.fail(error):
                raise

    def _read(self, exchange: _Exchange, fields: dict[str, Any]) -> dict[str, Any]:
        """Take what is ours out of a body, refuse what nobody knows, and return the rest for vLLM's app."""
        path, bounds = exchange.path, self._bounds
        known = self._known[path if path != "/tokenize" or "messages" not in fields else "/tokenize messages"]
        read = OurFields.of(fields, others=known)
        body = {name: value for name, value in fields.items() if name in known and value is not None}
        if (prefix := read.required_prefix_token_ids) is not None:
            if "messages" not in known and path != "/v1/responses":
                message = "required_prefix_token_ids are of a conversation; here send the prompt as token ids"
                raise HttpError(400, message, param="required_prefix_token_ids", code="unknown_field")
            exchange.required_prefix = tuple(prefix)
            vocab_size = self._engine.limits.vocab_size
            try:
                check_token_ids(prefix, vocab_size=vocab_size, name="required_prefix_token_ids")
            except PromptError as error:
                raise from_engine(error) from None
        exchange.token_ids = path == "/v1/responses" and read.return_token_ids
        if path not in GENERATING:
            return body
        if body.get("use_beam_search"):
            message = "use_beam_search=true samples nothing, so that its answers have no log-probability as sampled"
            raise HttpError(400, message, param="use_beam_search", code="unsupported_field")
        if body.get("include_reasoning") is False and body.get("return_token_ids"):
            message = "include_reasoning=false hides tokens, and return_token_ids asks for all of them: send one"
            raise HttpError(400, message, param="include_reasoning", code="invalid_value")
        if body.get("tools") and body.get("tool_choice") != "none" and (installed_version() or "").startswith("0.30."):
            for name in ("structured_outputs", "response_format", "text"):
                if body.get(name) not in (None, {"type": "text"}, {"format": {"type": "text"}}):
                    message = f"vLLM 0.30 drops {name} where there are tools: send tool_choice='none', or use vLLM 0.31"
                    raise HttpError(400, message, param=name, code="unsupported_field")
        exchange.n = read.n or 1 if "n" in known else 1
        prompts = body.get("prompt")
        count = len(prompts) if isinstance(prompts, list) and prompts and not isinstance(prompts[0], int) else 1
        bounds.check_counts(prompts=count, n=exchange.n)
        bounds.check_words(body)
        return body

    async def _current(self) -> "FastAPI":
        """Return the app, made anew where the engine was restarted: it holds what belongs to one `AsyncLLM`."""
        if self._llm is not self._engine.vllm:
            async with self._building:
                if self._llm is not (llm := self._engine.vllm):
                    building = asyncio.run_coroutine_threadsafe(self._build(), self._engine.loop)
                    self._app, self._llm = await asyncio.wrap_future(building), llm
        return self._app

    async def _build(self) -> "FastAPI":
        """Make vLLM's app, on the engine's loop."""
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state
        from vllm.entrypoints.launchers.app import build_app
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        llm = self._engine.vllm
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
        arguments.model, arguments.served_model_name = llm.vllm_config.model_config.model, [self._model_name]
        arguments.chat_template = self._template
        arguments.tool_call_parser, arguments.enable_auto_tool_choice = self._tool_parser, self._tool_parser is not None
        # Grammars begin where the reasoning ends, so that the engine itself was made with its parser.
        arguments.structured_outputs_config = llm.vllm_config.structured_outputs_config
        tasks = await llm.get_supported_tasks()
        app: FastAPI = build_app(arguments, tasks, llm.vllm_config.model_config)
        with _without_decisions():
            await init_app_state(_ServedEngine(self._engine, llm), app.state, arguments, tasks)
        _require_prefixes(app.state.online_renderer)
        return app


@contextmanager
def _without_decisions() -> Iterator[None]:
    """Have vLLM make no state for `/v1/systemone`, which is not served here.

    It is made by encoding labels, at which a tokenizer without an unknown token fails, and the whole app with it.
    """
    try:
        from vllm.entrypoints.generate.structured_decisions import api_router
    except ImportError:  # before 0.32
        yield
        return

    def none(_client: Any, state: Any, *_: Any) -> None:
        state.serving_structured_decisions = None

    made, api_router.init_structured_decisions_state = api_router.init_structured_decisions_state, none
    try:
        yield
    finally:
        api_router.init_structured_decisions_state = made


class _ServedEngine:
    """The `AsyncLLM` of an engine as vLLM's app sees it: all of it, but that it submits as the engine does."""

    errored = False  # the engine says what died, where it is asked to generate

    def __init__(self, engine: VllmEngine, llm: Any) -> None:
        self._engine, self._llm = engine, llm

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)

    def generate(self, prompt: Any, sampling_params: Any, _request_id: str, **how: Any) -> AsyncGenerator[Any, None]:
        """Answer a prompt `n` times, each a request of its own."""
        exchange = _exchange.get()
        index = len(exchange.prompts)
        exchange.prompts.append(list(prompt.get("prompt_token_ids") or ()))
        return self._generate(exchange, index, prompt=prompt, asked=sampling_params, how=how)

    async def _generate(
        self, exchange: _Exchange, prompt_index: int, *, prompt: Any, asked: Any, how: Mapping[str, Any]
    ) -> AsyncGenerator[Any, None]:
        from vllm.sampling_params import RequestOutputKind

        prompt_ids, texts = exchange.prompts[prompt_index], dict[int, str]()
        whole: dict[int, Any] = {}
        try:
            outputs = self._engine.outputs(prompt, self._params(asked, prompt_index), **how)
            async with aclosing(outputs):
                async for sample, output, _ in outputs:
                    (completion,) = output.outputs
                    index = completion.index = sample.index
                    exchange.samples[prompt_index * exchange.n + index] = sample
                    before = texts.get(index, "") if asked.output_kind is RequestOutputKind.DELTA else ""
                    texts[index] = before + completion.text
                    if output.finished:
                        completion.text += self._rest(sample, completion, asked, prompt=prompt_ids, text=texts[index])
                    if asked.output_kind is RequestOutputKind.FINAL_ONLY:
                        whole[index] = output
                    else:
                        yield output
        except OURS as error:
            exchange.failure = from_engine(error)
            raise exchange.failure from error
        if whole:
            whole[0].outputs = [output.outputs[0] for _, output in sorted(whole.items())]
            yield whole[0]

    def _rest(self, sample: Sample, completion: Any, asked: Any, *, prompt: Sequence[int], text: str) -> str:
        """What vLLM holds back for ever of an answer that ends inside a character, without which its text is not it."""
        tokenizer, tokens = self._engine.limits.tokenizer, sample.tokens
        if isinstance(completion.stop_reason, int) and not asked.include_stop_str_in_output:
            tokens = tokens[:-1]
        if isinstance(completion.stop_reason, str) or not decode(tokenizer, tokens[-8:]).endswith(INCOMPLETE):
            return ""
        whole = answer_text(tokenizer, tokens, prompt=prompt, skip_special_tokens=asked.skip_special_tokens)
        rest = whole[len(text) :]
        return rest if whole.startswith(text) and set(rest) == {INCOMPLETE} else ""

    def _params(self, asked: Any, prompt_index: int) -> list[Any]:
        """The SamplingParams of each answer, which ends and draws as an answer of the engine does."""
        seed = asked.seed
        if seed is not None and prompt_index:
            seed = Sampling(max_new_tokens=1, n=asked.n, seed=seed).spread(prompt_index + 1)[-1].seed
        own = () if asked.ignore_eos else self._engine.stop_token_ids
        ending = {"stop_token_ids": [*asked.stop_token_ids, *own], "ignore_eos": True}
        # So that a broken one is an error, whether it was asked for or not.
        unasked = asked.logprobs is None and not getattr(asked, "logprob_token_ids", None)
        logp = {"logprobs": 0, "flat_logprobs": True} if unasked else {}
        each = []
        for sample in range(asked.n):
            params = copy.copy(asked)
            own_seed = None if seed is None else seed + sample
            for name, value in {"n": 1, "seed": own_seed, **ending, **logp}.items():
                setattr(params, name, value)
            params.__post_init__()
            each.append(params)
        return each


class _Answer:
    """Sends what vLLM's app answers, with what is ours added to it."""

    def __init__(self, exchange: _Exchange, send: Send, *, engine: VllmEngine) -> None:
        self._exchange, self._send, self._engine = exchange, send, engine
        self._start: Message = {}
        self._streams = self._adds = self._ended = False
        self._held = b""

    async def send(self, message: Message) -> None:
        """Take a message of vLLM's app."""
        if message["type"] == "http.response.start":
            self._start = message
            headers = MutableHeaders(raw=message["headers"])
            kind = headers.get("content-type", "")
            self._streams = kind.startswith("text/event-stream")
            self._adds = message["status"] == 200 and self._exchange.path in GENERATING
            if self._streams:
                headers["Cache-Control"], headers["X-Accel-Buffering"] = "no-store", "no"
                await self._send(message)
            return
        more = message.get("more_body", False)
        self._held += message.get("body", b"")
        if self._streams:
            *events, self._held = self._held.split(b"\n\n")
            sent = b"".join(self._event(event) + b"\n\n" for event in events)
            if sent or not more:
                await self._send({**message, "body": sent + (b"" if more else self._held)})
        elif not more:
            headers = MutableHeaders(raw=self._start["headers"])
            body = self._held
            if self._adds:
                said = json.loads(body)
                self._add(said)
                body = to_json(said)
            failure = self._exchange.failure
            if failure is not None and self._start["status"] >= 400:  # ours says more than what vLLM makes of it
                body, self._start["status"] = to_json(failure.body), failure.status
                headers.update(failure.headers)
            headers["content-length"] = str(len(body))
            await self._send(self._start)
            await self._send({**message, "body": body})
        self._ended = not more

    async def fail(self, error: Exception) -> bool:
        """End a stream with an error that vLLM's app let through; return whether there is one to end."""
        if not self._streams or self._ended:
            return self._ended
        LOG.error("a stream ended with an unforeseen error", exc_info=error)
        failure = self._exchange.failure or internal()
        body = b"data: " + to_json(failure.body) + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
        return True

    def _event(self, event: bytes) -> bytes:
        before, data, text = event.rpartition(b"data: ")
        if not text.startswith(b"{"):
            return event
        said = json.loads(text)
        if "error" in said and self._exchange.failure is not None:
            said = self._exchange.failure.body
        elif self._exchange.path == "/v1/responses":
            if said["type"] not in ("response.completed", "response.incomplete"):
                return event
            self._add(said["response"])
        elif not said.get("choices") or any(choice.get("finish_reason") for choice in said["choices"]):
            self._add(said)
        else:
            return event
        return before + data + to_json(said)

    def _add(self, said: dict[str, Any]) -> None:
        """Add what is ours to a response, or to a chunk, of whose choices those that have ended get it."""
        exchange = self._exchange
        ended = {index: sample for index, sample in exchange.samples.items() if sample.versions}
        if exchange.path == "/v1/responses":
            last = max(ended)
            said["weight_versions"] = [asdict(span) for span in ended[last].versions]
            if exchange.token_ids:
                said |= {"prompt_token_ids": exchange.prompts[last], "token_ids": ended[last].tokens}
        else:
            for choice in said["choices"]:
                if choice.get("finish_reason"):
                    choice["weight_versions"] = [asdict(span) for span in ended[choice["index"]].versions]
            if chosen := [choice["index"] for choice in said["choices"]]:
                ended = {index: ended[index] for index in chosen}
        if ended:
            said["weight_version"] = min(span.version for sample in ended.values() for span in sample.versions)
        said["logp_of"] = self._engine.logp_of


def _require_prefixes(online: Any) -> None:
    """Have vLLM's renderer put the required prefix of a request in the place of what the template makes of it."""
    render = online.preprocess_chat

    async def preprocess_chat(request: Any, messages: list[Any], *given: Any, **named: Any) -> Any:
        conversation, inputs = await render(request, messages, *given, **named)
        exchange = _exchange.get()
        if not (prefix := exchange.required_prefix):
            return conversation, inputs
        asked = inspect.signature(render).bind(request, messages, *given, **named).arguments
        chat = request.build_chat_params(
            asked["default_template"], asked["default_template_content_format"]
        ).with_defaults({**(asked["default_template_kwargs"] or {}), "tools": asked.get("tool_dicts")})

        async def encode(those: Sequence[ChatMessage]) -> list[int]:
            _, (made,) = await online.renderer.render_chat_async(
                [list(those)], chat, request.build_tok_params(online.model_config)
            )
            return list(made["prompt_token_ids"])

        tokenizer, loop = online.renderer.tokenizer, asyncio.get_running_loop()
        try:
            exact = await asyncio.to_thread(
                put_required_prefix,
                inputs[0]["prompt_token_ids"],
                prefix,
                messages=messages,
                encode=lambda those: asyncio.run_coroutine_threadsafe(encode(those), loop).result(),
                tokenizer=tokenizer,
            )
        except PromptError as error:
            param = "required_prefix_token_ids"
            exchange.failure = HttpError(400, str(error), param=param, code="invalid_value")
            raise exchange.failure from None
        inputs[0]["prompt_token_ids"] = exact
        inputs[0].pop("prompt", None)  # the text of the template, whose tokens these are not
        return conversation, inputs

    online.preprocess_chat = preprocess_chat


def _check_interface(tool_parser: str | None) -> dict[str, set[str]]:
    """Return the fields of each route of vLLM's app; refuse a vLLM that has it elsewhere, or has no such parser."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # noqa: F401
        from vllm.entrypoints.launchers.app import build_app  # noqa: F401
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.entrypoints.openai.completion.protocol import CompletionRequest
        from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
        from vllm.entrypoints.serve.tokenize.protocol import (
            DetokenizeRequest,
            TokenizeChatRequest,
            TokenizeCompletionRequest,
        )
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.tool_parsers import ToolParserManager

        _ = OnlineRenderer.preprocess_chat
    except (ImportError, AttributeError) as error:
        raise EngineOptionError(
            f"vLLM {installed_version()} has its OpenAI app elsewhere than the releases that this server is written "
            f"for, {TESTED[0]} to {TESTED[-1]}: {error}; install one of those, or serve another engine"
        ) from error
    parsers = ToolParserManager.list_registered()
    if tool_parser is not None and tool_parser not in parsers:
        raise EngineOptionError(
            f"tool_format={tool_parser!r} is no parser of vLLM's{nearest(tool_parser, parsers)}; it has "
            f"{', '.join(sorted(parsers))}"
        )
    requests = {
        "/v1/chat/completions": ChatCompletionRequest,
        "/v1/completions": CompletionRequest,
        "/v1/responses": ResponsesRequest,
        "/tokenize": TokenizeCompletionRequest,
        "/tokenize messages": TokenizeChatRequest,
        "/detokenize": DetokenizeRequest,
    }
    return {
        path: {name for key, each in kind.model_fields.items() for name in (key, each.alias) if name}
        for path, kind in requests.items()
    }
