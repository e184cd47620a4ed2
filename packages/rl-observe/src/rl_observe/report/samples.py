"""Responses to the same held-out prompts before and after training, and a few of them token by token."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rl_observe.glossary import finite_number
from rl_observe.report.record import Row, RunRecord, number, text

__all__ = ["before_after", "conversations"]

_MAX_CONVERSATIONS = 12
_MAX_TOKENS = 1200  # a longer conversation is shown at both ends; the middle would make the page heavy
_WHENS = ("before", "after")


def before_after(record: RunRecord) -> dict[str, Any] | None:
    """For the template: `counts`, `is_binary` and `pairs` of samples. None if there are no samples.

    `counts` says before and after training how many responses were right, wrong or cut off, of how many, and their
    mean reward. A pair is the prompt, the expected answer or None, and the samples before and after, None if missing.
    """
    pairs: dict[tuple[str, str], dict[str, Row]] = {}
    for sample in record.samples:
        prompt, when = text(sample, "prompt"), text(sample, "when")
        if prompt is not None and when in _WHENS:
            pairs.setdefault((text(sample, "stage") or "", prompt), {}).setdefault(when, sample)
    counts = {}
    for when in _WHENS:
        found = [pair[when] for pair in pairs.values() if when in pair]
        rewards = [reward for sample in found if (reward := number(sample, "reward")) is not None]
        kinds = Counter(
            "right" if number(sample, "reward") == 1 else "cut off" if sample.get("truncated") is True else "wrong"
            for sample in found
        )
        if rewards:
            counts[when] = {"kinds": kinds, "of": len(found), "mean": sum(rewards) / len(rewards)}
    rows = []
    for (_, prompt), pair in pairs.items():
        expected = next((gold for sample in pair.values() if (gold := text(sample, "expected")) is not None), None)
        rows.append((prompt, expected, [pair.get(when) for when in _WHENS]))
    return {"counts": counts, "is_binary": record.rewards_are_right_or_wrong, "pairs": rows} if rows else None


def conversations(record: RunRecord) -> list[dict[str, Any]]:
    """At most twelve samples that were kept with their tokens, those of the same prompt together.

    Each has the `sample`, its `num_tokens`, `num_sampled`, `num_turns` and mean `probability`, and `tokens`. A token
    has `text`; a sampled one also `logp`, `shade` (its probability in tenths), `trained`, `turn` and `index`.
    """
    found: dict[tuple[str | None, str | None], list[dict[str, Any]]] = {}
    for sample in record.samples:
        if (conversation := _conversation(sample)) is not None:
            found.setdefault((text(sample, "stage"), text(sample, "prompt")), []).append(conversation)
    return [conversation for group in found.values() for conversation in group][:_MAX_CONVERSATIONS]


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
    shown_tokens = _join_context(tokens)
    if len(tokens) > _MAX_TOKENS:
        half = _MAX_TOKENS // 2
        gap = {"text": f" … {len(tokens) - 2 * half} tokens left out … ", "gap": True}
        shown_tokens = [*_join_context(tokens[:half]), gap, *_join_context(tokens[-half:])]
    return {
        "sample": sample,
        "num_tokens": len(tokens),
        "num_sampled": len(logps),
        "num_turns": len({token["turn"] for token in tokens if "logp" in token}),
        "probability": math.exp(sum(logps) / len(logps)) if logps else None,
        "tokens": shown_tokens,
    }


def _join_context(tokens: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Join runs of tokens that were not sampled: nobody points at them one by one."""
    parts: list[dict[str, Any]] = []
    for is_sampled, run in groupby(tokens, key=lambda token: "logp" in token):
        group = list(run)
        parts += group if is_sampled else [{"text": "".join(token["text"] for token in group)}]
    return parts
