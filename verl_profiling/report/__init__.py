"""Computes and shows the use of a step's lane-seconds."""
