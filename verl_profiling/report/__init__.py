"""Computes and shows the use of the accelerator-seconds of a step."""
