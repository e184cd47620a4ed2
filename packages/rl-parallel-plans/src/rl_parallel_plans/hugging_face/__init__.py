"""A model's own Hugging Face plan (`model.tp_plan`) in parallel styles, or a refusal.

It reads the attribute and imports no transformers. `strings` says what each style string is in our tables,
`patterns` what a pattern names in a model, `translation` puts a plan together and `completion` adds what it lacks.
"""

from rl_parallel_plans.hugging_face.strings import translate_parallel_style
from rl_parallel_plans.hugging_face.translation import HuggingFacePlan, get_hf_tp_plan, own_plan, translate_plan

__all__ = ["HuggingFacePlan", "get_hf_tp_plan", "own_plan", "translate_parallel_style", "translate_plan"]
