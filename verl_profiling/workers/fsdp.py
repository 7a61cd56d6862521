"""The mixin for FSDP workers: rank and parallel coordinates from torch.distributed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl_profiling.errors import CaptureStateError
from verl_profiling.ranks import process_rank
from verl_profiling.settings.config import ProfilingConfig
from verl_profiling.workers.base import CaptureMixin

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["FSDPCaptureMixin"]


class FSDPCaptureMixin(CaptureMixin):
    """A :class:`CaptureMixin` that reads rank and coordinates from process group and device mesh."""

    def init_capture(  # type: ignore[override]
        self,
        config: ProfilingConfig | Mapping[str, Any] | None,
        *,
        role: str,
        rank: int | None = None,
        world_size: int | None = None,
        mesh: DeviceMesh | None = None,
    ) -> None:
        """Set this worker up, after ``torch.distributed.init_process_group``.

        Args:
            config: The same settings as the callback's.
            role: Role of the worker group, e.g. ``actor``.
            rank: Global rank; by default that of the default process group.
            world_size: Number of ranks; by default that of the default process group.
            mesh: The device mesh; its named dimensions become the worker's topology.

        Raises:
            CaptureStateError: There is no process group to read the rank from.
            ConfigError: The settings are wrong.
            ToolUnavailableError: A tool cannot work on this machine.
        """
        if (rank is None or world_size is None) and process_rank() is None:
            raise CaptureStateError(
                f"init_capture(role={role!r}): torch.distributed is not initialised; call it after "
                "init_process_group(), or pass rank and world_size"
            )
        topology, sizes = {}, {}
        if mesh is not None:
            for index, name in enumerate(mesh.mesh_dim_names or ()):
                topology[name], sizes[name] = mesh.get_local_rank(name), mesh.size(index)
        super().init_capture(
            config, role=role, rank=rank, world_size=world_size, topology=topology, sizes=sizes
        )
