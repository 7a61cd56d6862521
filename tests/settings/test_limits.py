"""The ``limits`` group: sizes as people write them, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy
import pytest
from example_loops import settings

from verl_profiling import ConfigError, ProfilingConfig
from verl_profiling.settings.limits import Limits


@pytest.mark.parametrize(
    ("written", "size"),
    [
        (1234, 1234),
        ("1234", 1234),
        ("1kB", 1000),
        ("2GB", 2_000_000_000),
        ("1.5 TB", 1_500_000_000_000),
        ("512MiB", 512 << 20),
        ("3g", 3_000_000_000),
        (numpy.int64(7), 7),
    ],
)
def test_a_size_is_a_number_or_has_a_unit(written: Any, size: int) -> None:
    """Decimal units, binary ones, and none."""
    limits = settings(limits={"min_free_bytes": written}).limits
    assert limits.min_free_bytes == size
    assert type(limits.min_free_bytes) is int
    assert ProfilingConfig(limits=Limits(min_free_bytes=written)).limits.min_free_bytes == size


@pytest.mark.parametrize(
    ("limits", "key", "part"),
    [
        ({"min_free_bytes": "much"}, "limits.min_free_bytes", "'much' is not a size"),
        ({"min_free_bytes": "-1GB"}, "limits.min_free_bytes", "is not a size"),
        ({"min_free_bytes": 1.5}, "limits.min_free_bytes", "Expected `int"),
        ({"min_free_bytes": True}, "limits.min_free_bytes", "Expected `int"),
        ({"min_free_bytes": -1}, "limits.min_free_bytes", "must be at least 0, is -1"),
        ({"min_free_bytes": None}, "limits.min_free_bytes", "Expected `int`"),
        ({"keep_last": 0}, "limits.keep_last", "must be at least 1, is 0"),
        ({"memory_share": 0}, "limits.memory_share", "must be greater than 0, is 0"),
        ({"keep": 2}, "limits.keep", "unknown key"),
    ],
)
def test_a_wrong_limit_names_its_key(limits: dict[str, Any], key: str, part: str) -> None:
    """As every wrong setting does."""
    with pytest.raises(ConfigError) as caught:
        settings(limits=limits)
    assert caught.value.key == key
    assert part in str(caught.value)


def test_a_store_behind_a_url_is_not_counted() -> None:
    """What lies there is not listed or removed, so such a limit is refused."""
    with pytest.raises(ConfigError, match="counts files of a folder, and save_path is a URL") as caught:
        settings(save_path="memory://bucket/run", limits={"keep_last": 2})
    assert caught.value.key == "limits.keep_last"


def test_the_room_of_a_folder_that_does_not_exist_is_that_of_its_parent(tmp_path: Path) -> None:
    """The sentence names the file system's folder, what is free there, and the key."""
    assert Limits(min_free_bytes=0).no_room(tmp_path / "a" / "b") == ""
    problem = settings(limits={"min_free_bytes": "5000TB"}).limits.no_room(tmp_path / "a" / "b")
    assert problem.startswith(f"{tmp_path} has ")
    assert problem.endswith("of free space, less than limits.min_free_bytes=5,000 TB")


@pytest.mark.parametrize("steps", [numpy.arange(2, 4), [numpy.int64(2), 3], range(2, 4)])
def test_numbers_of_numpy_are_numbers(steps: Any) -> None:
    """They become plain ones, which a run's file can hold."""
    config = settings(schedule={"steps": steps})
    assert config.schedule.steps == (2, 3)
    assert {type(step) for step in config.schedule.steps} == {int}
    assert settings(schedule={"every": numpy.int32(5)}).schedule.every == 5


def test_a_run_id_with_a_nul_character_is_refused() -> None:
    """No file could hold it."""
    with pytest.raises(ConfigError, match="run_id: holds a NUL character"):
        settings(run_id="a\0b")
