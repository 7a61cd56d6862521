"""From where on something stands out: a finding about a step, a lane of its picture, or a step of a run."""

__all__ = ["FINDINGS", "Outlier", "Shift"]

FINDINGS = {
    "capture": 0.05,  # of the step, or of the observed time of all devices
    "pause": 0.25,  # of the step
    "straggler": 0.05,  # of the role's time in the step
    "idle_stage": 0.10,  # of the step
    "long_tail": 0.05,  # of the observed time of all devices, and so on
    "after_generation": 0.05,
    "no_requests": 0.10,
    "weight_sync": 0.15,
    "host_blocked": 0.10,
    "host_bound": 0.15,
    "between_stages": 0.20,
    "unexplained": 0.20,
    "exposed_communication": 0.15,  # of the busy time of all devices
    "loop_blocked": 0.02,  # of the trajectories' time
    "last_trajectories": 0.15,  # of the rollout, more than their share of the trajectories
    "trajectory_cause": 0.25,  # of the trajectories' time
    "trajectories_for_nothing": 0.10,
    "polling": 0.05,  # of the step
}
"""Shares by the rule of a finding: above them, acting is usually worth the effort."""


class Outlier:
    """When a lane stands out from the others of its role.

    Attributes:
        SLOWER: Times the median of the role that it takes for a stage.
        OF_THE_STEP: Share of the step that this, or waiting for it, has to be.
        LATE_SHARE: Share of a collective's calls at which it is last.
        LATE_CALLS: Number of calls that say enough.
        SPREADS: Robust standard deviations between its busy share and the median.
        POINTS: The same, in busy share, at the least.
    """

    SLOWER = 1.2
    OF_THE_STEP = 0.03
    LATE_SHARE = 0.8
    LATE_CALLS = 5
    SPREADS = 3.0
    POINTS = 0.05


class Shift:
    """When a stage or a cause of lost time left the range that it had in the steps before.

    Attributes:
        FEWEST: Steps before, of which a range is known.
        OF_ITSELF: Share of its median before by which it changed.
        OF_THE_STEP: The same, as a share of the step (for a cause, of all devices' time).
    """

    FEWEST = 2
    OF_ITSELF = 0.1
    OF_THE_STEP = 0.02
