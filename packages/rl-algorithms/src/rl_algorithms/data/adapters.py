"""Rows as other systems write them: verl's and NeMo-Gym's, for `columns=` and `adapter=` of the readers.

Every column stays, under its name: verifiers find what they look for.
"""

from collections.abc import Mapping

__all__ = ["VERL_COLUMNS", "from_nemo_gym"]

VERL_COLUMNS: Mapping[str, str] = {"prompt": "prompt", "answer": "reward_model.ground_truth"}
"""verl: `data_source, prompt, ability, reward_model {style, ground_truth}, extra_info`; for `columns=`."""


def from_nemo_gym(columns: Mapping[str, object]) -> Mapping[str, object]:
    """NeMo-Gym: `responses_create_params {input, instructions, tools}` and fields for the verifier; for `adapter=`.

    Raises:
        KeyError: there are no `responses_create_params.input`.
        ValueError: the input has what is no message, such as an earlier call of a tool.
        TypeError: a message has a part that is no text.
    """
    request = columns["responses_create_params"]
    if not isinstance(request, Mapping) or "input" not in request:
        raise KeyError("responses_create_params.input")
    prompt = request["input"]
    messages = [_message(item) for item in prompt] if isinstance(prompt, list) else [_said("user", prompt)]
    if request.get("instructions") is not None:
        messages.insert(0, _said("system", request["instructions"]))
    for name in ("prompt", "tools"):
        if name in columns:
            raise ValueError(f"the row has a field {name!r} of its own, which would be lost")
    return {**columns, "prompt": messages, "tools": [_tool(tool) for tool in request.get("tools") or ()]}


def _message(item: object) -> dict[str, object]:
    if not isinstance(item, Mapping) or (item.get("type") or "message") != "message" or "role" not in item:
        raise ValueError(f"responses_create_params.input has {item!r:.60}, and only messages are read")
    content = item.get("content")
    return _said(item["role"], "".join(map(_text, content)) if isinstance(content, list) else content)


def _text(part: object) -> str:
    text = part.get("text") if isinstance(part, Mapping) else None
    if not isinstance(text, str):
        raise TypeError(f"responses_create_params.input has the part {part!r:.60}, and only texts are read")
    return text


def _said(role: object, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def _tool(tool: object) -> object:
    # The Responses API has flat what chat templates find under "function".
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {key: value for key, value in tool.items() if key != "type"}}
