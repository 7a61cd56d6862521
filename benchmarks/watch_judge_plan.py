"""What a loop of ``watch_judge.py`` is told: how long its work takes,
what goes wrong in it, and when.
"""

from __future__ import annotations

import json
import logging
import os
import random
import re
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

__all__ = ["LOG", "Plan"]

PLAN, LOG = "plan.json", "log.txt"
SAID = re.compile(r"WARNING verl_profiling\S* watch: step (\d+)")
"""What the log says of something that the watch noticed."""

SPREAD = 0.05
"""Standard deviation of the logarithm of every time."""


@dataclass(frozen=True)
class Plan:
    """One run of a loop.

    Attributes:
        folder: Where the run leaves what it leaves.
        what: What goes wrong: the name of a piece of work, with the number of its process where it
            is one's.
        by: By which factor that is longer.
        hang_s: How long it hangs in its first faulty step, instead.
        begin: The first faulty step.
        every: Only every so-manieth step is faulty.
        until: The step in which it is repaired; 0: never.
        again: The first step of the same fault after its repair; 0: none.
        slots: How many trajectories of an agent loop may run at a time; 0: all.
        split: Training ranks mark computing and the all-reduce as stages of their own.
        marked: Whether the trajectories are in a stage of their agent loop; ``None``: as the loop
            has it.
        tool_s: How long a call of the tool usually takes.
        steps: Length of the run.
    """

    folder: str
    what: str = ""
    by: float = 1.0
    hang_s: float = 0.0
    begin: int = 15
    every: int = 1
    until: int = 0
    again: int = 0
    slots: int = 0
    split: bool = False
    marked: bool | None = None
    tool_s: float = 0.01
    steps: int = 40

    def seconds(self, usual_s: float, step: int, *names: str) -> float:
        """Return how long a piece of work takes in a step; it goes by several names."""
        usual_s *= random.lognormvariate(0, SPREAD)
        if self.what not in names or not self.is_faulty(step):
            return usual_s
        if self.hang_s:
            return usual_s + (self.hang_s if step == self.begin else 0.0)
        return usual_s * self.by

    def is_faulty(self, step: int) -> bool:
        """Return whether the fault is there in a step."""
        if self.until and self.until <= step and not 0 < self.again <= step:
            return False
        return step >= self.begin and (step - self.begin) % self.every == 0

    def goes_on(self, step: int) -> bool:
        """Return whether the loop has this step;
        the last ones wait for a capture that was asked for.
        """
        if step > 4 * self.steps or not self.what:
            return step <= self.steps
        return step <= self.steps or (
            any(map(self.may_be_it, self.noticed())) and not self.captured()
        )

    def may_be_it(self, step: int) -> bool:
        """Return whether what is noticed in a step may be the fault:
        a hang is over in the next one.
        """
        repaired = self.until and self.until <= step < self.again
        return (
            bool(self.what)
            and step >= self.begin
            and not repaired
            and not (self.hang_s and step > self.begin + 1)
        )

    def noticed(self) -> list[int]:
        """Return the steps in which the watch noticed something, as the log says."""
        return sorted({int(step) for step in SAID.findall(Path(self.folder, LOG).read_text())})

    def captured(self) -> list[Path]:
        """Return the folders of captures that the watch asked for because
        of what may be the fault.
        """
        found = []
        for path in sorted(Path(self.folder).glob("run/step_*/manifest.json")):
            trigger = json.loads(path.read_text()).get("trigger", {})
            if trigger.get("kind") == "anomaly" and self.may_be_it(trigger.get("noticed") or 0):
                found.append(path.parent)
        return found

    def config(self) -> dict[str, Any]:
        """Return the settings that docs/watch.md begins with, for captures one after another."""
        return {
            "enable": True,
            "save_path": f"{self.folder}/run",
            "schedule": {"steps": []},
            "watch": {"enable": True, "trigger": {"cooldown": 0}},
            "roles": {"rollout": {"tool": "spans"}},  # the engines are their own
        }

    def write(self) -> None:
        """Leave it for the program of the loop."""
        Path(self.folder, PLAN).write_text(json.dumps(asdict(self)))

    @classmethod
    def begin_run(cls) -> Plan:
        """Return the plan that the program was given, and let it log as programs do."""
        logging.basicConfig(format="%(created).3f %(levelname)s %(name)s: %(message)s")
        plan = cls(**json.loads(Path(sys.argv[1], PLAN).read_text()))
        random.seed(f"{plan.what} {os.environ.get('RANK', '')}")
        return plan
