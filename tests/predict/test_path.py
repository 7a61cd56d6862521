"""The critical path, slack and replays of random graphs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from verl_profiling.predict.replays import replay
from verl_profiling.predict.segments import Segment
from verl_profiling.predict.slack import slacks_ns
from verl_profiling.predict.step_graph import Graph, Poll


@st.composite
def graphs(draw: st.DrawFn, queues: tuple[str, ...] = ("",), polls: bool = False) -> Graph:
    """Return a random graph whose last segment follows all others.

    Some segments wait in queues, and some end with a poll.
    """
    graph = Graph(begin_ns=100, end_ns=0)
    free = dict.fromkeys(queues, graph.begin_ns)
    count = draw(st.integers(1, 25))
    for number in range(count):
        few = (
            st.lists(st.integers(0, number - 1), max_size=4, unique=True) if number else st.just([])
        )
        after = list(range(number)) if number == count - 1 else draw(few)
        ready = max((graph.segments[at].end_ns for at in after), default=graph.begin_ns)
        queue = draw(st.sampled_from(queues))
        begin = max(ready, free[queue] if queue else 0) + draw(st.sampled_from([0, 0, 1, 7]))
        free[queue] = end = begin + draw(st.integers(0, 50))
        found = Segment("work", begin, end, f"lane{number % 3}", ("s",), ("s",), after, queue=queue)
        found.releases = (queue,) if queue else ()
        graph.segments.append(found)
        if polls and after and end > begin and draw(st.booleans()):
            since = draw(st.sampled_from(after))
            period = end - begin + draw(st.integers(0, 9))
            graph.polls[number] = Poll(since, end - graph.segments[since].end_ns, period)
    graph.last = count - 1
    graph.end_ns = graph.segments[-1].end_ns
    graph.close()
    return graph


@settings(max_examples=30)
@given(graphs(queues=("", "a", "b"), polls=True))
def test_a_replay_without_changes_is_the_step(graph: Graph) -> None:
    replayed = replay(graph)
    assert list(replayed.end_ns) == [one.end_ns for one in graph.segments]


@settings(max_examples=30)
@given(graphs(queues=("", "a", "b")), st.integers(2, 5))
def test_a_step_of_which_all_takes_longer_has_the_same_order_in_its_queues(
    graph: Graph, factor: int
) -> None:
    recorded = replay(graph)
    longer = replay(
        graph, *([factor * ns for ns in times] for times in (recorded.took_ns, recorded.delay_ns))
    )
    begin_ns = graph.begin_ns
    assert [ns - begin_ns for ns in longer.end_ns] == [
        factor * (ns - begin_ns) for ns in recorded.end_ns
    ]


@settings(max_examples=30)
@given(graphs(queues=("", "a", "b"), polls=True))
def test_the_path_is_a_chain_as_long_as_the_step(graph: Graph) -> None:
    replayed = replay(graph)
    path = replayed.path()
    assert sum(part.end_ns - part.begin_ns for part in path) == replayed.span_ns
    edges = [
        graph.begin_ns,
        *(ns for part in path for ns in (part.begin_ns, part.end_ns)),
        graph.end_ns,
    ]
    assert edges[::2] == edges[1::2]


@settings(max_examples=30)
@given(graphs())
def test_removing_all_work_off_the_path_does_not_shorten_the_step(graph: Graph) -> None:
    replayed = replay(graph)
    on_path = {part.segment for part in replayed.path()}
    took = [ns if at in on_path else 0 for at, ns in enumerate(replayed.took_ns)]
    assert replay(graph, took).span_ns == replayed.span_ns


@settings(max_examples=30)
@given(graphs(), st.data())
def test_slack_is_how_much_longer_a_segment_may_take(graph: Graph, data: st.DataObject) -> None:
    """One nanosecond more makes the step longer by one."""
    replayed = replay(graph)
    at = data.draw(st.integers(0, len(graph.segments) - 1))
    took = list(replayed.took_ns)
    took[at] += slacks_ns(replayed)[at]
    assert replay(graph, took).span_ns == replayed.span_ns
    took[at] += 1
    assert replay(graph, took).span_ns == replayed.span_ns + 1


@settings(max_examples=30)
@given(graphs(polls=True), st.data())
def test_a_segment_with_slack_does_not_make_the_step_longer(
    graph: Graph, data: st.DataObject
) -> None:
    replayed = replay(graph)
    at = data.draw(st.integers(0, len(graph.segments) - 1))
    took = list(replayed.took_ns)
    took[at] += slacks_ns(replayed)[at] if at not in graph.polls else 0
    assert replay(graph, took).span_ns <= replayed.span_ns


@settings(max_examples=30)
@given(graphs(), st.data())
def test_work_that_nobody_waits_for_takes_no_slack(graph: Graph, data: st.DataObject) -> None:
    """The work follows a segment; its own slack ends with the step."""
    slack = slacks_ns(replay(graph))
    before = data.draw(st.integers(0, len(graph.segments) - 1))
    begin = graph.segments[before].end_ns
    end = begin + data.draw(st.integers(0, 500))
    graph.segments.append(Segment("work", begin, end, "beside", after=[before]))
    graph.close()
    assert list(slacks_ns(replay(graph))) == [*slack, max(graph.end_ns - end, 0)]
