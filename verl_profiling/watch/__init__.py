"""The watch: an always-on summary of every step, and detection of steps that call for a capture."""
