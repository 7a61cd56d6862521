"""Reads traces, and merges the traces of one step into one timeline."""
