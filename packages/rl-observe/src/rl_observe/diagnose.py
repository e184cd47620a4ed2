"""Why did my run diverge? Rank causes by what its recorded steps and its log show.

    for finding in diagnose(RunDirectory.open("runs/mine")).findings:
        print(finding)

Each check looks for the mark that one cause leaves, and reports it with the first step, row and token where it shows,
the numbers, and what to do. No check needs a model: engine and trainer each gave a log-probability for the same tokens,
and how the two differ says a lot.

    d = logp_old - logp, on the first update after sampling, where the trainer holds the weights that sampled

    d                                                      cause
    proportional to logp                                   the engine samples at another temperature
    never below 0, and above it for many tokens            top-p, top-k: the engine's distribution was cut
    0 once it is shifted by one token                      log-probabilities or mask are off by one
    0 once rows are exchanged                              rollouts went to other rows
    0 in the first turn and not in later ones              a turn was tokenised again
    0 until the first update of the run, not since         the engine's weights are old, or only partly new
    small noise from the first step on                     precision, most often of the output layer
    0 for most tokens and large for scattered ones         the routers of a mixture chose other experts

What a single number decides stands in `LIMITS`; what is right in one run and wrong in another is not reported.
"""

from __future__ import annotations

import itertools
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from rl_observe.glossary import finite_number
from rl_observe.log_files import Row, read_json_lines, read_metrics
from rl_observe.recorded_steps import CLIPPED, RecordedStep, RecordedSteps
from rl_observe.replay import NotReplayable, plain_advantages, plain_losses
from rl_observe.run_directory import RunDirectory

__all__ = [
    "CAUSES",
    "LIMITS",
    "Diagnosis",
    "Finding",
    "check_step",
    "diagnose",
    "diagnose_steps",
    "mismatch_of",
    "monitor_step",
]

Array: TypeAlias = NDArray[Any]

CAUSES: dict[str, str] = {
    "nan": "look at the row and token that is named: a reward function that divides by zero, a log-probability of a "
    "token that cannot be sampled, or weights that overflowed in the step before (lower the learning rate, clip the "
    "gradient)",
    "mask_off_by_one": "shift the mask of trainable tokens: logp[t] belongs to tokens[t], and a response is trained on "
    "from its first token to its stop token",
    "logp_off_by_one": "align the engine's log-probabilities with its tokens: logp_old[t] is that of tokens[t]",
    "swapped_rows": "sort the engine's responses back into the order of the prompts before they are joined with "
    "rewards and log-probabilities",
    "retokenised_turn": "append the token ids that the engine sampled, never text that is tokenised again: turns of a "
    "conversation go from tokens to tokens",
    "template_drift": "render prompts once, and give engine and trainer the same token ids: the same template, options "
    "and special tokens, a BOS only once",
    "temperature": "divide the trainer's logits by the temperature of sampling too, or ask the engine for "
    "log-probabilities after temperature",
    "truncated_sampling": "sample with top_p=1 and no top_k or min_p, or let the engine report log-probabilities of "
    "the full distribution (vLLM: logprobs_mode)",
    "stale_weights": "check that every refit reaches every engine and every tensor: compare digests after each refit, "
    "and that the engine drops its prefix cache",
    "precision": "compute the output layer and its log-softmax in float32 on both sides, and let engine and trainer "
    "run in the same dtype",
    "router_drift": "replay the engine's routing in the trainer, or correct with a truncated importance weight",
    "logp_mismatch": "compare the engine's and the trainer's log-probabilities of one prompt, layer by layer",
    "advantage_mismatch": "the advantages do not follow from the recorded rewards and groups: rewards or groups were "
    "reordered after they were compared, or another baseline was used than the objective names",
    "reward_mismatch": "rewards of tokens and of rollouts do not agree: they were summed or reordered wrongly",
    "reward_constant": "check that the reward function tells right from wrong responses in the format that the "
    "policy writes, and that prompts are neither too easy nor too hard",
    "reward_inconsistent": "the reward is no function of prompt and response: fix the judge and its seed, "
    "or average several judgements",
    "reward_drift": "the judge changed during the run: pin its version and prompt, and score a fixed set of responses "
    "every few steps",
    "reward_hacked_length": "subtract a penalty of length, or judge the answer apart from its length",
    "reward_hacked_repetition": "penalise repeated text, or judge the answer apart from its form",
    "reward_hacked_format": "the gold answer itself gets less than other responses: make the reward look for the "
    "answer, not for its form",
    "wrong_groups": "number the rollouts by their prompt: a reward is only compared with those of the same prompt; "
    "repeat and sort prompts, responses and group numbers together",
    "loss_mismatch": "the recorded losses are not those of the objective: look at the sign, at what the sum is divided "
    "by (the trainable tokens of the whole optimizer step), and at the clip",
    "wrong_reference": "freeze a copy of the weights with which the stage starts, and ask that copy; the module that "
    "is trained, or another checkpoint, is no reference",
    "group_dominates": "scale advantages within groups (advantage.scale=group_std), or bound rewards of that prompt",
    "clipping_saturated": "take fewer steps on each batch, lower the learning rate, or widen the clip range",
    "learning_rate": "lower the learning rate, take fewer steps on each batch, or clip the gradient",
    "entropy_collapse": "raise the upper clip (clip_high), add an entropy bonus or a KL to the reference, or lower the "
    "learning rate",
    "duplicated_data": "remove duplicates from the data: a prompt that stands there twice counts twice",
    "leaked_data": "remove the held-out prompts from the training data: what is measured on them is memorised",
}
"""Every cause that can be reported, with its remedy."""

