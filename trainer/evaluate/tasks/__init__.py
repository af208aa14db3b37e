"""The tasks of ``msattn eval``, a module each.

``run`` returns the rows of dense attention and of every compared method, and ``TASK`` is the task's
record. A module may also have functions that are called before the weights are read, and refuse
settings with UserError: ``check_config(cfg)``, then ``check_sizes(cfg, model, methods)`` and
``prepare(cfg, model)``, whose ``model`` has a configuration and a tokenizer; ``job.prepared`` has
the results.
"""
