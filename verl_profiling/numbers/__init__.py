"""Computes the rows of a step's report: stages, lost time by cause, collectives, rollout, ..."""