LIMITS: dict[str, float] = {
    "mismatch/float32": 2e-3,  # mean |d|; float32 on both sides gives 1e-6 to 1e-4
    "mismatch/float32 on a CPU": 2e-4,  # of transformers on both sides
    "mismatch/bfloat16": 6e-2,  # bfloat16 gives 0.005 to 0.03
    "logged_error": 1.05,  # what NeMo-RL calls a fault
    "tokens": 40,  # fewer tokens decide nothing,
    "few_tokens": 8,  # unless they are this many, and all far off
    "temperature_r2": 0.75,
    "exact_r2": 0.97,  # among tokens after equal prefixes, where a temperature explains all but rounding
    "alike": 4,  # such tokens, less one per prefix: fewer say nothing
    "alike_most": 2000,  # prefixes that are looked at
    "precision_most": 0.05,  # noise of a dtype is below; other causes are mostly above
    "precision_least": 0.01,  # below it is noise, whatever its shape
    "noise_shape": 2.2,  # root mean square over median of what noise does to logits: 1.5 if it is normal
    "group_share": 0.6,
    "group_count": 6,
    "clip_fraction": 0.4,
    "clip_fraction/sequences": 0.8,
    "log_ratio": 0.7,
    "entropy_share": 0.05,
    "length_growth": 1.3,
    "correlation": 0.8,
    "correlation_of_growth": 0.5,  # with what also grows over the run
    "repetition_growth": 0.1,
    "truncated_growth": 0.3,
    "correlation_of_steps": 0.95,  # between the changes from step to step
    "gold_share": 0.1,  # of the responses with the highest rewards
}
"""The numbers that the checks compare with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One cause, and where it shows first."""

    cause: str
    """A key of `CAUSES`."""

    score: float
    """From 0 to 1: how surely the evidence means this cause and not another. Findings are ranked by it."""

    stage: str
    """What is wrong first: `prompt`, `tokens`, `mask`, `reward`, `advantage`, `logp_old`, `logp`, `loss`, `gradient`,
    `data`, `policy`."""

    evidence: str
    """The numbers."""

    step: int | None = None
    """The first recorded or logged step that shows it."""

    row: int | None = None
    """The first rollout of that step."""

    token: int | None = None
    """The first token of that rollout, counted from the start of the prompt; of a reward, where it is given."""

    run_stage: str | None = None
    """The stage of the run, such as `grpo`, where the run has several."""

    @property
    def remedy(self) -> str:
        """What to do."""
        return CAUSES[self.cause]

    def __str__(self) -> str:
        """The finding in two lines."""
        places = [f"{name} {place}" for name in ("step", "row", "token") if (place := getattr(self, name)) is not None]
        of_run = "" if self.run_stage is None else f"{self.run_stage} "
        where = f" ({self.stage}; {of_run}{', '.join(places)})" if places else f" ({self.stage})"
        return f"{self.cause}{where}: {self.evidence}\n    {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """What was found, and what could not be looked at."""

    findings: list[Finding]
    """The most certain first; empty if nothing was found."""

    steps: list[int]
    """The recorded steps that were looked at."""

    remarks: list[str] = field(default_factory=list)
    """What was missing, so that some causes could not be checked."""

    def plain(self) -> dict[str, Any]:
        """All of it as plain data, for JSON."""
        found = [{**asdict(each), "remedy": each.remedy} for each in self.findings]
        return {"findings": found, "steps": self.steps, "remarks": self.remarks, "holds": not found}


def diagnose(run: RunDirectory, *, stage: str | None = None) -> Diagnosis:
    """Look for causes in the recorded steps and the log of a run: of one stage, or of every stage that has some."""
    log = read_metrics(run)
    samples = read_json_lines(run.samples)[0] if run.samples.exists() else []
    stages: list[str | None] = [stage] if stage is not None else [*RecordedSteps(run).stages]
    if not stages:  # only the log can be looked at
        stages = [None]
    findings: list[Finding] = []
    numbers: list[int] = []
    remarks: list[str] = []
    for each in stages:
        steps, unreadable = RecordedSteps(run, each).readable()
        rows = [row for row in log if each is None or row.get("stage") == each]
        found = diagnose_steps(steps, log=rows, samples=samples)
        several = each if len(stages) > 1 else None
        findings += [replace(finding, run_stage=several) for finding in found.findings]
        numbers += found.steps
        told = [f"{each}: {remark}" if several else remark for remark in found.remarks]
        remarks += [*unreadable, *told]
    if not any(each.cause == "nan" for each in findings):
        findings += _check_events(read_json_lines(run.events)[0] if run.events.exists() else [])
    return Diagnosis(findings=sorted(findings, key=lambda one: -one.score), steps=numbers, remarks=remarks)


def diagnose_steps(steps: Sequence[RecordedStep], *, log: Sequence[Row] = (), samples: Sequence[Row] = ()) -> Diagnosis:
    """The same for steps from anywhere, such as imported ones.

    Args:
        steps: of one stage, in their order.
        log: the logged steps of the stage, as `read_metrics` returns them.
        samples: held-out responses, as `samples.jsonl` holds them.
    """
    remarks = [] if steps else ["no step is recorded, so that only the log was looked at"]
    sampled = [each for each in steps if not each.data.get("given_rows")]
    for name, lost in (("logp_old", "the engine's"), ("logp", "the trainer's")):
        if sampled and not any(each.has(name) for each in steps):
            remarks.append(
                f"{lost} log-probabilities ({name}) are not recorded: whether engine and trainer agree is not known"
            )
    remarks += [f"{told}; what needs it was not looked at" for step in steps if (told := step.cut_told)]
    findings = [finding for step in steps for finding in check_step(step)]
    findings += _check_mismatch(steps, log)
    for check in (_check_prompts, _check_rewards_over_time, _check_rewards_of_gold_answers, _check_data):
        findings += check(steps, samples)
    findings += _reward_goes_with(sampled, log)
    findings += _check_best_rewards(sampled, samples)
    findings += _check_reference(sampled, log)
    findings += _check_log(log, steps)
    findings += _check_logged_mismatch(log, findings)
    # One finding per cause: the first place of the highest score.
    best: dict[str, Finding] = {}
    for each in (_located(finding, steps) for finding in findings):
        if each.cause not in best or each.score > best[each.cause].score:
            best[each.cause] = each
    ranked = sorted(_roots_first([*best.values()]), key=lambda each: -each.score)
    return Diagnosis(findings=ranked, steps=[each.step for each in steps], remarks=remarks)


CONSEQUENCES = {"learning_rate", "reward_constant", "entropy_collapse", "clipping_saturated", "group_dominates"}
"""What a step that was computed wrongly can lead to, by which the policy breaks later."""


def _roots_first(findings: list[Finding]) -> list[Finding]:
    """Consequences after what was wrong before them: a policy breaks if it is trained on the wrong numbers."""
    roots = [
        each
        for each in findings
        if each.cause not in CONSEQUENCES | {"precision", "duplicated_data", "leaked_data"} and each.step is not None
    ]
    found = []
    for each in findings:
        before = [root.score for root in roots if each.step is not None and (root.step or 0) <= each.step]
        if each.cause in CONSEQUENCES and before and each.score >= max(before):
            each = replace(each, score=max(before) - 0.01)  # noqa: PLW2901
        found.append(each)
    return found


def _located(finding: Finding, steps: Sequence[RecordedStep]) -> Finding:
    """The finding with a token: of a reward the last of the response, of data the first, else where it begins.

    What the log shows may begin at a step that is not kept any more; then the first one that is kept since is named.
    """
    if finding.row is None or finding.token is not None or finding.step is None:
        return finding
    step = next((each for each in steps if each.step >= (finding.step or 0)), None)
    if step is None or finding.row >= len(step) or not step.response[finding.row].any():
        return finding
    response = step.response[finding.row]
    last = len(response) - 1 - int(response[::-1].argmax())
    token = {"reward": last, "data": 0, "prompt": 0}.get(finding.stage, int(response.argmax()))
    evidence = finding.evidence
    if step.step != finding.step:
        evidence += f"; row and token are of step {step.step}, the first one since then that is recorded"
    return replace(finding, token=token, evidence=evidence)


def monitor_step(step: RecordedStep, *, start: float | None = None) -> list[Finding]:
    """What one step alone shows, engine against trainer included; cheap enough for every step of a run.

    Args:
        step: as it was recorded.
        start: `mismatch_of` the first step of the stage, which tells weights that got old from what never agreed.
    """
    log: list[Row] = [] if start is None else [{"token_mult_prob_error": start}]
    return [*check_step(step), *_check_mismatch([step], log)]


def mismatch_of(step: RecordedStep) -> float | None:
    """The mean of exp|logp_old - logp| on the first update, 1 if engine and trainer agree; None if it is not known."""
    if not (step.has("logp_old") and step.has("logp")):
        return None
    d, where = _difference(step)
    return float(np.exp(np.minimum(np.abs(d[where]), 20.0)).mean()) if where.any() else None


def check_step(step: RecordedStep) -> list[Finding]:
    """The checks that need one step alone, and no engine."""
    checks: list[Callable[[RecordedStep], Iterator[Finding]]] = [
        _check_finite,
        _check_mask,
        _check_prompts_of_groups,
        _check_advantages,
        _check_groups,
        _check_losses,
        _check_clipping,
    ]
    return [finding for check in checks for finding in check(step)]


def _check_events(events: Sequence[Row]) -> Iterator[Finding]:
    """A run that ended over a number that is not finite, before there was a batch to record."""
    for event in events:
        message = str(event.get("message", ""))
        if str(event.get("name")) == "failed" and re.search(r"(?<![\w.])(nan|[-+]?inf)(?![\w.])", message.lower()):
            step = finite_number(event.get("step"))
            yield Finding(
                cause="nan",
                score=0.98,
                stage="reward" if "reward" in message or "judge" in message else "loss",
                step=None if step is None else int(step),
                evidence=f"the run ended before such a batch was recorded: {message}",
            )
            return


# -- One step ------------------------------------------------------------------------------------------------------


def _check_finite(step: RecordedStep) -> Iterator[Finding]:
    """The first column, in the order in which they are computed, that is not finite."""
    failed = step.row("failed", missing=0).astype(bool)
    bad = ~np.isfinite(step.columns["rewards"]) & ~failed
    for row in np.flatnonzero(failed).tolist():
        why = str(step.lines[row].get("failure") or "")
        if "not a finite number" in why:
            yield Finding(
                cause="nan",
                score=0.9,
                stage="reward",
                step=step.step,
                row=row,
                evidence=f"the reward of row {row} is no finite number, and the row is left out: {why}",
            )
            return
    if bad.any():
        row = int(bad.argmax())
        value = step.columns["rewards"][row]
        yield Finding(
            cause="nan",
            score=1.0,
            stage="reward",
            step=step.step,
            row=row,
            evidence=f"the reward of row {row} is {value}, and {int(bad.sum())} rewards are not finite",
        )
        return
    trained = step.row("update", missing=0) >= 0
    of_trained = step.response & step.trainable & trained[:, None]
    for name in ("logp_old", "advantage", "logp_proximal", "logp_ref", "logp", "loss"):
        if not step.has(name) or name in step.data.get("partly_known", ()):
            continue
        if np.isfinite(step.columns[name]).all():
            continue
        where = step.response if name == "logp_old" else of_trained
        values = step.padded(name)
        finite = np.isfinite(values)
        if not (finite & where).any() and name in {"logp_ref", "logp_proximal", "loss", "logp"}:
            # Nothing of it is known: the objective does not need it, or no update was taken. All NaN is told by error.
            errors = [str(update["error"]) for update in step.updates if "error" in update]
            if name != "logp" or not errors or "nan" not in errors[0].lower():
                continue
        bad = where & ~finite
        if bad.any():
            row = int(bad.any(axis=1).argmax())
            token = int(bad[row].argmax())
            yield Finding(
                cause="nan",
                score=1.0,
                stage=name,
                step=step.step,
                row=row,
                token=token,
                evidence=f"{name} of row {row}, token {token} is {values[row, token]}, the first of {int(bad.sum())} "
                f"values that are not finite; everything computed before it is finite",
            )
            return
    for update in step.updates:
        for name in ("loss", "grad_norm"):
            if name in update and not math.isfinite(math.nan if update[name] is None else float(update[name])):
                yield Finding(
                    cause="nan",
                    score=1.0,
                    stage="gradient" if name == "grad_norm" else "loss",
                    step=update.get("step"),
                    evidence=f"{name} is {update[name]}, and every token's values are finite",
                )
                return


def _check_mask(step: RecordedStep) -> Iterator[Finding]:
    """Trainable tokens are those of the responses, from the first to the stop token."""
    trained = step.row("update", missing=0) >= 0
    response, trainable = step.response & trained[:, None], step.trainable & trained[:, None]
    outside = trainable & ~step.response
    if outside.any():
        row = int(outside.any(axis=1).argmax())
        token = int(outside[row].argmax())
        yield Finding(
            cause="mask_off_by_one",
            score=0.97,
            stage="mask",
            step=step.step,
            row=row,
            token=token,
            evidence=f"token {token} of row {row} ({step.piece(int(step.padded('tokens')[row, token]))!r}) is trained "
            f"on and was not sampled, and so are {int(outside.sum())} tokens",
        )
        return
    if padding := step.data.get("trainable_padding"):
        yield Finding(
            cause="mask_off_by_one",
            score=0.97,
            stage="mask",
            step=step.step,
            row=padding["row"],
            token=padding["token"],
            evidence=f"{padding['tokens']} tokens of padding are trained on; the first is token {padding['token']} of "
            f"row {padding['row']}, which has {int(step.columns['lengths'][padding['row']])} tokens",
        )
        return
    selects = _option(step, "selection", "tokens") is not None or bool(_option(step, "selection", "mask_truncated"))
    lost = response & ~trainable
    rows = lost.any(axis=1) & trainable.any(axis=1)
    if rows.any() and not selects:
        first = lost & ~np.concatenate([np.zeros((len(step), 1), bool), step.response[:, :-1]], axis=1)
        last = lost & ~np.concatenate([step.response[:, 1:], np.zeros((len(step), 1), bool)], axis=1)
        at_ends = (first | last).sum() / max(lost.sum(), 1)
        row = int(rows.argmax())
        token = int(lost[row].argmax())
        yield Finding(
            cause="mask_off_by_one",
            score=0.96 if at_ends > 0.5 else 0.5,
            stage="mask",
            step=step.step,
            row=row,
            token=token,
            evidence=f"{int(lost.sum())} sampled tokens are not trained on, {at_ends:.0%} of them the first or last of "
            f"a response; the first is token {token} of row {row}",
        )
        return

    # The mask of the responses itself: prompts of a group are the same tokens, and a response ends with its stop token.
    tokens, groups = step.padded("tokens"), step.columns["groups"]
    starts = np.where(step.response.any(axis=1), step.response.argmax(axis=1), step.columns["lengths"])
    if step.has("turns") and step.columns["turns"].ndim == 1:
        return  # several turns: prompts may differ by design of the environment
    _, first_rows, group_of = np.unique(groups, return_index=True, return_inverse=True)
    number = len(first_rows)

    def groups_with(rows: Array) -> Array:
        return np.bincount(group_of[rows], minlength=number) > 0

    first_of = first_rows[group_of]  # for each row the first of its group
    differing = (tokens != tokens[first_of]) & (np.arange(tokens.shape[1]) < starts[:, None])
    at_last = (starts > 0) & differing[np.arange(len(step)), starts - 1]
    # Only the last token of the "prompt" differs: it was sampled.
    late = groups_with(at_last) & ~groups_with((differing.sum(axis=1) > at_last) | (starts != starts[first_of]))
    if late.any() and not groups_with(differing.sum(axis=1) > at_last).any():
        row = int((at_last & (group_of == late.argmax())).argmax())
        token = int(starts[row]) - 1
        yield Finding(
            cause="mask_off_by_one",
            score=0.95,
            stage="mask",
            step=step.step,
            row=row,
            token=token,
            evidence=f"the prompts of {int(late.sum())} groups differ in their last token alone, which was sampled: "
            f"the mask begins one token late, at row {row} after token {token}",
        )
        return
    if step.has("logp_old"):
        logp_old = step.padded("logp_old")
        first_logp = logp_old[np.arange(len(step)), np.minimum(starts, step.filled.shape[1] - 1)]
        rest = step.response.copy()
        rest[np.arange(len(step)), np.minimum(starts, step.filled.shape[1] - 1)] = False
        first_tokens = tokens[np.arange(len(step)), np.minimum(starts, step.filled.shape[1] - 1)]
        # A sampler whose distribution was cut may leave one token, of the probability 1: then later ones have it too.
        of_template = number > 1 and (first_tokens == first_tokens[0]).all()
        alone = (logp_old[rest] == 0).mean() < 0.05 if rest.any() else False
        all_zero = len(step) >= 4 and bool((first_logp == 0).all())
        if all_zero and (of_template or alone) and (np.abs(logp_old[rest]) > 1e-3).any():
            yield Finding(
                cause="mask_off_by_one",
                score=0.93,
                stage="mask",
                step=step.step,
                row=0,
                token=int(starts[0]),
                evidence=f"the first token of every response has the log-probability 0, as those of prompts do: the "
                f"mask begins one token early, at token {int(starts[0])} of row 0",
            )
            return
    sampling = step.data.get("sampling")
    stops = [*step.data.get("stop_token_ids", [])]
    if stops and isinstance(sampling, Mapping):
        stops += sampling.get("stop_token_ids") or []  # those that the recipe adds
    if stops and step.has("truncated"):
        lengths = step.columns["lengths"]
        failed = step.row("failed", missing=0).astype(bool)
        ends = np.where(step.response.any(axis=1), step.filled.shape[1] - step.response[:, ::-1].argmax(axis=1), 0)
        finished = (ends > 0) & ~step.columns["truncated"].astype(bool) & ~failed
        stopped = finished & np.isin(tokens[np.arange(len(step)), np.maximum(ends - 1, 0)], stops)
        after = np.isin(tokens[np.arange(len(step)), np.minimum(ends, lengths - 1)], stops)
        early = np.flatnonzero(finished & ~stopped & after & (ends < lengths)).tolist()
        if early and len(early) >= 0.5 * finished.sum():
            row = early[0]
            yield Finding(
                cause="mask_off_by_one",
                score=0.96,
                stage="mask",
                step=step.step,
                row=row,
                token=int(ends[row]),
                evidence=f"{len(early)} responses end just before their stop token, which is not trained on; the first "
                f"is token {int(ends[row])} of row {row}",
            )
            return
        # Stop strings end responses too; where there are none, a response that is not truncated has a stop token.
        unstopped = np.flatnonzero(finished & ~stopped)
        if (
            isinstance(sampling, Mapping)
            and not sampling.get("stop")
            and len(unstopped) >= max(4, 0.9 * finished.sum())
        ):
            row = int(unstopped[0])
            yield Finding(
                cause="mask_off_by_one",
                score=0.94,
                stage="mask",
                step=step.step,
                row=row,
                token=int(ends[row]) - 1,
                evidence=f"{len(unstopped)} of {int(finished.sum())} responses that are not truncated do not end with "
                f"a stop token: it was lost, and nothing teaches the policy to stop; the first ends with token "
                f"{int(ends[row]) - 1} of row {row}",
            )


def _check_prompts_of_groups(step: RecordedStep) -> Iterator[Finding]:
    """Rollouts that are compared with one another answer the same prompt."""
    if step.data.get("given_rows") or (step.has("turns") and step.columns["turns"].ndim == 1) or len(step) < 2:
        return
    tokens, groups = step.padded("tokens"), step.columns["groups"]
    starts = np.where(step.response.any(axis=1), step.response.argmax(axis=1), step.columns["lengths"])
    _, first_rows, group_of = np.unique(groups, return_index=True, return_inverse=True)
    first_of = first_rows[group_of]
    sources = [shared["source"] for shared in step.shared]
    shared_start = np.minimum(starts, starts[first_of])
    differs = ((tokens != tokens[first_of]) & (np.arange(tokens.shape[1]) < shared_start[:, None] - 1)).any(axis=1)
    # The same row of the data, written in other tokens, is another cause.
    differs &= np.array([
        one is None or one != sources[other] for one, other in zip(sources, first_of.tolist(), strict=True)
    ])  # fmt: skip
    if differs.any():
        row = int(differs.argmax())
        token = int((tokens[row] != tokens[first_of[row]]).argmax())
        yield Finding(
            cause="wrong_groups",
            score=0.96,
            stage="advantage",
            step=step.step,
            row=row,
            token=token,
            evidence=f"{int(differs.sum())} rollouts are in a group with those of another prompt; the first is row "
            f"{row}, in the group of row {int(first_of[row])}, whose prompt differs from token {token} on",
        )


def _check_advantages(step: RecordedStep) -> Iterator[Finding]:
    """Group advantages again from the recorded rewards, where the objective is one of the plain ones."""
    failed = step.row("failed", missing=0).astype(bool)
    rewards = step.columns["rewards"]
    if step.has("token_rewards"):
        earned = np.nansum(step.padded("token_rewards"), axis=1)
        wrong = ~np.isclose(earned, rewards, rtol=1e-6, atol=1e-9) & ~failed & np.isfinite(rewards)
        if wrong.any():
            row = int(wrong.argmax())
            yield Finding(
                cause="reward_mismatch",
                score=0.95,
                stage="reward",
                step=step.step,
                row=row,
                evidence=f"the rewards of the tokens of row {row} add up to {earned[row]:.6g}, and its reward is "
                f"{rewards[row]:.6g}; {int(wrong.sum())} rows differ",
            )
            return
    if not step.has("advantage") or not np.isfinite(rewards[~failed]).all():
        return
    try:
        expected_tokens = plain_advantages(step)
    except NotReplayable:
        return
    advantage = step.padded("advantage")
    known = np.isfinite(advantage)
    near = np.abs(advantage - expected_tokens) <= 1e-4 + 1e-3 * np.abs(expected_tokens)
    wrong = (known & ~near).any(axis=1)
    if wrong.any():
        row = int(wrong.argmax())
        token = int(known[row].argmax())
        yield Finding(
            cause="advantage_mismatch",
            score=0.95,
            stage="advantage",
            step=step.step,
            row=row,
            token=token,
            evidence=f"row {row} has the advantage {advantage[row, token]:.4g}, and its group's rewards give "
            f"{expected_tokens[row, token]:.4g}; {int(wrong.sum())} of {int(known.any(axis=1).sum())} rows differ",
        )


def _check_groups(step: RecordedStep) -> Iterator[Finding]:
    """Whether one group makes most of the gradient."""
    if not step.has("advantage"):
        return
    size = np.abs(np.nan_to_num(step.padded("advantage"))).sum(axis=1)
    groups = step.columns["groups"]
    names, index = np.unique(groups, return_inverse=True)
    totals = np.bincount(index, weights=size)
    active = int((totals > 0).sum())
    if active >= LIMITS["group_count"] and totals.max() > LIMITS["group_share"] * totals.sum():
        group = int(names[totals.argmax()])
        row = int((np.where(groups == group, size, -1)).argmax())
        yield Finding(
            cause="group_dominates",
            score=0.62,
            stage="advantage",
            step=step.step,
            row=row,
            token=int(step.response[row].argmax()),
            evidence=f"group {group} has {totals.max() / totals.sum():.0%} of the sum of |advantage| over tokens of "
            f"{active} groups; its largest is row {row}, {np.nanmax(np.abs(step.padded('advantage')[row])):.4g}",
        )


def _check_losses(step: RecordedStep) -> Iterator[Finding]:
    """The losses of the first update again from its log-probabilities and advantages, where the objective is plain."""
    if not step.has("loss") or step.data.get("trainable_padding"):
        return
    try:
        expected = plain_losses(step)
    except NotReplayable:
        return
    loss = step.padded("loss")
    known = np.isfinite(loss) & np.isfinite(expected)
    if known.sum() < LIMITS["few_tokens"]:
        return
    scale = np.abs(expected[known]).max()
    wrong = known & (np.abs(loss - expected) > 0.02 * np.abs(expected) + 1e-3 * scale)
    if scale and wrong.sum() > 0.02 * known.sum():
        row = int(wrong.any(axis=1).argmax())
        token = int(wrong[row].argmax())
        _, r2 = _fit(expected[known], loss[known])
        times = float(expected[known] @ loss[known] / (expected[known] @ expected[known]))
        same = f"; all are {times:.3g} times what they should be" if r2 > 0.99 else ""
        yield Finding(
            cause="loss_mismatch",
            score=0.92,
            stage="loss",
            step=step.step,
            row=row,
            token=token,
            evidence=f"the loss of row {row}, token {token} is {loss[row, token]:.4g}, and the objective gives "
            f"{expected[row, token]:.4g}; {int(wrong.sum())} of {int(known.sum())} tokens differ{same}",
        )


def _check_clipping(step: RecordedStep) -> Iterator[Finding]:
    """Whether the clip stops most tokens."""
    clipped, trainable = step.flag(CLIPPED), step.trainable
    for number, update in enumerate(step.updates):
        rows = step.row("update", missing=0) == number
        of_update = trainable & rows[:, None]
        if of_update.sum() < LIMITS["tokens"]:
            continue
        share = (clipped & of_update).sum() / of_update.sum()
        # A ratio of whole responses is held within a far narrower range, as the papers do: half of them are clipped.
        of_tokens = (_option(step, "ratio", "level") or "token") == "token"
        if share > LIMITS["clip_fraction" if of_tokens else "clip_fraction/sequences"]:
            where = clipped & of_update
            row = int(where.any(axis=1).argmax())
            yield Finding(
                cause="clipping_saturated",
                score=0.6,
                stage="loss",
                step=update.get("step", step.step),
                row=row,
                token=int(where[row].argmax()),
                evidence=f"the clip stops {share:.0%} of the tokens of update {number}: most of the batch has no "
                f"gradient",
            )
            return


# -- Engine and trainer --------------------------------------------------------------------------------------------


def _check_mismatch(steps: Sequence[RecordedStep], log: Sequence[Row]) -> Iterator[Finding]:
    """What the difference of the engine's and the trainer's log-probabilities looks like, and since when."""
    errors = (finite_number(row.get("token_mult_prob_error")) for row in log)
    start = next((error for error in errors if error is not None), None)
    for step in steps:
        if not (step.has("logp_old") and step.has("logp")):
            continue
        d, where = _difference(step)
        size = np.abs(d[where])
        low = step.data.get("precision") == "bfloat16"
        # Two programs of transformers on one CPU: there is neither TF32 nor another order of sums that adds up.
        alike = step.data.get("device") == "cpu" and step.data.get("engine") == "transformers"
        kind = "bfloat16" if low else "float32 on a CPU" if alike else "float32"
        limit = LIMITS[f"mismatch/{kind}"]
        few = len(size) < LIMITS["tokens"]
        if few and (len(size) < LIMITS["few_tokens"] or np.median(size) < 10 * limit or size.mean() < 0.1):
            continue
        quantised = None if low else _quantised(step, where)
        far = int((size > 10 * limit).sum())  # a mean hides a few tokens that are far off
        if size.mean() <= limit and far < max(2, 0.002 * len(size)) and (quantised is None or size.mean() <= 1e-5):
            continue
        wrong = where & (np.abs(d) > min(limit, size.max() / 2))
        row = int(wrong.any(axis=1).argmax())
        token = int(wrong[row].argmax())
        # token_mult_prob_error is the mean of exp|d|: it agreed at first if it was a small part of what it is now.
        agreed = None if start is None else start - 1 <= max(0.25 * float(size.mean()), limit / 2 if low else 0.0)
        yield _cause_of_mismatch(
            step, d, where, limit=limit, start=start, agreed_at_start=agreed, quantised=quantised, place=(row, token)
        )
        return


MISMATCHES = {
    "logp_off_by_one", "swapped_rows", "retokenised_turn", "template_drift", "temperature", "truncated_sampling",
    "stale_weights", "precision", "router_drift", "logp_mismatch",
}  # fmt: skip
"""The causes that `_check_mismatch` names."""


def _check_logged_mismatch(log: Sequence[Row], findings: Sequence[Finding]) -> Iterator[Finding]:
    """Engine and trainer that differed in a step that is not recorded any more, or in too few tokens to say how."""
    if any(each.cause in MISMATCHES or each.stage == "mask" for each in findings):
        return
    for row in log:
        error = finite_number(row.get("token_mult_prob_error"))
        if finite_number(row.get("staleness")):
            continue  # rollouts of older weights differ by right
        if error is not None and error > LIMITS["logged_error"]:
            yield Finding(
                cause="logp_mismatch",
                score=0.7,
                stage="logp_old",
                step=int(float(str(row["step"]))),
                row=0,
                evidence=f"token_mult_prob_error is {error:.4g} at this step, and no recorded step has the tokens "
                f"to say why",
            )
            return


def _difference(step: RecordedStep) -> tuple[Array, Array]:
    """logp_old - logp [B, T], and where it says whether engine and trainer agree: on each batch's first update."""
    rows = step.row("update", missing=0) == 0
    where = step.response & step.trainable & rows[:, None]
    if step.has("versions") and step.version is not None:
        where &= step.padded("versions") == step.version  # asynchronous rollouts differ by right
    logp_old, logp = step.padded("logp_old").astype(np.float64), step.padded("logp").astype(np.float64)
    where &= np.isfinite(logp_old) & np.isfinite(logp)
    return np.where(where, logp_old - logp, 0.0), where


