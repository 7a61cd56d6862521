"""Clocks: what a handshake finds, and within which bound."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from verl_profiling import clock
from verl_profiling.clock import Handshake, now_ns, read_anchor
from verl_profiling.identity import WorkerIdentity
from verl_profiling.testing import shifted_clock

ns = st.integers(0, 10**10)


@given(offset=st.integers(-(10**18), 10**18), there=ns, work=ns, back=ns, sent=st.integers(0, 2 * 10**18))
def test_the_offset_is_found_within_its_bound(
    offset: int, there: int, work: int, back: int, sent: int
) -> None:
    """Whatever the way there and back take, and however long the worker works."""
    received = sent + there + offset
    replied = received + work
    returned = sent + there + work + back
    handshake = Handshake(sent, received, replied, returned)
    assert handshake.round_trip_ns == there + back
    assert abs(handshake.offset_ns - offset) <= handshake.error_ns
    assert handshake.error_ns == (there + back + 1) // 2


def test_a_shifted_clock_is_another_host_for_a_while() -> None:
    """The test helper moves the clock and the clock domain, and puts both back."""
    before = now_ns()
    with shifted_clock(10**15, "elsewhere"):
        assert clock.now_ns() - before >= 10**15
        assert read_anchor().unix_ns - before >= 10**15
        assert WorkerIdentity(role="actor").clock_domain == "elsewhere"
    assert clock.now_ns() - before < 10**12
    assert WorkerIdentity(role="actor").clock_domain == clock.domain() != "elsewhere"
