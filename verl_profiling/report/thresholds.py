"""From where on something stands out: a lane of the picture, or a step of a run."""


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