def _quantised(step: RecordedStep, where: Array) -> str | None:
    """The side whose log-probabilities all are numbers of bfloat16, as an output layer in bfloat16 gives them."""
    for name, side in (("logp_old", "engine"), ("logp", "trainer")):
        values = step.padded(name)[where].astype(np.float32)
        values = values[values != 0]
        if len(values) >= LIMITS["tokens"] and not (values.view(np.uint32) & 0xFFFF).any():
            return side
    return None


def _cause_of_mismatch(
    step: RecordedStep,
    d: Array,
    where: Array,
    *,
    limit: float,
    start: float | None,
    agreed_at_start: bool | None,
    quantised: str | None,
    place: tuple[int, int],
) -> Finding:
    row, token = place
    logp_old, logp = step.padded("logp_old").astype(np.float64), step.padded("logp").astype(np.float64)
    size, flat = np.abs(d[where]), d[where]
    found: dict[str, Any] = {"step": step.step, "row": row, "token": token, "stage": "logp_old"}
    told = f"|logp_old - logp| is {size.mean():.3g} on average and {size.max():.3g} at most"

    # Off by one: the differences vanish when one side is moved by a token.
    for shift, side in ((1, "late"), (-1, "early")):
        moved = np.roll(logp_old, -shift, axis=1)
        both = where & np.roll(where, -shift, axis=1)
        if both.sum() >= LIMITS["tokens"] / 2 and np.abs((moved - logp)[both]).mean() < 0.1 * size.mean():
            left = np.abs((moved - logp)[both]).mean()
            evidence = f"{told}; logp_old is one token too {side}: moved back, {left:.3g} is left"
            return Finding(cause="logp_off_by_one", score=0.95, evidence=evidence, **found)

    # Exchanged rows: what is wrong in one row is right in another.
    by_row = np.array([np.abs(d[r][where[r]]).mean() if where[r].any() else 0.0 for r in range(len(step))])
    wrong_rows = np.flatnonzero(by_row > limit)
    matched, comparable = _rows_exchanged(step, wrong_rows, by_row)
    if matched >= 2 and matched >= 0.5 * comparable:
        evidence = (
            f"{told} in {len(wrong_rows)} rows; {matched} of the {comparable} that can be compared have the "
            f"log-probabilities of another row"
        )
        return Finding(cause="swapped_rows", score=0.95, evidence=evidence, **found)

    # Later turns alone.
    if step.has("turns"):
        turns = step.padded("turns")
        first, later = where & (turns == 0), where & (turns > 0)
        if first.any() and later.any() and np.abs(d[first]).mean() <= limit < np.abs(d[later]).mean():
            wrong = later & (np.abs(d) > limit)
            found["row"] = int(wrong.any(axis=1).argmax())
            found["token"] = int(wrong[found["row"]].argmax())
            evidence = (
                f"first turns agree ({np.abs(d[first]).mean():.2g}), and later ones do not "
                f"({np.abs(d[later]).mean():.3g}): engine and trainer read other tokens before them"
            )
            return Finding(cause="retokenised_turn", score=0.92, **(found | {"stage": "tokens"}), evidence=evidence)

    # Temperature and cuts. After one and the same prefix the sum that normalises is the same for every token, so that
    # between such tokens a temperature only scales, and top-p changes nothing: both hold exactly.
    alike = _after_equal_prefixes(step, where)
    if alike is None:  # few rows: later updates have moved the policy, by little where they are the first of a run
        of_all = step.response & step.trainable & np.isfinite(logp_old) & np.isfinite(logp)
        alike = _after_equal_prefixes(step, of_all)
    above, below = float((flat > limit).mean()), float((flat < -limit).mean())
    one_sided = above > 0.05 and below < 0.01 * max(above, 0.1)
    if alike is not None and alike.r2 > LIMITS["exact_r2"] and abs(alike.slope) > 0.02:
        times = 1 + alike.slope
        evidence = (
            f"{told}; between the {alike.tokens} tokens that follow equal prefixes, {alike.r2:.1%} of the variance of "
            f"the difference is proportional to logp: logp_old is {times:.2f} logp, as if the engine's temperature "
            f"were {1 / times if times else math.inf:.2f} of the trainer's"
        )
        return Finding(cause="temperature", score=0.9, evidence=evidence, **found)
    cuts = one_sided and alike is not None and alike.left < 0.01
    if not cuts and len(flat) >= LIMITS["tokens"]:
        # Without tokens after equal prefixes: differences grow with how unlikely a token is.
        slope, r2 = _fit(logp[where], flat)
        slope_old, r2_old = _fit(logp_old[where], flat)
        if max(r2, r2_old) > (0.95 if one_sided else LIMITS["temperature_r2"]):
            times = 1 + slope if r2 >= r2_old else 1 / (1 - slope_old)
            evidence = (
                f"{told}, and {max(r2, r2_old):.0%} of its variance is proportional to logp: logp_old is about "
                f"{times:.2f} logp, as if the engine's temperature were {1 / times:.2f} of the trainer's"
            )
            return Finding(cause="temperature", score=0.88, evidence=evidence, **found)

    # A cut distribution: the engine's log-probabilities are never below the trainer's.
    if one_sided:
        evidence = f"{told}; the engine's is higher for {above:.0%} of the tokens and lower for {below:.1%}"
        if cuts and alike is not None:
            evidence += f", by the same for all of the {alike.tokens} tokens that follow equal prefixes"
        return Finding(cause="truncated_sampling", score=0.9, evidence=evidence, **found)

    if quantised is not None and size.mean() < 0.5:
        evidence = f"{told}, and every log-probability of the {quantised} is a number of bfloat16"
        return Finding(cause="precision", score=0.9, evidence=evidence, **found)

    # A few rows alone: some engines, or some prompts.
    share_of_rows = len(wrong_rows) / max(1, int(where.any(axis=1).sum()))
    exact = float((size <= limit).mean())
    if step.data.get("mixture") and exact > 0.5 and (share_of_rows > 0.3 or exact > 0.9):  # old weights change all
        evidence = (
            f"{told}; {exact:.0%} of the tokens agree and the others are scattered over {share_of_rows:.0%} of rows"
        )
        return Finding(cause="router_drift", score=0.8, evidence=evidence, **found)
    unknown_start = start is None and bool(step.version) and size.mean() > LIMITS["precision_most"]
    if agreed_at_start or unknown_start:
        evidence = told
        if agreed_at_start:
            evidence += f", and at the first step of the run they agreed (token_mult_prob_error {start:.6f})"
        if share_of_rows < 0.9:
            evidence += f"; {share_of_rows:.0%} of the rows are affected"
        return Finding(cause="stale_weights", score=0.8, evidence=evidence, **found)
    # What noise does to logits is alike for all tokens; another prompt changes some a lot and most a little. The
    # log-probability of a token moves by 1 - p of its logit's part.
    doubtful = where & (logp < -0.05)
    moved = np.abs(d[doubtful]) / -np.expm1(logp[doubtful])
    shape = float(np.sqrt((moved**2).mean()) / max(np.median(moved), 1e-12)) if moved.size else 0.0
    is_noise = shape < LIMITS["noise_shape"] or size.mean() <= LIMITS["precision_least"]
    if size.mean() <= LIMITS["precision_most"] and exact < 0.99 and is_noise:
        bias = abs(flat.mean()) / size.mean()
        evidence = f"{told}, in both directions (bias {bias:.0%}) and from the first step on"
        return Finding(cause="precision", score=0.7, evidence=evidence, **found)
    if start is not None:
        evidence = (
            f"{told}, from the first step of the run on (token_mult_prob_error {start:.4f}), for every kind of token"
        )
        return Finding(cause="template_drift", score=0.65, **(found | {"stage": "prompt"}), evidence=evidence)
    return Finding(cause="logp_mismatch", score=0.55, evidence=told, **found)


