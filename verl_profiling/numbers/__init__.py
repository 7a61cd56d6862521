"""Computes the rows of a step's report, one function per question."""
