"""The tasks of ``msattn eval``, a module each.

``run`` returns the rows of dense attention and of every compared method, ``TASK`` is the task's record, and ``check_sizes``, if
there is one, refuses settings before the first task runs.
"""
