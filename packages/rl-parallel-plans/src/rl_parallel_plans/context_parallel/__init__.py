"""Context parallelism: one sequence over the ranks of a mesh axis, exact, for models that call torch's SDPA.

`layout` cuts sequences and tells which tokens a rank holds; `apply` puts the attention over all ranks into a model.
"""
