"""The README's longer programs, as they are written there; the first one is run in test_package.py."""

import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "programs"))

for needed in ("httpx", "openai", "starlette", "uvicorn"):
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed: rl-generation[server] and its test group", allow_module_level=True)

import openai
import serving
import speaking
import torch

import rl_generation
from rl_generation.server import Server

PROGRAMS = re.findall(r"```python\n(.*?)```", (HERE.parent / "README.md").read_text(), re.DOTALL)


def program(holding):
    (found,) = (text for text in PROGRAMS if holding in text)
    return found


def engine_of_words(tokenizer):
    """One that answers in letters: the text of single bytes and of special tokens has no way back to them."""
    engine = serving.plain_engine(tokenizer)
    letters = torch.tensor([tokenizer.decode([token]).strip().isalpha() for token in range(len(tokenizer))])
    letters &= torch.tensor([tokenizer.decode([token]).isascii() for token in range(len(tokenizer))])
    engine.model.lm_head.register_forward_hook(lambda *call: call[-1].masked_fill(~letters, -1e9))
    return engine


def test_the_client_of_the_readme_keeps_its_tokens_over_two_turns(capsys):
    tokenizer = speaking.tokenizer()
    names = {"engine": engine_of_words(tokenizer), "tokenizer": tokenizer}
    exec(program("required_prefix_token_ids"), names)
    assert capsys.readouterr().out == "0\n"
    prompt = names["second"].prompt_token_ids
    assert prompt[: len(names["seen"])] == names["seen"]
    assert len(prompt) > len(names["seen"])


def test_the_engine_far_away_of_the_readme_prints_what_the_readme_says(capsys):
    tokenizer = speaking.tokenizer()
    exec(program("RemoteEngine(["), {"engine": serving.plain_engine(tokenizer), "tokenizer": tokenizer})
    readme = (HERE.parent / "README.md").read_text()
    assert f"```text\n{capsys.readouterr().out}```" in readme


def test_the_engine_of_the_readme_is_streamed_and_served():
    names = {name: getattr(rl_generation, name) for name in rl_generation.__all__}
    exec(program("class Parrot"), names)
    tokenizer = speaking.tokenizer()
    with Server(names["Parrot"](), tokenizer=tokenizer, model_name="parrot") as server:
        asked = {"model": "parrot", "prompt": [5, 6, 7], "max_tokens": 1, "extra_body": {"return_token_ids": True}}
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            assert client.completions.create(**asked).choices[0].token_ids == [7]
