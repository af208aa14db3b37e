"""The tasks of ``msattn eval``, a module each.

``run`` returns the rows of dense attention and of every compared method, and ``TASK`` is the task's record. A module may
also have functions that are called before the first task runs, and refuse settings with UserError: ``check_config(cfg)`` before
the model is loaded, then ``check_sizes(cfg, loaded, methods)`` and ``prepare(cfg, loaded)``; ``job.prepared`` has the results.
"""
