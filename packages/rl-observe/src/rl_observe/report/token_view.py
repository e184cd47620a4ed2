"""Answers token by token: shaded by how likely the engine held each token, and what is not trained on set apart.

The pointer reads the log-probability out (`report.js`); the shades say it without. It does not know tokenizers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_percent
from rl_observe.report.markup import Html, element
from rl_observe.report.record import Row, RunRecord, number, text
from rl_observe.report.typography import typeset_value

__all__ = ["tokens_section"]

_MOST_SHOWN = 12
# Of a longer conversation the beginning and the end are shown: the middle makes a page heavy, and is in samples.jsonl.
_TOKENS_SHOWN = 1200
_SHADES = 10


@dataclass(frozen=True, slots=True)
class _Token:
    piece: str
    logp: float | None
    trained: bool
    turn: int


def tokens_section(record: RunRecord) -> Html | None:
    """Show the answers that were kept with their tokens; None if there are none."""
    kept = [(sample, tokens) for sample in record.samples if (tokens := _tokens(sample))]
    if not kept:
        return None
    shades = [element("i", class_=f"tok p{shade}", title=_range(shade)) for shade in range(_SHADES)]
    legend = element(
        "ul",
        element("li", "unlikely ", *shades, " certain"),
        element("li", element("span", "prompt or observation", class_="ctx")),
        element("li", element("span", "sampled, not trained on", class_="tok off p9")),
        class_="legend tok-legend",
    )
    return element(
        "section",
        element("h2", "Token by token"),
        element(
            "p",
            "What the engine sampled, shaded by the probability that it gave each token. Point at one, or click it.",
            class_="lead",
        ),
        legend,
        *(_conversation(sample, tokens) for sample, tokens in kept[:_MOST_SHOWN]),
        id="tokens",
    )


def _tokens(sample: Row) -> list[_Token]:
    tokens = sample.get("tokens")
    if not isinstance(tokens, dict):
        return []
    pieces, logp, trained, turns = (tokens.get(name) for name in ("pieces", "logp", "trained", "turns"))
    columns = (pieces, logp, trained, turns)
    if not all(isinstance(column, list) for column in columns):
        return []
    lists = [column for column in columns if isinstance(column, list)]
    if len({len(column) for column in lists}) > 1:
        return []
    return [
        _Token(
            piece if isinstance(piece, str) else "",
            finite_number(value),
            is_trained is True,
            int(finite_number(turn) or 0) if turn is not None else -1,
        )
        for piece, value, is_trained, turn in zip(*lists, strict=True)
    ]


def _conversation(sample: Row, tokens: Sequence[_Token]) -> Html:
    known = [token.logp for token in tokens if token.logp is not None]
    turns = len({token.turn for token in tokens if token.turn >= 0})
    reward = number(sample, "reward")
    facts = [
        text(sample, "when"),
        text(sample, "stage"),
        None if reward is None else f"reward {typeset_value(reward, 'number')}",
        f"{len(known)} tokens sampled of {len(tokens)}",
        f"{turns} answers" if turns > 1 else None,
        f"mean probability {format_percent(math.exp(sum(known) / len(known)))} (geometric)" if known else None,
        "cut off at the token limit" if sample.get("truncated") is True else None,
    ]
    head = element("p", " · ".join(fact for fact in facts if fact), class_="note")
    half = _TOKENS_SHOWN // 2
    if len(tokens) > _TOKENS_SHOWN:
        gap = element("span", f" … {len(tokens) - 2 * half} tokens left out … ", class_="gap")
        body = [*_marked(tokens[:half], 0), gap, *_marked(tokens[-half:], len(tokens) - half)]
    else:
        body = _marked(tokens, 0)
    return element("div", head, element("pre", *body), element("output", ""), class_="conversation")


def _marked(tokens: Sequence[_Token], first: int) -> list[Html]:
    parts: list[Html] = []
    at = first
    for is_context, group in groupby(tokens, key=lambda token: token.logp is None):
        run = list(group)
        if is_context:
            parts.append(element("span", "".join(token.piece for token in run), class_="ctx"))
        else:
            parts += [_token(token, at + index) for index, token in enumerate(run)]
        at += len(run)
    return parts


def _token(token: _Token, index: int) -> Html:
    logp = min(token.logp or 0.0, 0.0)
    shade = min(_SHADES - 1, int(_SHADES * math.exp(logp)))
    classes = f"tok p{shade}" if token.trained else f"tok off p{shade}"
    # A line's end would have no width to be shaded or pointed at.
    shown = token.piece.replace("\n", "↵\n") or "·"
    return element("i", shown, class_=classes, data_l=f"{logp:.4g}", data_i=index, data_t=token.turn)


def _range(shade: int) -> str:
    return f"{10 * shade} to {10 * (shade + 1)} %"
