"""What one capture does differently from the settings: it is aimed at something."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

__all__ = ["Aim"]

_Names = Annotated[
    tuple[Annotated[str, msgspec.Meta(min_length=1, max_length=200)], ...],
    msgspec.Meta(min_length=1, max_length=64),
]
_Numbers = Annotated[
    tuple[Annotated[int, msgspec.Meta(ge=0, lt=1 << 20)], ...], msgspec.Meta(min_length=1, max_length=4096)
]


class Aim(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """What one capture does differently from the settings. ``None``: as they say.

    A role that records trajectories goes on with its own tools and mode, unless ``roles`` names it.

    Attributes:
        mode: ``e2e`` or ``discrete``, in all roles.
        tools: Names of the tools that record, in all roles.
        roles: The roles that take part, also ones that the settings leave out.
        ranks: Global accelerator ranks inside the role, also ones that the settings leave out.
        replicas: Rollout replicas; ``ranks`` are those of the other roles then.
        stages: The stages that are recorded, in discrete mode.
    """

    mode: Literal["e2e", "discrete"] | None = None
    tools: _Names | None = None
    roles: _Names | None = None
    ranks: _Numbers | None = None
    replicas: _Numbers | None = None
    stages: _Names | None = None

    def in_words(self) -> str:
        """Return what it says, as settings are written: ``mode=discrete, ranks=0,3``; empty if nothing."""
        said = ((name, getattr(self, name)) for name in self.__struct_fields__)
        return ", ".join(
            f"{name}={value if isinstance(value, str) else ','.join(map(str, value))}"
            for name, value in said
            if value is not None
        )
