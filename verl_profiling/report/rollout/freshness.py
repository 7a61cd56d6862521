"""Policy freshness: with which versions of the weights trajectories were made."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from verl_profiling.manifest import Request
from verl_profiling.report.rollout.records import SpanTable, Trajectory
from verl_profiling.report.rollout.rows import VersionRow

__all__ = ["version_rows"]

_MOST_ROWS = 20


def version_rows(
    trajectories: Sequence[Trajectory], spans: SpanTable, served: Mapping[int, Request], trained: int | None
) -> tuple[list[VersionRow], int, int]:
    """Return versions, newest first; how many trajectories they are known of, and how many several made.

    A trajectory's versions are what the loop says (``min_version``, ``max_version``), else those that its
    requests began with.

    Args:
        trajectories: All trajectories.
        spans: Their spans.
        served: The request of each span that has one.
        trained: Version that the step trains, if that is known.
    """
    segments, tokens = Counter[int](), Counter[int]()
    of_requests: defaultdict[int, set[int]] = defaultdict(set)
    for span, request in served.items():
        owner = int(spans.trajectory[span])
        if request.policy_version is not None and owner >= 0 and not trajectories[owner].validate:
            of_requests[owner].add(request.policy_version)
            segments[request.policy_version] += 1
            tokens[request.policy_version] += request.response_tokens
    oldest, newest = Counter[int](), Counter[int]()
    partial = 0
    for number, one in enumerate(trajectories):
        said = [one.count("min_version"), one.count("max_version")]
        versions = {version for version in said if version is not None} or of_requests.get(number)
        if versions and not one.validate:
            oldest[min(versions)] += 1
            newest[max(versions)] += 1
            partial += min(versions) < max(versions)
    known = sorted({*oldest, *newest, *segments}, reverse=True)
    rows = [
        VersionRow(
            version=version,
            behind=None if trained is None else trained - version,
            oldest=oldest[version],
            newest=newest[version],
            segments=segments[version],
            segment_tokens=tokens[version],
        )
        for version in known[:_MOST_ROWS]
    ]
    return rows, oldest.total(), partial
