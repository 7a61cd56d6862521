"""Exposed time: it adds up to the step, and names who led where the signal can tell."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quiet_steps import with_stages

from verl_profiling.controller.judgement import judge
from verl_profiling.files.step_summary import ExposedStage, RankUse, SpanTotal, StepSummary
from verl_profiling.watch.stage_numbers import exposed, standings

DOCS = Path(__file__).parents[2] / "docs"
MS = 1_000_000
BEGIN_NS = 1_700_000_000_000_000_000

Timed = tuple[str, int, int]
"""A stage, when it began after the step, and how long it was: both in milliseconds."""


def use(lane: str, *stages: Timed, role: str = "") -> RankUse:
    return in_periods(
        lane, {name: [(begin, begin + length)] for name, begin, length in stages}, role=role
    )


def in_periods(
    lane: str, stages: Mapping[str, Sequence[tuple[int, int]]], role: str = ""
) -> RankUse:
    """Return a process that was in stages several times: from when to when, in milliseconds."""
    times = {
        name: [(BEGIN_NS + begin * MS, BEGIN_NS + end * MS) for begin, end in periods]
        for name, periods in stages.items()
    }
    role = role or lane.partition("_")[0].rstrip("0123456789")
    return with_stages(RankUse(lane=lane, role=role), times)


def summary(length: int, loop: list[RankUse], *workers: RankUse) -> StepSummary:
    """Return the summary of a step of some milliseconds."""
    return StepSummary(
        step=7, begin_ns=BEGIN_NS, end_ns=BEGIN_NS + length * MS, loop=loop, workers=list(workers)
    )


def controller(*stages: Timed) -> list[RankUse]:
    return [use("controller", *stages)]


def in_ms(rows: list[ExposedStage]) -> list[tuple[str, float]]:
    return [(row.name, row.exposed_ns / MS) for row in rows]


def ranks(*durations: tuple[int, int]) -> list[RankUse]:
    """Return the ranks of an SPMD loop, from the durations of ``generate`` and ``forward``."""
    return [
        use(f"actor_rank{rank}", ("generate", 0, first), ("forward", first, second))
        for rank, (first, second) in enumerate(durations)
    ]


def test_who_is_tied_or_evened_out_is_not_named() -> None:
    """Two late ranks, ranks that ran stages in other orders."""
    for late in ((140, 141), (141, 140)):
        [first, *_] = exposed(summary(300, ranks((100, 1), *((took, 1) for took in late))))
        assert (first.exposed_ns, first.leader, first.lead_ns) == (141 * MS, "", 0)
    [first, *_] = exposed(summary(300, ranks((100, 1), (140, 1), (180, 1))))
    assert (first.leader, first.lead_ns) == ("actor_rank2", 60 * MS)
    there, back = (
        [("a", 0, 10), ("b", 10, 50), ("c", 60, 10)],
        [("b", 0, 50), ("a", 50, 10), ("c", 60, 40)],
    )
    loop = [use("actor_rank0", *there), use("actor_rank1", *there), use("actor_rank2", *back)]
    assert [row.leader for row in exposed(summary(200, loop))] == ["", "", "actor_rank2", ""]
    workers = [use(f"actor_rank{rank}", ("update_actor", 1, 88 + rank)) for rank in range(4)]
    [row, _] = exposed(summary(100, controller(("update_actor", 0, 95)), *workers))
    assert (row.role, row.leader) == ("actor", "")


def test_stages_of_one_rank_or_of_two_tasks_count_once() -> None:
    """Rank 0 writes the log and the others wait."""
    loop = [
        use("actor_rank0", ("log", 0, 30), ("forward", 30, 10)),
        use("actor_rank1", ("forward", 0, 40)),
        use("actor_rank2", ("forward", 0, 40)),
    ]
    rows = exposed(summary(40, loop))
    assert in_ms(rows) == [("log", 30), ("forward", 10)]
    assert (rows[0].leader, rows[1].leader) == ("actor_rank0", "")
    rows = exposed(
        summary(100, controller(("rollout", 0, 60), ("reward", 40, 40)), use("actor_rank0"))
    )
    assert in_ms(rows) == [("rollout", 40), ("reward", 40), ("", 20)]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_of_stages_side_by_side_the_one_that_ends_last_took_the_time(order: Sequence[int]) -> None:
    """Whichever begins first, and of two stages in a row beside a longer or a shorter one."""
    took = {"ref_log_prob": 200, "values": 100, "reward": 300}
    names = [[*took][number] for number in order]
    beside = [(name, 100 + at, took[name] - at) for at, name in enumerate(names)]
    workers = [
        use(f"{name}_rank{rank}", (name, begin + 1, length - 1 - 30 * rank))
        for name, begin, length in beside
        for rank in (0, 1)
    ]
    loop = controller(("rollout", 0, 100), *beside, ("update", 400, 100))
    step = summary(500, loop, *workers)
    judge([step], True)
    exposed_ms = dict(in_ms(step.exposed))
    first = order.index(2)  # the path comes to the last one's begin by one that was open
    assert exposed_ms["reward"] == 300 - first
    assert exposed_ms["ref_log_prob"] + exposed_ms["values"] == first
    [reward] = [row for row in step.exposed if row.name == "reward"]
    assert (reward.leader, reward.lead_ns) == ("reward_rank0", 30 * MS)
    assert step.helps is not None
    assert (step.helps.stage, step.helps.saves_ns) == ("reward", 100 * MS)
    rows = exposed(summary(400, controller(("a", 0, 100), ("b", 100, 250), ("c", 1, 300))))
    assert in_ms(rows) == [("a", 100), ("c", 0), ("b", 250), ("", 50)]
    rows = exposed(summary(400, controller(("a", 1, 100), ("b", 101, 150), ("c", 0, 300))))
    assert in_ms(rows) == [("c", 300), ("a", 0), ("b", 0), ("", 100)]


def test_parts_of_a_workers_stage_tell_who_was_waited_for() -> None:
    """All ranks are equally long in both parts together;
    the leader is who was long before the exchange.
    """
    workers = [
        use(f"actor_rank{rank}", ("compute", 1, own), ("exchange", 1 + own, 90 - own))
        for rank, own in enumerate((40, 80, 42, 41))
    ]
    [row, _] = exposed(summary(100, controller(("update_actor", 0, 95)), *workers))
    assert (row.leader, row.lead_ns) == ("actor_rank1", 39 * MS)


def test_of_roles_side_by_side_the_row_has_the_last() -> None:
    """Agent loops hold the engines' work: the row has the role that ended last,
    and names no process.
    """
    step = summary(
        100,
        controller(("rollout", 0, 90)),
        use("rollout0_rank0", ("generate", 5, 70)),
        use("rollout1_rank0", ("generate", 5, 40)),
        use("agent_loop0", ("agents", 1, 88), role="agent_loop"),
        use("agent_loop1", ("agents", 1, 50), role="agent_loop"),
    )
    [row, _] = exposed(step)
    assert (row.role, row.leader, row.lead_ns) == ("agent_loop", "", 0)
    [_, engines] = standings(step)["rollout"]
    assert (engines.leader, engines.lead_ns) == ("rollout0_rank0", 30 * MS)


@pytest.mark.parametrize("marked", ["", "rollout", "trajectories", "no agents"])
def test_an_engine_that_agent_loops_ask_leads_nowhere(marked: str) -> None:
    """Whether they mark a stage or none: it may only have had more requests."""
    engines = [
        msgspec.structs.replace(
            use(f"rollout{replica}_rank0", ("generate", 5, length)),
            spans=[SpanTotal("generate", 8, 400 * MS)],
        )
        for replica, length in enumerate((60, 78, 61))
    ]
    agents = use("agent_loop_rank0", *([(marked, 1, 88)] if marked else []), role="agent_loop")
    agents = msgspec.structs.replace(agents, spans=[SpanTotal("trajectory", 8, 600 * MS)])
    others = [agents] if marked != "no agents" else []
    step = summary(100, controller(("rollout", 0, 90)), *engines, *others)
    assert exposed(step)[0].leader.startswith("rollout") == (marked == "no agents")
    leaders = [one.leader for one in standings(step)["rollout"] if one.role == "rollout"]
    assert any(leaders) == (marked == "no agents")


def test_in_an_asynchronous_loop_rollout_is_exposed_as_the_waiting_of_the_trainer() -> None:
    """Engines that go on beside the update were not waited for there,
    and only the wait names them.
    """
    rows = exposed(
        summary(
            200,
            controller(("wait_rollout", 0, 60), ("update_actor", 65, 100)),
            use("rollout0_rank0", ("generate", 15, 42)),
            use("rollout1_rank0", ("generate", 15, 20)),
            use("rollout2_rank0", ("generate", 60, 160)),
            use("actor_rank0", ("update_actor", 66, 50)),
            use("actor_rank1", ("update_actor", 66, 98)),
            use("actor_rank2", ("update_actor", 66, 50)),
        )
    )
    assert [row.role for row in rows] == ["rollout", "actor", "controller"]
    assert rows[1].leader == "actor_rank1"


def test_a_loop_waits_for_what_was_under_way_since_the_step_before() -> None:
    """One step off: its batch was generated beside the last update; who was late with it leads."""
    ends = {"rollout0_rank0": 155, "rollout1_rank0": 108, "rollout2_rank0": 110}
    step = summary(
        250,
        controller(("wait_rollout", 102, 54), ("update_actor", 160, 80)),
        *(in_periods(lane, {"generate": [(0, end)]}) for lane, end in ends.items()),
    )
    [wait, *_] = exposed(step)
    assert (wait.role, wait.leader, wait.lead_ns) == ("rollout", "rollout0_rank0", 46 * MS)
    alone = msgspec.structs.replace(step, workers=[use(lane) for lane in ends])
    assert exposed(alone)[0].leader == "controller"


def test_a_wait_has_its_share_of_the_lateness_to_collectives() -> None:
    """The loop waits for the last second of an update of 60 s, in half of which a rank was late."""
    actors = [use(f"actor_rank{rank}", ("update_actor", -59_000, 60_000)) for rank in range(2)]
    actors[1] = msgspec.structs.replace(actors[1], late_ns={"update_actor": 30_000 * MS})
    [row] = exposed(summary(1000, controller(("wait:actor", 0, 1000)), *actors))
    assert (row.leader, row.lead_ns, row.imbalance) == (
        "actor_rank1",
        500 * MS,
        pytest.approx(4 / 3),
    )


def test_of_two_batches_that_were_generated_in_a_step_the_wait_names_the_first_ones_engine() -> (
    None
):
    """One step off: the next batch has begun since;
    it waited for the end of replica 1's first one.
    """
    [wait, update, _] = exposed(
        summary(
            200,
            controller(("wait_rollout", 5, 60), ("update_actor", 70, 120)),
            in_periods("rollout0_rank0", {"generate": [(-60, 20), (68, 130)]}),
            in_periods("rollout1_rank0", {"generate": [(-60, 64), (68, 120)]}),
            use("actor_rank0", ("update_actor", 71, 118)),
        )
    )
    assert (wait.role, wait.leader, wait.lead_ns) == ("rollout", "rollout1_rank0", 44 * MS)
    assert (update.role, update.leader) == ("actor", "actor_rank0")


def test_a_worker_that_ends_with_the_step_by_another_clock_does_not_go_on() -> None:
    """What goes on ends exactly with the step, as it is divided there; nobody waits for it."""
    others = [use(f"actor_{rank}", ("update", 1, 59)) for rank in range(3)]
    loop = controller(("update", 0, 100))
    [row] = exposed(summary(100, loop, *others, use("actor_3", ("update", 1, 100))))
    assert (row.leader, row.lead_ns / MS) == ("actor_3", pytest.approx(41, abs=1))
    [row] = exposed(summary(100, loop, *others, use("actor_3", ("update", 1, 99))))
    assert row.leader == ""


def test_a_stage_that_says_it_waits_names_an_engine_that_goes_on() -> None:
    """An engine that always has requests does not end in the wait;
    a stage of the loop's own names nobody.
    """
    loop = controller(("wait:rollout", 0, 60), ("advantage", 60, 30), ("update_actor", 90, 100))
    workers = [
        use("rollout0_rank0", ("generate", -500, 1000)),
        use("actor_rank0", ("update_actor", 91, 98)),
    ]
    wait, advantage, update, _ = exposed(summary(200, loop, *workers))
    assert [row.leader for row in (wait, advantage, update)] == [
        "rollout0_rank0",
        "controller",
        "actor_rank0",
    ]


def test_generation_beside_the_steps_is_exposed_as_the_wait_alone() -> None:
    """The loop marks it, over the ends of its steps too; the update is as long,
    and names its rank.
    """
    loop = controller(("wait:rollout", 0, 20), ("update_actor", 30, 100), ("rollout", 25, 150))
    workers = [
        use("rollout0_rank0", ("generate", 26, 70)),
        use("agent_loop_rank0", ("trajectories", 25, 90), role="agent_loop"),
        in_periods("reward_rank0", {"reward": [(50, 60), (90, 118)]}),
        use("actor_rank0", ("update_actor", 31, 95)),
        use("actor_rank1", ("update_actor", 31, 70)),
    ]
    step = msgspec.structs.replace(summary(140, loop, *workers), background=("rollout",))
    wait, update, rest = exposed(step)
    assert in_ms([wait, update, rest]) == [("wait:rollout", 20), ("update_actor", 100), ("", 20)]
    assert (update.leader, rest.name) == ("actor_rank0", "")
    assert standings(step).keys() == {"wait:rollout", "update_actor"}
    assert [standing.role for standing in standings(step)["update_actor"]] == ["actor"]


def test_each_run_of_a_stage_is_found_where_it_was() -> None:
    """Two updates in a step, and a generation behind each: nothing is taken for the other's."""
    marked = {"rollout": [(0, 40), (100, 140)], "update_actor": [(40, 100), (140, 200)]}
    loop = [in_periods("controller", marked)]
    rows = exposed(
        summary(
            200,
            loop,
            in_periods("rollout0_rank0", {"generate": [(1, 30), (101, 139)]}),
            in_periods("rollout1_rank0", {"generate": [(1, 39), (101, 110)]}),
            in_periods("actor_rank0", {"update_actor": [(41, 99), (141, 199)]}),
        )
    )
    assert in_ms(rows) == [("rollout", 80), ("update_actor", 120)]
    assert [(row.leader, row.lead_ns) for row in rows] == [
        ("rollout0_rank0", 20 * MS),
        ("actor_rank0", 0),
    ]