@dataclass(frozen=True, slots=True)
class _Alike:
    """How differences between engine and trainer vary among tokens that follow one and the same prefix."""

    tokens: int
    """How many tokens that is."""

    slope: float
    """By how much the difference grows per nat of logp."""

    r2: float
    """The share of its variance that this explains."""

    left: float
    """Its variance, as a share of the mean square of all differences."""


def _after_equal_prefixes(step: RecordedStep, where: Array) -> _Alike | None:
    """Compare the rollouts of a prompt where they part; None if fewer than `LIMITS["alike"]` tokens can be compared."""
    logp = step.padded("logp").astype(np.float64)
    d = step.padded("logp_old").astype(np.float64) - logp
    tokens, prefix = step.padded("tokens"), np.zeros(len(step), dtype=np.int64)
    contexts: list[Array] = []
    for place in range(tokens.shape[1]):
        rows = np.flatnonzero(where[:, place])
        _, of_row, counts = np.unique(prefix[rows], return_inverse=True, return_counts=True)
        for each in np.flatnonzero(counts > 1).tolist():
            alike = rows[of_row == each]
            _, first = np.unique(tokens[alike, place], return_index=True)  # equal tokens say nothing new
            if len(first) > 1:
                rows_of = alike[first]
                contexts.append(np.stack([d[rows_of, place], logp[rows_of, place]]))
        _, prefix = np.unique(prefix * (tokens.max() + 2) + tokens[:, place] + 1, return_inverse=True)
        if len(contexts) >= LIMITS["alike_most"]:
            break
    found = sum(context.shape[1] for context in contexts)
    if found - len(contexts) < LIMITS["alike"]:
        return None
    x = np.concatenate([context[1] - context[1].mean() for context in contexts])
    y = np.concatenate([context[0] - context[0].mean() for context in contexts])
    if not (x @ x) or not (y @ y):
        return _Alike(found, 0.0, 0.0, 0.0)
    every = np.concatenate([context[0] for context in contexts])
    return _Alike(
        found, float((x @ y) / (x @ x)), float((x @ y) ** 2 / ((x @ x) * (y @ y))), float((y @ y) / (every @ every))
    )


