"""Reads the files of a step."""
