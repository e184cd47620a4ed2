"""What a refit of a checkpoint would move between two layouts, guessed from its headers before anything exists.

Once there are two sides, `RefitPlan.explain()` says it of them.
"""