def _rows_exchanged(step: RecordedStep, wrong: Array, by_row: Array) -> tuple[int, int]:
    """How many of the first wrong rows have the engine's log-probabilities of another row, and how many could.

    A row of other tokens may lie at the same places, or begin where this row's response does.
    """
    known = step.response & np.isfinite(step.padded("logp"))
    logp_old, logp = step.padded("logp_old").astype(np.float64), step.padded("logp").astype(np.float64)
    starts = np.where(step.response.any(axis=1), step.response.argmax(axis=1), 0)
    width = step.response.shape[1]
    matched = comparable = 0
    for row in wrong[:64].tolist():
        best, compared = math.inf, False
        moves: Array = np.unique(np.append(starts - starts[row], 0))
        for move in moves.tolist():
            # Place t of this row is held against place t + move of the others.
            here = np.arange(max(0, -move), min(width, width - move))
            both = step.response[row, here] & known[:, here + move]
            count = both.sum(axis=1)
            usable = (count >= 3) & (np.arange(len(step)) != row) & ((starts - starts[row] == move) | (move == 0))
            if usable.any():
                gaps = np.where(both, np.abs(logp_old[row, here] - logp[:, here + move]), 0.0).sum(axis=1)
                compared, best = True, min(best, float((gaps[usable] / count[usable]).min()))
        comparable += compared
        matched += best < 0.1 * by_row[row]
    return matched, comparable


