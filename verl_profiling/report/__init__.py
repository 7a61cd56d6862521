"""Computes where the accelerator-seconds of a step went, and shows it."""
