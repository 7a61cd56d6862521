"""Identities and the file names that follow from them."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.identity import WorkerIdentity, artifact_name, safe_name


def test_a_replica_has_a_lane_for_each_of_its_ranks() -> None:
    """A rollout replica is one worker; its tensor-parallel ranks are lanes of it."""
    replica = WorkerIdentity(role="rollout", rank=8, replica=2)
    assert replica.name == "rollout2"
    assert [replica.lane(), replica.lane(0), replica.lane(1)] == [
        "rollout2_rank0",
        "rollout2_rank0",
        "rollout2_rank1",
    ]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("actor_rank0", ".torch.json.gz"), "actor_rank0.torch.json.gz"),
        (("actor_rank0", ".torch.json.gz", "update_actor"), "actor_rank0.update_actor.torch.json.gz"),
        (("actor_rank0", ".torch.json.gz", "update_actor", 2), "actor_rank0.update_actor.2.torch.json.gz"),
        (("rollout0_rank0", ".npu", "a-b"), "rollout0_rank0.a-b.npu"),
        (("rollout0_rank0", ".npu", "a/b"), "rollout0_rank0.a-b-07f4401c.npu"),
    ],
)
def test_artifact_names_are_canonical(arguments: tuple[str, ...], expected: str) -> None:
    """Lane, stage, and which run of it when it ran again."""
    assert artifact_name(*arguments) == expected


@settings(max_examples=30)
@given(st.lists(st.text(min_size=1), min_size=2, max_size=2, unique=True))
def test_stages_of_different_names_have_different_files(names: list[str]) -> None:
    """Even if they become equal once unsafe characters are replaced or the name is shortened."""
    for ending in ("", "x" * 100):
        first, second = (artifact_name("actor_rank0", ".json", name + ending) for name in names)
        assert first != second


@given(st.text())
def test_no_name_leaves_its_folder(text: str) -> None:
    """Whatever a role or stage is called, its name is one short, safe path component."""
    assert re.fullmatch(r"[A-Za-z0-9_-]{1,80}", safe_name(text))
    assert "/" not in WorkerIdentity(role=text).name
