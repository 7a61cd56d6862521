"""Tests of trajectories, their spans and the lag of event loops."""
