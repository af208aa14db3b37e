"""What a user can mend: one clear line, exit code 2 on the command line."""


class UserError(ValueError):
    """A user's mistake: the message names the argument, its value and what is accepted."""


class TrainingDiverged(RuntimeError):
    """A loss, gradient or weight that is not finite; the message names it and the last good checkpoint."""