def _fit(x: Array, y: Array) -> tuple[float, float]:
    """Slope and share of variance of a least-squares line of `y` over `x`."""
    x, y = x - x.mean(), y - y.mean()
    if not (x @ x) or not (y @ y):
        return 0.0, 0.0
    slope = (x @ y) / (x @ x)
    return float(slope), float((x @ y) ** 2 / ((x @ x) * (y @ y)))


# -- Several steps -------------------------------------------------------------------------------------------------


def _check_prompts(steps: Sequence[RecordedStep], samples: Sequence[Row]) -> Iterator[Finding]:
    """The same data row is the same tokens in every step, and a BOS stands there once."""
    del samples
    seen: dict[str, tuple[int, ...]] = {}
    for step in steps:
        tokens = step.padded("tokens")
        bos = step.data.get("special_token_ids", {}).get("bos")
        starts = step.response.argmax(axis=1)
        for row, shared in enumerate(step.shared):
            if not step.response[row].any():
                continue
            prompt = tuple(tokens[row, : starts[row]].tolist())
            if bos is not None and len(prompt) > 1 and prompt[0] == prompt[1] == bos:
                yield Finding(
                    cause="template_drift",
                    score=0.93,
                    stage="prompt",
                    step=step.step,
                    row=row,
                    token=1,
                    evidence=f"row {row} begins with the BOS token {bos} twice: the template writes one, and the "
                    f"tokenizer adds another",
                )
                return
            source = shared["source"]
            if source is None or (step.has("turns") and step.columns["turns"].ndim == 1):
                continue
            before = seen.setdefault(source, prompt)
            if before != prompt:
                token = next(
                    (i for i, pair in enumerate(zip(before, prompt, strict=False)) if pair[0] != pair[1]),
                    min(len(before), len(prompt)),
                )
                if token >= min(len(before), len(prompt)) - 1 and abs(len(before) - len(prompt)) <= 1:
                    continue  # one more or less at the end is the mask's affair
                yield Finding(
                    cause="template_drift",
                    score=0.9,
                    stage="prompt",
                    step=step.step,
                    row=row,
                    token=token,
                    evidence=f"{source} is {len(prompt)} tokens in row {row} and {len(before)} before; they differ "
                    f"from token {token} on ({step.piece(prompt[token]) if token < len(prompt) else 'the end'!r})",
                )
                return


def _check_rewards_over_time(steps: Sequence[RecordedStep], samples: Sequence[Row]) -> Iterator[Finding]:
    """Whether equal responses get equal rewards, and what else the reward goes with."""
    del samples
    given: dict[tuple[object, str], tuple[float, int, int]] = {}
    changed: list[tuple[int, int, float, float, int]] = []
    compared = 0
    for step in steps:
        several_turns = step.has("turns") and step.columns["turns"].ndim == 1
        failed = step.row("failed", missing=0).astype(bool)
        for row, shared in enumerate(step.shared):
            if several_turns or failed[row] or step.lines[row].get("response") is None:
                continue
            reward = float(step.columns["rewards"][row])
            key = (shared["source"] or shared["prompt"], str(step.lines[row]["response"]))
            if key[0] is None or not math.isfinite(reward):
                continue
            before = given.setdefault(key, (reward, step.step, row))
            if before[1:] != (step.step, row):
                compared += 1
                if abs(before[0] - reward) > 1e-6 * max(1.0, abs(reward)):
                    changed.append((step.step, row, before[0], reward, before[1]))
    if len(changed) >= 3 and len(changed) > 0.02 * compared:
        at, row, before_reward, now, earlier = changed[0]
        over_time = [each for each in changed if each[4] != each[0]]
        ups = sum(each[3] > each[2] for each in over_time)
        drifts = (
            len(over_time) == len(changed)
            and len(over_time) >= 3
            and max(ups, len(over_time) - ups) >= 0.9 * len(over_time)
        )
        yield Finding(
            cause="reward_drift" if drifts else "reward_inconsistent",
            score=0.85,
            stage="reward",
            step=at,
            row=row,
            evidence=f"{len(changed)} of {compared} repeated responses got another reward; row {row} of step "
            f"{at} got {now:.4g}, and the same response got {before_reward:.4g} at step {earlier}",
        )


def _is_gold(response: object, expected: object) -> bool:
    return bool(expected) and str(response).strip() == str(expected).strip()


def _check_rewards_of_gold_answers(steps: Sequence[RecordedStep], samples: Sequence[Row]) -> Iterator[Finding]:
    """Whether responses that are the gold answer get the same reward all the time, whichever row they answer."""
    given: list[tuple[RecordedStep | None, dict[int, float]]] = []
    before = [each for each in samples if each.get("when") == "before" and each.get("expected")]
    stage = steps[0].stage if steps else None
    of_samples = {
        number: reward
        for number, each in enumerate(before)
        if each.get("stage") == stage
        and _is_gold(each.get("response"), each["expected"])
        and (reward := finite_number(each.get("reward"))) is not None
    }
    given.append((None, of_samples))
    for step in steps:
        if step.data.get("given_rows") or (step.has("turns") and step.columns["turns"].ndim == 1):
            continue
        rewards, failed = step.columns["rewards"], step.row("failed", missing=0).astype(bool)
        found = {
            row: float(rewards[row])
            for row, shared in enumerate(step.shared)
            if _is_gold(step.lines[row].get("response"), shared["expected"])
            and math.isfinite(rewards[row])
            and not failed[row]
        }
        given.append((step, found))
    if len(of_samples) < 3:  # few are enough against many that agree: none of these got what a few got before
        recorded = {reward for at, found in given if at is not None for reward in found.values()}
        given = given[1:] if recorded & {*of_samples.values()} else given
    last: tuple[str, float, int] | None = None
    for at, found in given:
        if at is not None and not np.ptp(at.columns["rewards"]):
            continue  # a reward that is constant is another cause
        values = np.array([*found.values()])
        if len(values) < (3 if at is not None else 1):
            continue
        middle = float(np.median(values))
        usual = np.isclose(values, middle, rtol=1e-6, atol=1e-9)
        if usual.mean() < 0.9:  # it depends on more than the answer
            return
        where = "before the first step" if at is None else f"in step {at.step}"
        if last is not None and at is not None and abs(middle - last[1]) > 1e-6 * max(1.0, abs(middle)):
            row = next(row for row, reward in found.items() if math.isclose(reward, middle, rel_tol=1e-6))
            yield Finding(
                cause="reward_drift",
                score=0.84,
                stage="reward",
                step=at.step,
                row=row,
                evidence=f"the gold answer got {last[1]:.4g} {last[0]} (in {last[2]} responses) and {middle:.4g} "
                f"{where} ({int(usual.sum())} responses): the same answers are judged otherwise",
            )
            return
        last = (where, middle, len(values))


