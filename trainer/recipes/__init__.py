"""Programs that are run by name, as ``python -m msattn.trainer.recipes.<program>``, and that nothing else imports."""
