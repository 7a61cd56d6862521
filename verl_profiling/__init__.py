"""Capture and analyse the steps of RL post-training."""

__version__ = "0.1.0"
