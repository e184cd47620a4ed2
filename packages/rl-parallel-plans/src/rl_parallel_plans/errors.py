"""The errors that this package raises."""


class PlanError(ValueError):
    """A plan cannot be found, does not fit its model or its mesh, or was asked for something it does not do.

    The message names the rule that broke, the names and values that broke it, and what to do.
    """


class UnusableModelError(PlanError):
    """The model library cannot build this configuration, or cannot run it even without sharding.

    That says nothing about a plan: a verification is skipped, not failed.
    """
