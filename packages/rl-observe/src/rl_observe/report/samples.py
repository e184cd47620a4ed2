"""Responses to the same held-out prompts before and after training, and a few of them token by token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rl_observe.json_lines import finite_number
from rl_observe.number_format import format_percent
from rl_observe.report.record import Row, RunRecord, number, text
from rl_observe.report.typeset import typeset_value

__all__ = ["before_after", "conversations"]

_MAX_PAIRS = 16  # samples.jsonl has them all
_MAX_CONVERSATIONS = 12
_MAX_TOKENS = 1200  # a longer conversation is shown at both ends; the middle would make the page heavy
_WHENS = ("before", "after")


def before_after(record: RunRecord) -> dict[str, Any] | None:
    """For the template: `lead`, `outcomes` and `rows`. None if there are no samples.

    `outcomes` counts right, wrong and cut-off responses before and after training; it is empty unless every reward is
    0 or 1. A row is a prompt, the expected answer or None, and a list of the samples before and after, None where one
    is missing.
    """
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for sample in record.samples:
        prompt, when = text(sample, "prompt"), text(sample, "when")
        if prompt is not None and when in _WHENS:
            pairs.setdefault((text(sample, "stage") or "", prompt), {}).setdefault(when, sample)
    if not pairs:
        return None
    counts, outcomes = [], {}
    for when in _WHENS:
        found = [pair[when] for pair in pairs.values() if when in pair]
        rewards = [reward for sample in found if (reward := number(sample, "reward")) is not None]
        if rewards and record.rewards_are_right_or_wrong:
            kinds = [
                "right" if number(sample, "reward") == 1 else "cut off" if sample.get("truncated") is True else "wrong"
                for sample in found
            ]
            outcomes[when] = {kind: kinds.count(kind) for kind in ("right", "wrong", "cut off") if kind in kinds}
            counts.append(f"{kinds.count('right')} of {len(found)} right {when}")
        elif rewards:
            counts.append(f"mean reward {typeset_value(sum(rewards) / len(rewards), 'number')} {when}")
    lead = f"Held-out problems, sampled: {', '.join(counts)} training." if counts else "Held-out problems, sampled."
    if len(pairs) > _MAX_PAIRS:
        lead += f" The first {_MAX_PAIRS} are shown; samples.jsonl has all."
    rows = []
    for (_, prompt), pair in list(pairs.items())[:_MAX_PAIRS]:
        expected = next((gold for sample in pair.values() if (gold := text(sample, "expected")) is not None), None)
        rows.append((prompt, expected, [_response(record, pair[when]) if when in pair else None for when in _WHENS]))
    return {"lead": lead, "outcomes": outcomes, "rows": rows}


def conversations(record: RunRecord) -> list[dict[str, Any]]:
    """At most twelve samples that were kept with their tokens: `facts` and `tokens`.

    Samples of the same prompt stand together. A token has `text`; a sampled one also `logp`, `shade` (its probability
    in tenths), `trained`, `turn` and `index`.
    """
    found: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for sample in record.samples:
        if (conversation := _conversation(sample)) is not None:
            found.setdefault((text(sample, "stage"), text(sample, "prompt")), []).append(conversation)
    return [conversation for group in found.values() for conversation in group][:_MAX_CONVERSATIONS]


def _response(record: RunRecord, sample: Row) -> dict[str, Any]:
    reward, verdict = number(sample, "reward"), ""
    if reward is not None:
        verdict = f"reward {typeset_value(reward, 'number')}"
        if record.rewards_are_right_or_wrong:
            verdict = "right" if reward == 1 else "wrong"
    elif any(number(other, "reward") is not None for other in record.samples):
        verdict = "no reward"
    return {"text": text(sample, "response") or "", "verdict": verdict, "truncated": sample.get("truncated") is True}


def _conversation(sample: Row) -> dict[str, Any] | None:
    kept = sample.get("tokens")
    columns = [kept.get(name) for name in ("pieces", "logp", "trained", "turns")] if isinstance(kept, dict) else []
    lists = [column for column in columns if isinstance(column, list)]
    if len(lists) < 4 or len({len(column) for column in lists}) > 1 or not lists[0]:
        return None
    tokens: list[dict[str, Any]] = []
    for index, (piece, value, trained, turn) in enumerate(zip(*lists, strict=True)):
        shown, logp = piece if isinstance(piece, str) else "", finite_number(value)
        token: dict[str, Any] = {"text": shown}
        if logp is not None:
            logp = min(logp, 0.0)
            # A newline would have no width to be shaded or pointed at.
            token |= {"text": shown.replace("\n", "↵\n") or "·", "logp": logp, "index": index}
            token |= {"shade": min(9, int(10 * math.exp(logp))), "trained": trained is True}
            token["turn"] = int(finite_number(turn) or 0)
        tokens.append(token)
    logps = [token["logp"] for token in tokens if "logp" in token]
    num_turns = len({token["turn"] for token in tokens if "logp" in token})
    reward = number(sample, "reward")
    facts = [
        text(sample, "when"),
        text(sample, "stage"),
        None if reward is None else f"reward {typeset_value(reward, 'number')}",
        f"{len(logps)} of {len(tokens)} tokens sampled",
        f"{num_turns} responses" if num_turns > 1 else None,
        f"mean probability {format_percent(math.exp(sum(logps) / len(logps)))}" if logps else None,
        "cut off at the token limit" if sample.get("truncated") is True else None,
    ]
    shown_tokens = _join_context(tokens)
    if len(tokens) > _MAX_TOKENS:
        half = _MAX_TOKENS // 2
        gap = {"text": f" … {len(tokens) - 2 * half} tokens left out … ", "gap": True}
        shown_tokens = [*_join_context(tokens[:half]), gap, *_join_context(tokens[-half:])]
    return {"facts": " · ".join(fact for fact in facts if fact), "tokens": shown_tokens}


def _join_context(tokens: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join runs of tokens that were not sampled: nobody points at them one by one."""
    parts: list[dict[str, Any]] = []
    for is_sampled, run in groupby(tokens, key=lambda token: "logp" in token):
        group = list(run)
        parts += group if is_sampled else [{"text": "".join(token["text"] for token in group)}]
    return parts
