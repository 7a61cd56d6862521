"""Notices what a step has that the steps before it had not. It looks at accounts, and at nothing else."""

from __future__ import annotations

from math import inf

from verl_profiling.settings.watch import Anomaly
from verl_profiling.step_account import StepAccount
from verl_profiling.watch.growth import Growth
from verl_profiling.watch.leading import Leading
from verl_profiling.watch.slowness import Slowness
from verl_profiling.watch.span_growth import SpanGrowth
from verl_profiling.watch.suspicion import Suspicion

__all__ = ["Detector"]


class _Latest:
    """The latest step so far: by its number, or by its begin where a loop comes to a step again."""

    def __init__(self) -> None:
        self._step = self._begin_ns = -inf

    def is_passed_by(self, account: StepAccount) -> bool:
        """Return whether a step is later, also if the clock was set back; then it is the latest."""
        later = account.step > self._step or account.begin_ns > self._begin_ns
        self._step, self._begin_ns = max(self._step, account.step), max(self._begin_ns, account.begin_ns)
        return later


class Detector:
    """Judges the account of every step by those of the steps before it.

    An account may come twice: when the step ends, without its workers, and with them. Its times are judged
    once; with the workers it is known whom they come from, who leads, and whose memory grows. Steps that are
    captured are not judged: what that costs is in their times.

    Args:
        options: From where on something is a sign.
    """

    def __init__(self, options: Anomaly) -> None:
        self._own = Slowness(options)
        self._all = Slowness(options)
        self._leading = Leading(options)
        self._growth = Growth(options)
        self._spans = SpanGrowth(options)
        self._judged = _Latest()
        self._read = _Latest()
        self._unaimed: Suspicion | None = None
        self._before: StepAccount | None = None

    def observe(self, account: StepAccount) -> Suspicion | None:
        """Return what is noticed in a step, if anything is; it costs as much as the window is long.

        What was noticed when a step ended is returned again, aimed, when its workers are known. In a loop of
        several ranks it is then noticed by the times of all of them.

        Args:
            account: The next step, or one before it again, now with its workers.
        """
        if account.captured:
            self._before = account
            return None
        found = None
        several = len(account.loop) > 1
        if not several and self._judged.is_passed_by(account):
            found = self._own.observe(account)
            self._unaimed = found if found is not None and not found.aimed else self._unaimed
        if not (account.workers or several):
            return found
        if self._unaimed is not None and self._unaimed.step == account.step:
            found, self._unaimed = self._unaimed.aimed_with(account, self._before), None
            found = self._spans.explained(found, account, self._before)
        if not self._read.is_passed_by(account):
            return found
        if several and (slow := self._all.observe(account)) is not None:
            found = slow if slow.aimed else slow.aimed_with(account, self._before)
            found = self._spans.explained(found, account, self._before)
        self._spans.observe(account)
        leading = self._leading.observe(account, self._before, quiet=found is not None)
        growing = self._growth.observe(account, quiet=(found or leading) is not None)
        self._before = account
        return found or leading or growing
