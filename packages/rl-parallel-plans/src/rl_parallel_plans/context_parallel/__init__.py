"""Context parallelism: one sequence over the ranks of a mesh axis, exact, for models that call torch's SDPA.

`layout`: which tokens a rank holds. `attention`: its queries against every rank's keys. `limits`: what is refused.
`apply`: the hooks that put it into a model.
"""