def _check_best_rewards(steps: Sequence[RecordedStep], samples: Sequence[Row]) -> Iterator[Finding]:
    """Whether what gets the highest rewards has the gold answer in it, where some responses are the gold answer."""
    given = [(step, row) for step in steps for row, shared in enumerate(step.shared) if shared["expected"]]
    given = [(step, row) for step, row in given if step.lines[row].get("response") is not None]
    if not given or any(step.has("turns") and step.columns["turns"].ndim == 1 for step in steps):
        return
    rewards = np.array([step.columns["rewards"][row] for step, row in given])
    best = np.isfinite(rewards) & (rewards >= 0.9 * np.nanmax(rewards)) & (rewards > 0)
    texts = [(str(step.lines[row]["response"]), str(step.shared[row]["expected"]).strip()) for step, row in given]
    answered = np.array([expected in response for response, expected in texts])
    as_gold = sum(_is_gold(*text) for text in texts)
    as_gold += sum(_is_gold(each.get("response"), each.get("expected")) for each in samples)
    if as_gold and best.sum() >= LIMITS["tokens"] and answered[best].mean() < LIMITS["gold_share"]:
        step, row = given[int((best & ~answered).argmax())]
        yield Finding(
            cause="reward_hacked_format",
            score=0.68,  # below that of length and repetition, which say what is rewarded instead
            stage="reward",
            step=step.step,
            row=row,
            evidence=f"{int(best.sum())} responses got the highest rewards, {rewards[best].min():.3g} or more, and "
            f"{int(answered[best].sum())} of them have the gold answer in them; the first without it is "
            f"{str(step.lines[row]['response'])!r:.60}, and the gold answer is {step.shared[row]['expected']!r:.60}",
        )


def _check_reference(steps: Sequence[RecordedStep], log: Sequence[Row]) -> Iterator[Finding]:
    """The reference is the policy as the stage began: like it in the first batch, and unlike it later."""
    moved = {
        int(float(str(row["step"])))
        for row in log
        if finite_number(row.get("grad_norm")) and finite_number(row.get("learning_rate")) != 0
    }
    for step in steps:
        if not (step.has("logp_ref") and step.has("logp")) or not step.updates:
            continue
        where = step.response & step.trainable & (step.row("update", missing=0) == 0)[:, None]
        gap = np.abs(step.padded("logp_ref").astype(np.float64) - step.padded("logp"))
        where &= np.isfinite(gap)
        if where.sum() < LIMITS["few_tokens"]:
            continue
        taken = step.step - len(step.updates)  # before this batch, in this stage
        low = step.data.get("precision") == "bfloat16"
        limit = LIMITS["mismatch/bfloat16" if low else "mismatch/float32"]
        row = int((where & (gap > limit)).any(axis=1).argmax()) if taken == 0 else int(where.any(axis=1).argmax())
        found: dict[str, Any] = {"cause": "wrong_reference", "stage": "logp_ref", "step": step.step, "row": row}
        if taken == 0 and gap[where].mean() > limit:
            yield Finding(
                score=0.86,
                token=int((where & (gap > limit))[row].argmax()),
                evidence=f"before the first update of the stage the reference's log-probabilities are "
                f"{gap[where].mean():.3g} from the policy's on average: it is another model than the one that the "
                f"stage began with",
                **found,
            )
            return
        later = np.abs(_later_gaps(step))
        by_updates = float(later.mean()) if len(later) else 0.0
        steps_before = sum(at <= taken for at in moved)
        same = gap[where].max() < 1e-9 or gap[where].mean() < 1e-3 * by_updates
        if taken > 0 and steps_before and same and (by_updates > 1e-5 or steps_before > 1):
            yield Finding(
                score=0.86,
                token=int(where[row].argmax()),
                evidence=f"after {taken} optimizer steps the reference's log-probabilities are still the policy's "
                f"(largest difference {gap[where].max():.2g}): it is the model that is trained, and no copy",
                **found,
            )
            return


def _reward_goes_with(steps: Sequence[RecordedStep], log: Sequence[Row]) -> Iterator[Finding]:
    """Correlations of the reward within groups, with length and with repetition, and the rewards of gold answers.

    Length is right for many tasks; it is reported only where it also grows over the run. Repetition is reported where
    it makes most of the reward, and where it makes much of it and grows.
    """
    reward, right, best, by_length, by_repetition, repeated_in, place = _within_groups(steps)
    if (
        len(right) >= 5
        and len(best) >= 5
        and np.mean(right) < np.quantile(best, 0.75)
        and np.mean(right) < np.mean(best)
    ):
        at, row = place or (steps[0].step, 0)
        yield Finding(
            cause="reward_hacked_format",
            score=0.72,
            stage="reward",
            step=at,
            row=row,
            evidence=f"{len(right)} responses that are the gold answer got {np.mean(right):.3g} on average, and "
            f"the {len(best)} others {np.mean(best):.3g}",
        )
    if len(reward) < LIMITS["tokens"] or place is None:
        return
    lengths, truncated = (
        [value for row in log if (value := finite_number(row.get(name))) is not None]
        for name in ("response_tokens", "truncated")
    )
    both = [(finite_number(row.get("reward")), finite_number(row.get("response_tokens"))) for row in log]
    curves = np.array([each for each in both if None not in each], dtype=float).reshape(-1, 2).T
    if len(lengths) < 6:
        lengths = [float(step.response.sum() / max(1, len(step))) for step in steps]
    shortest, longest = _first_and_last_third(lengths)
    growth = longest / max(1.0, shortest)
    cut_off = _first_and_last_third(truncated) if len(truncated) >= 6 else (0.0, 0.0)
    longer = growth >= LIMITS["length_growth"] or cut_off[1] - cut_off[0] >= LIMITS["truncated_growth"]
    # The mean reward of a step goes with its mean length too, whatever else is rewarded.
    of_steps = _correlation(*np.diff(curves)) if curves.shape[1] >= 8 else 0.0
    follows = of_steps > LIMITS["correlation_of_steps"] and by_length > LIMITS["correlation_of_growth"]
    little, much = _first_and_last_third(repeated_in)
    more_repeated = much - little >= LIMITS["repetition_growth"]
    least = LIMITS["correlation_of_growth" if more_repeated else "correlation"]
    if by_repetition > least and (by_repetition >= by_length or (more_repeated and not longer)):
        yield Finding(
            cause="reward_hacked_repetition",
            score=0.7,
            stage="reward",
            step=place[0],
            row=place[1],
            evidence=f"within groups the reward goes with the share of repeated tokens (correlation "
            f"{by_repetition:.2f} over {len(reward)} rollouts), which goes from {little:.2f} to {much:.2f}",
        )
    elif (by_length > LIMITS["correlation"] and longer) or follows:
        yield Finding(
            cause="reward_hacked_length",
            score=0.73,  # above that of the form: a short gold answer gets less because it is short
            stage="reward",
            step=place[0],
            row=place[1],
            evidence=f"within groups the reward goes with the length (correlation {by_length:.2f} over "
            f"{len(reward)} rollouts), and responses are {growth:.2f} times as long as at first, "
            f"{cut_off[0]:.0%} to {cut_off[1]:.0%} of them truncated",
        )


def _within_groups(
    steps: Sequence[RecordedStep],
) -> tuple[list[float], list[float], list[float], float, float, list[float], tuple[int, int] | None]:
    """Rewards less their group's mean, those of gold answers and of others, what they go with, and where they differ.

    What they go with: the correlations with length and with repetition, and how much each step repeats.
    """
    reward, length, characters, repeated = [], [], [], []
    repeated_in: list[float] = []  # of each step, over all rows
    right: list[float] = []
    best: list[float] = []
    place: tuple[int, int] | None = None
    for step in steps:
        tokens, response, groups = step.padded("tokens"), step.response, step.columns["groups"]
        rewards = step.columns["rewards"]
        # What a reward function reads is text: special tokens are no part of it.
        text = response & ~np.isin(tokens, [*step.data.get("special_token_ids", {}).values()])
        shares = np.array([_repetition(row[where]) for row, where in zip(tokens, text, strict=True)])
        repeated_in.append(float(shares.mean()))
        for group in np.unique(groups):
            rows = np.flatnonzero((groups == group) & np.isfinite(rewards))
            if len(rows) < 2 or not np.ptp(rewards[rows]):
                continue
            counts = text[rows].sum(axis=1)
            written = np.array([len(str(step.lines[row].get("response") or "")) for row in rows.tolist()])
            same = shares[rows]
            reward += (rewards[rows] - rewards[rows].mean()).tolist()
            length += (counts - counts.mean()).tolist()
            characters += (written - written.mean()).tolist()
            repeated += (same - same.mean()).tolist()
            place = place or (step.step, int(rows[rewards[rows].argmax()]))
        for row, shared in enumerate(step.shared):
            expected = shared["expected"]
            if expected and step.lines[row].get("response") is not None and math.isfinite(rewards[row]):
                if _is_gold(step.lines[row]["response"], expected):
                    right.append(float(rewards[row]))
                else:
                    best.append(float(rewards[row]))
    by_length = max(_correlation(reward, length), _correlation(reward, characters)) if len(reward) > 1 else 0.0
    by_repetition = _correlation(reward, repeated) if len(reward) > 1 else 0.0
    return reward, right, best, by_length, by_repetition, repeated_in, place


