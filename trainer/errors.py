"""Errors that the command line says in one line, without a traceback."""


class UserError(ValueError):
    """What a user can mend: the message names the argument, its value and what is accepted. Exit code 2."""


class CheckFailed(RuntimeError):
    """An operation disagrees with its reference: one clear line, exit code 1 on the command line."""


class TrainingDiverged(RuntimeError):
    """A loss, gradient or weight that is not finite; the message names it and the last good checkpoint."""
