"""The one error of this package."""


class PlanError(ValueError):
    """A plan cannot be found, does not fit its model or its mesh, or was asked for something it does not do.

    The message names the rule that broke, the names and values that broke it, and what to do.
    """
