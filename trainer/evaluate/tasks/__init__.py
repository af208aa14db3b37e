"""The tasks of ``msattn eval``, one file each: ``run`` returns the rows of dense attention and of every compared method."""
