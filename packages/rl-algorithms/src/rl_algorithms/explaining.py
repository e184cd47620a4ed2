"""The formula that an objective amounts to, in plain text: what is compared, clipped, corrected, divided by what."""

from rl_algorithms.objective import Objective

__all__ = ["explain"]


def explain(objective: Objective) -> str:
    """One line for each part of the loss, in the order in which it is computed."""
    parts = {
        "rollouts": _rollouts(objective),
        "reward": _reward(objective),
        "advantage": _advantage(objective),
        "ratio": _ratio(objective),
        "per token": _per_token(objective),
        "correction": _correction(objective),
        "loss": _loss(objective),
        "counts": _counts(objective),
        "note": _note(objective),
    }
    width = max(map(len, parts)) + 2
    return "\n".join(f"{name:<{width}}{line}" for name, line in parts.items() if line)


def _rollouts(objective: Objective) -> str:
    selection = objective.selection
    kept = (
        "groups with rewards that differ; the others leave the batch and its counts"
        if selection.groups_without_signal == "drop"
        else "all that did not fail, those of groups with equal rewards too"
    )
    times = selection.max_generation_batches
    again = f"; up to {times} batches of prompts are asked to find enough" if times > 1 else ""
    cut = "; answers that were cut off are compared but not trained on" if selection.mask_truncated else ""
    return kept + again + cut


def _reward(objective: Objective) -> str:
    terms = ["R = r"]
    if objective.overlong.max_length is not None:
        end, buffer = objective.overlong.max_length, objective.overlong.buffer
        terms.append(f"{objective.overlong.penalty:g} * clip((tokens - {end - buffer}) / {buffer}, 0, 1)")
    if objective.kl.weight > 0 and objective.kl.place == "reward":
        terms.append(f"{objective.kl.weight:g} * {_kl(objective)}")
    return " - ".join(terms)


def _advantage(objective: Objective) -> str:
    config = objective.advantage
    if config.normalize_each_reward:
        weights = ", ".join(f"{name} {weight:g}" for name, weight in config.reward_weights.items())
        line = f"A = sum_k w_k (R_k - mean(R_k of the group)) / (std(R_k of the group) + {config.epsilon:g})"
        if objective.overlong.max_length is not None or (objective.kl.weight > 0 and objective.kl.place == "reward"):
            line += " + (R - r) - mean(R - r of the group)"
        line += f", w = {weights}, else 1" if weights else ", w = 1"
    else:
        centered = {
            "none": "R[t..]",
            "group_mean": "R - mean(R of the group)",
            "leave_one_out": "R - mean(R of the others of the group)",
        }[config.baseline]
        divisor = f" / (std(R of the group) + {config.epsilon:g})" if config.scale == "group_std" else ""
        line = f"A = {f'({centered}){divisor}' if divisor else centered}"
    return line if config.whiten == "none" else f"{line}, then mean 0 and variance 1 over the batch's {config.whiten}"


def _ratio(objective: Objective) -> str:
    config = objective.ratio
    if config.surrogate == "reinforce":
        return ""
    proximal = {
        "sampler": "logp_old",
        "recomputed": "logp_proximal",
        "current": "sg(logp)",
    }[config.proximal]
    if config.level == "sequence":
        return f"rho = exp(mean over the answer's tokens of (logp - {proximal}))"
    return f"rho = exp(logp - {proximal})"


def _per_token(objective: Objective) -> str:
    config = objective.ratio
    if config.surrogate == "reinforce":
        return "l = -A logp"
    low, high = 1 - config.clip_low, 1 + config.clip_high
    bounds = f"{low:g}, {high:g}" if config.clip_low < 1 else f"0, {high:g}"
    if config.surrogate == "cispo":
        return f"l = -sg(clip(rho, {bounds})) A logp"
    line = f"l = -min(rho A, clip(rho, {bounds}) A)"
    return line if config.dual_clip is None else f"{line}, and at most {config.dual_clip:g} |A| where A < 0"


def _correction(objective: Objective) -> str:
    config = objective.correction
    if not config.active:
        return ""
    trainer = "sg(logp)" if objective.ratio.proximal == "current" else "logp_proximal"
    lines = []
    if config.weight != "none":
        weight = f"exp({trainer} - logp_old)" if config.weight == "token" else f"exp(sum_t {trainer} - logp_old)"
        how = "held within" if config.outside == "truncate" else "0 outside"
        lines.append(f"l *= {weight}, {how} [{config.low:g}, {config.high:g}]")
    if config.geometric_low is not None or config.geometric_high is not None:
        low = 0.0 if config.geometric_low is None else config.geometric_low
        high = float("inf") if config.geometric_high is None else config.geometric_high
        lines.append(f"l = 0 for answers with exp(mean_t {trainer} - logp_old) outside [{low:g}, {high:g}]")
    if config.sequence_error_threshold is not None:
        lines.append(f"l = 0 for answers with mean_t exp|{trainer} - logp_old| > {config.sequence_error_threshold:g}")
    return "; ".join(lines)


def _loss(objective: Objective) -> str:
    terms = ["l"]
    if objective.kl.weight > 0 and objective.kl.place == "loss":
        terms.append(f"+ {objective.kl.weight:g} * {_kl(objective)}")
    inside = terms[0] if len(terms) == 1 else f"({' '.join(terms)})"
    line = {
        "token-mean": f"L = sum_i sum_t {inside} / N_tok",
        "seq-mean-token-mean": f"L = sum_i (sum_t {inside} / T_i) / N_seq",
        "seq-mean-token-sum": f"L = sum_i sum_t {inside} / N_seq",
        "seq-mean-token-sum-norm": f"L = sum_i sum_t {inside} / (N_seq * {objective.max_length})",
    }[objective.aggregation]
    entropy = objective.entropy_weight
    return f"{line} - {entropy:g} * sum_i sum_t H / N_tok" if entropy > 0 else line


def _counts(objective: Objective) -> str:
    counted = [] if objective.aggregation == "token-mean" else ["N_seq answers with a trainable token"]
    if not counted or objective.entropy_weight > 0:
        counted.append("N_tok trainable tokens")
    return f"{' and '.join(counted)} of the whole optimizer step, over all ranks and microbatches"


def _note(objective: Objective) -> str:
    kl = objective.kl
    if kl.weight > 0 and kl.place == "loss" and kl.estimator == "k1":
        return "the expected gradient of k1 in the loss is 0 on-policy: it holds the policy to nothing; take k2 or k3"
    return ""


def _kl(objective: Objective) -> str:
    return {
        "k1": "(logp - logp_ref)",
        "k2": "(logp - logp_ref)^2 / 2",
        "k3": "(exp(logp_ref - logp) - (logp_ref - logp) - 1)",
        "k3_unbiased": "rho (exp(logp_ref - logp) - (logp_ref - logp) - 1)",
    }[objective.kl.estimator]