def test_nobody_leads_where_a_silent_role_may_have_worked() -> None:
    """The actors of an update have not answered; the engines have, and lead their own stage."""
    loop = controller(("rollout", 0, 60), ("update_actor", 60, 100))
    step = summary(100, loop, in_periods("rollout0_rank0", {"generate": [(1, 59)]}))
    for roles, leader in (({"rollout"}, "controller"), ({"rollout", "actor"}, "")):
        judge([step], True, roles)
        assert [row.leader for row in step.exposed] == ["rollout0_rank0", leader]


def test_runs_that_overlap_count_once_and_many_runs_hide_no_other_stage() -> None:
    """Two tasks generate at once; 64 batches pass forward and backward; agents without a loop."""
    loop = [in_periods("controller", {"rollout": [(0, 60), (0, 60)], "update": [(60, 90)]})]
    rows = exposed(summary(100, loop), False)
    assert in_ms(rows) == [("rollout", 60), ("update", 30), ("", 10)]
    batches = range(0, 640, 10)
    passes = {
        "forward": [(at, at + 3) for at in batches],
        "backward": [(at + 3, at + 10) for at in batches],
    }
    rows = exposed(summary(640, [in_periods("controller", passes)]), False)
    assert in_ms(rows) == [("forward", 3 * 64), ("backward", 7 * 64)]
    agents = RankUse(lane="agents", role="agents", spans=(SpanTotal("trajectory", 8, 600 * MS),))
    assert in_ms(exposed(summary(50, [], agents))) == [("", 50)]


