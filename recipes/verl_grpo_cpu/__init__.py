"""Real verl on a machine without an accelerator: platform plugin, tiny model, tiny data."""
