"""Reads traces, and merges those of one step into one timeline."""