names = st.sampled_from(["a", "b", "c", "d", ""])
numbers = st.integers(-(10**18), 10**18) | st.integers(0, 50)
periods = st.lists(
    st.tuples(numbers, numbers).map(lambda times: (min(times), max(times))), min_size=1, max_size=3
)
uses = st.builds(
    lambda lane, role, stages: with_stages(RankUse(lane=lane, role=role), stages),
    st.sampled_from(["x0", "x1", "y0", "y1", "z"]),
    st.sampled_from(["controller", "actor", "rollout"]),
    st.dictionaries(names, periods),
)


@settings(max_examples=60, deadline=None)
@given(numbers, numbers, st.lists(uses, max_size=4), st.lists(uses, max_size=4))
def test_rows_add_up_to_the_step(
    begin_ns: int, end_ns: int, loop: list[RankUse], workers: list[RankUse]
) -> None:
    """To the nanosecond, and none is negative, whatever the clocks and the stages are."""
    step = StepSummary(step=1, begin_ns=begin_ns, end_ns=end_ns, loop=loop, workers=workers)
    rows = exposed(step)
    assert sum(row.exposed_ns for row in rows) == max(0, step.duration_ns)
    assert all(row.exposed_ns >= 0 and row.lead_ns >= 0 and row.imbalance >= 1 for row in rows)
    assert len({row.name for row in rows}) >= len(rows) - 1


