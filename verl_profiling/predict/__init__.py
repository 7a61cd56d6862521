"""Predictions from one captured step: its graph, its critical path, and replays with changes.

============== ==================================================================================
module         content
============== ==================================================================================
``graph``      the graph of a step: segments, and which of them wait for which
``limits``     limits of concurrency, and the slots that trajectories wait for
``path``       the replay of a graph, its critical path and slack
``changes``    the changes that a user can ask for, and the replay with them
``kernels``    the replay of a trace's kernels and calls, for a change of kernels
``resources``  the interval for other replicas, or for the next rollout beside the training
``replicas``   engines as fitted to the requests of a step, and a simulation of them
``prediction`` the predicted step with the next changes that would help: what the command prints
``explain``    which parts of two runs explain their difference, for ``diff``
============== ==================================================================================

Lanes, collectives and trajectories come from :mod:`verl_profiling.report`, where a step is
analysed.
"""
