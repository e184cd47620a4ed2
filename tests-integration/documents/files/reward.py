"""The reward that the pages call yours."""


def score(completions, answer, **columns):
    return [float(text.strip() == right) for text, right in zip(completions, answer)]


compute_score = score