def drawn(chance: random.Random, lanes: Sequence[str]) -> StepSummary:
    """Return a step in which processes are in few stages, or in none; some go on in it."""
    each = []
    for lane in lanes:
        names = chance.sample(["rollout", "generate", "validate", "update"], chance.randrange(4))
        stages = [(name, 10 * chance.randrange(-1, 9), 10 * chance.randrange(4)) for name in names]
        each.append(use(lane, *stages))
    of_loop = 1 if "loop" in lanes else len(lanes)
    return summary(chance.choice([0, 100, 100, 100]), each[:of_loop], *each[of_loop:])


@pytest.mark.parametrize("lanes", [["actor_0", "actor_1"], ["loop", "actor_0", "rollout_0"]])
def test_steps_that_are_judged_together_are_as_each_alone(lanes: list[str]) -> None:
    """How many steps a reading has changes nothing, and numpy warns of nothing."""
    chance = random.Random(0)
    for _ in range(150):
        together = [drawn(chance, lanes) for _ in range(3)]
        alone = [msgspec.structs.replace(step) for step in together]
        with np.errstate(all="raise"):
            judge(together, True, engines={"rollout_0"})
            for step in alone:
                judge([step], True, engines={"rollout_0"})
        assert together == alone


def test_the_picture_of_the_page_shows_what_the_page_says(tmp_path: Path) -> None:
    """The numbers that docs/watch.md quotes are those of the example that is drawn;
    and it can be drawn.
    """
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("draw_exposed", DOCS / "draw_exposed.py")
    drawing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(drawing)
    rows = exposed(drawing.ranks_of_one_program())
    assert [(row.name, row.exposed_ns // 10**9) for row in rows[:2]] == [
        ("generate", 14),
        ("forward", 5),
    ]
    assert [bool(row.leader) for row in rows] == [True, False, False, False]
    rows = exposed(drawing.loop_that_calls_workers())
    assert [row.leader for row in rows] == ["rollout1_rank0", "controller", "actor_rank1", ""]
    drawing.draw(tmp_path / "exposed.png")
    assert (tmp_path / "exposed.png").stat().st_size > 10_000
