"""Merges the traces, trajectory logs and stages of one step into one timeline."""
