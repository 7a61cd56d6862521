"""Predictions from one captured step: its graph, its critical path, and replays with changes.

Lanes, collectives and trajectories come from :mod:`verl_profiling.report`, where a step is analysed.
"""
