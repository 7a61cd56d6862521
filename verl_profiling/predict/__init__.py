"""Predictions from one captured step: its graph, its critical path, and replays with changes.

================= ===============================================================================
module            content
================= ===============================================================================
``segments``      the segments of a step; those of trajectories are columns
``step_graph``    the graph that segments make: their order, and what they wait for
``replays``       the times of a step after changes, and the critical path
``slack``         how much longer segments could take
``graph``         the graph of a step that was read
``loop_runs``     stages, and which of them the loop waits for
``rollout_runs``  trajectories and requests
``limits``        the limits of concurrency that trajectories wait for
``service_rows``  tools, limits and engines over time, with what waits for them
``graph_builder`` the segments of all runs, and the collectives in which they wait for each other
``changes``       the changes that a user can ask for
``baseline``      the recorded step, and its replay with changes
``kernels``       the replay of a trace's kernels and calls, for a change of kernels
``kernel_order``  the calls and kernels of a trace, and which of them wait for which
``engine_fit``    engines as fitted to the requests of a step
``replicas``      the interval for other replicas, or for the next rollout beside the training
``prediction``    the predicted step with the next changes that would help: what the command prints
``explain``       which parts of two runs explain their difference, for ``diff``
================= ===============================================================================

Lanes, collectives and trajectories come from :mod:`verl_profiling.steps`, where a step is read.
"""