def _first_and_last_third(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the last third."""
    third = max(1, len(values) // 3)
    return float(np.mean(values[:third])), float(np.mean(values[-third:]))


def _repetition(tokens: Array) -> float:
    """The share of a response's tokens that stood there before."""
    return 1 - len(np.unique(tokens)) / len(tokens) if len(tokens) else 0.0


def _correlation(one: Sequence[float] | Array, two: Sequence[float] | Array) -> float:
    slope, r2 = _fit(np.array(one), np.array(two))
    return math.copysign(math.sqrt(r2), slope)


def _check_data(steps: Sequence[RecordedStep], samples: Sequence[Row]) -> Iterator[Finding]:
    """Prompts that stand twice in the data, or among those that are held out."""
    sources: dict[str, set[str]] = defaultdict(set)
    places: dict[str, tuple[int, int]] = {}
    for step in steps:
        for row, shared in enumerate(step.shared):
            if shared["prompt"] and shared["source"]:
                sources[shared["prompt"]].add(shared["source"])
                places.setdefault(shared["prompt"], (step.step, row))
    held_out = {str(sample["prompt"]) for sample in samples if sample.get("prompt")}
    if leaked := [prompt for prompt in sources if prompt in held_out]:
        step_number, row = places[leaked[0]]
        yield Finding(
            cause="leaked_data",
            score=0.9,
            stage="data",
            step=step_number,
            row=row,
            evidence=f"{len(leaked)} of the {len(sources)} prompts that were trained on are held out too; the first is "
            f"{leaked[0]!r:.80} ({min(sources[leaked[0]])})",
        )
    twice = [prompt for prompt, found in sources.items() if len(found) > 1]
    if len(twice) >= 2 and len(twice) > 0.05 * len(sources):
        step_number, row = places[twice[0]]
        named = sorted(sources[twice[0]])[:3]
        yield Finding(
            cause="duplicated_data",
            score=0.8,
            stage="data",
            step=step_number,
            row=row,
            evidence=f"{len(twice)} of {len(sources)} prompts come from more than one row of the data; the first from "
            f"{' and '.join(named)}",
        )


def _check_log(log: Sequence[Row], steps: Sequence[RecordedStep]) -> Iterator[Finding]:
    """What the curves show: no signal, collapse of the entropy, steps that are too large."""

    def series(name: str) -> list[tuple[int, float]]:
        return [
            (int(float(str(row["step"]))), value) for row in log if (value := finite_number(row.get(name))) is not None
        ]

    # Beyond what engine and trainer differ by before the first update, which is no matter of the updates.
    large = [
        (step, float(np.abs(gap).mean()) - _first_gap(step))
        for step in steps
        if step.has("logp") and step.has("logp_old") and len(gap := _later_gaps(step)) >= LIMITS["tokens"]
    ]
    too_large = [(step, size) for step, size in large if size > LIMITS["log_ratio"]]
    leaps = [*_leaps(log)]
    signal, reward, spread = series("groups_with_signal"), series("reward"), dict(series("reward_std"))
    if len(signal) >= 3 and len(reward) >= 3:
        silent = list(itertools.takewhile(lambda each: each[1] == 0, reversed(signal)))
        last = [value for _, value in reward[-len(silent) :]] if silent else []
        best = max(value for _, value in reward)
        constant = (
            len(silent) >= 3 and max(last) - min(last) <= 1e-9 and not any(spread.get(at, 0.0) for at, _ in silent)
        )
        if constant and (len(silent) == len(signal) or last[-1] < best - 0.25 * (abs(best) or 1.0)):
            begins = silent[-1][0]
            # A policy that broke is what makes rewards equal.
            broke = (too_large and too_large[0][0].step < begins) or any(each.step <= begins for each in leaps)
            yield Finding(
                cause="reward_constant",
                score=0.66 if broke else 0.84,
                stage="reward",
                step=begins,
                row=0,
                evidence=f"every reward of the last {len(silent)} logged steps is {last[-1]:.4g}, since step {begins}",
            )
    norms = [value for _, value in series("grad_norm")]
    if too_large:
        step, size = too_large[0]
        update = int(step.row("update", missing=0).max())
        row = int((step.row("update", missing=0) == update).argmax())
        yield Finding(
            cause="learning_rate",
            score=0.74,
            stage="policy",
            step=step.step,
            row=row,
            token=int(step.response[row].argmax()),
            evidence=f"the updates on one batch move log-probabilities by {size:.2f} on average (a ratio of "
            f"{math.exp(min(size, 20)):.1f}); gradient norms go from {min(norms, default=0):.3g} to "
            f"{max(norms, default=0):.3g}",
        )
    if leaps:
        leap = leaps[0]
        yield Finding(
            cause="learning_rate",
            score=0.7,
            stage="policy",
            step=leap.step,
            row=0,
            evidence=f"{leap.told}; gradient norms go from {min(norms, default=0):.3g} to {max(norms, default=0):.3g}",
        )
    losses = series("loss")
    if steps and steps[-1].data.get("given_rows") and len(losses) >= 6:
        before = losses[0][1]
        limit = 2 * abs(before) + 0.5
        risen = [at for (at, _), *three in zip(losses, *(losses[n:] for n in range(3)), strict=False) if all(
            value > limit for _, value in three
        )]  # fmt: skip
        if risen:
            yield Finding(
                cause="learning_rate",
                score=0.74,
                stage="policy",
                step=risen[0],
                row=0,
                evidence=f"the loss of given rows rose from {before:.3g} to {max(value for _, value in losses):.3g}; "
                f"gradient norms go from {min(norms, default=0):.3g} to {max(norms, default=0):.3g}",
            )
    entropy = series("entropy")
    if len(entropy) >= 6 and len(reward) >= 6:
        most, now = max(value for _, value in entropy), float(np.mean([value for _, value in entropy[-3:]]))
        rewards = [value for _, value in reward]
        learned = np.mean(rewards[-3:]) >= np.mean(rewards[:3]) + 0.05 * max(1e-9, abs(max(rewards)))
        if now < LIMITS["entropy_share"] * most and not learned:
            at = next(at for at, value in entropy if value < LIMITS["entropy_share"] * most)
            yield Finding(
                cause="entropy_collapse",
                score=0.7,
                stage="policy",
                step=at,
                row=0,
                evidence=f"the entropy fell from {most:.3g} to {now:.3g} nats, and the reward did not rise "
                f"({np.mean(rewards[:3]):.3g} to {np.mean(rewards[-3:]):.3g}): responses to a prompt are all the same",
            )


@dataclass(frozen=True, slots=True)
class _Leap:
    """A step between which and the one before it the policy became another one."""

    step: int
    told: str


def _leaps(log: Sequence[Row]) -> Iterator[_Leap]:
    """Where responses are others at once and most of the reward is lost for good, as after one update too many."""
    known: list[list[float]] = []
    for row in log:
        figures = [finite_number(row.get(name)) for name in ("step", "reward", "response_tokens", "truncated")]
        if None not in figures:
            known.append([each for each in figures if each is not None])
    for place, (one, two) in enumerate(itertools.pairwise(known), start=1):
        best, left = max(each[1] for each in known[:place]), max(each[1] for each in known[place:])
        times = two[2] / max(one[2], 1e-9)
        others = abs(two[3] - one[3]) > 0.4 or not 0.5 < times < 2
        if others and best > 0 and left < 0.25 * best:
            yield _Leap(
                int(two[0]),
                f"from step {one[0]:.0f} to step {two[0]:.0f} responses became others at once ({one[2]:.3g} to "
                f"{two[2]:.3g} tokens, {one[3]:.0%} to {two[3]:.0%} truncated), and the reward fell from {one[1]:.3g} "
                f"to {two[1]:.3g} for good",
            )


def _first_gap(step: RecordedStep) -> float:
    """Mean |logp - logp_old| of the tokens of the first update."""
    d, where = _difference(step)
    return float(np.abs(d[where]).mean()) if where.any() else 0.0


def _later_gaps(step: RecordedStep) -> Array:
    """Logp - logp_old of the tokens that a later update on the batch trained on."""
    rows = step.row("update", missing=0) > 0
    where = step.response & step.trainable & rows[:, None]
    gaps: Array = (step.padded("logp") - step.padded("logp_old"))[where]
    return gaps[np.isfinite(gaps)]


def _option(step: RecordedStep, section: str, name: str) -> Any:
    """A setting of the objective that the step was recorded with; None if that is not known."""
    found: Mapping[str, Any] = step.data.get("objective", {}).get(section, {})
    return found.get(name)
