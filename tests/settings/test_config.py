"""Settings: what is accepted, and that everything else is an error naming its key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import OmegaConf

import verl_profiling
from verl_profiling import ConfigError, ProfilingConfig
from verl_profiling.files.watch_signs import SIGNS
from verl_profiling.settings.config import Anomaly, Timeouts
from verl_profiling.settings.roles import Limits, RoleOverride, Selection
from verl_profiling.settings.schedule import Schedule

GROUP = Path(verl_profiling.__file__).parent / "conf" / "profiling"


def on(**settings: Any) -> ProfilingConfig:
    return ProfilingConfig.from_any({"enable": True, **settings})


def test_nothing_is_profiled_by_default() -> None:
    """Disabled settings load no tool, and options of a known tool that is not used are accepted."""
    assert ProfilingConfig.from_any(None) == ProfilingConfig.from_any({}) == ProfilingConfig()
    assert not ProfilingConfig().enable
    assert on(tool="spans", tools={"torch": {"stack": True}}).tools == {"torch": {"stack": True}}
    assert not ProfilingConfig.from_any({"enable": False, "tool": "not_installed:Tool"}).enable
    with pytest.raises(ConfigError):
        ProfilingConfig.from_any({"enable": False, "enbale": True})


WRONG: list[tuple[Any, str, str]] = [
    # settings, dotted key, part of the message
    ({"enbale": True}, "enbale", "did you mean 'enable'?"),
    ({"tools": {"torch": {"stacks": True}}}, "tools.torch.stacks", "did you mean 'stack'?"),
    (
        {"roles": {"actor": {"tools": {"torch": {"a": 1}}}}},
        "roles.actor.tools.torch.a",
        "choose from: ",
    ),
    ({"tools": {"nsight": {}}}, "tools.nsight", "no tool of that name is used"),
    ({"tool": "troch"}, "tool", "did you mean 'torch'?"),
    ({"tool": "no_such_module:Tool"}, "tool", "No module named 'no_such_module'"),
    ({"tool": "pathlib:Path"}, "tool", "is not a subclass of verl_profiling.tools.Tool"),
    ({"tool": []}, "tool", "is empty"),
    ({"tool": ["torch", "torch"]}, "tool", "has a tool twice"),
    ({"tool": ["nsys", "torch"]}, "tool", "nsys cannot record together with torch"),
    ({"tool": ["torch", "precision"]}, "tool", "precision cannot record together with torch"),
    *(
        ({"tool": tool, "tools": {tool: options}}, f"tools.{tool}.{key}", part)
        for tool, options, key, part in (
            ("nsys", {"arguments": {"o": "x"}}, "arguments.o", "is set by the tool itself"),
            ("npu", {"activities": []}, "activities", "is empty"),
            ("npu", {"export": ["db"]}, "export", "must contain 'text'"),
            (
                "npu",
                {"level": "level0", "aic_metrics": "Memory"},
                "aic_metrics",
                "needs level1 or level2",
            ),
            ("npu", {"level": "none", "mstx": False}, "level", "mstx is false"),
            ("precision", {"task": "structure"}, "level", "must be L0 or mix"),
            ("trajectories", {"max_spans": 0}, "max_spans", "at least 1"),
        )
    ),
    ({"mode": "both"}, "mode", "choose from: e2e, discrete"),
    ({"save_path": ""}, "save_path", "is empty"),
    ({"schedule": []}, "schedule", "must be a mapping, is list; its keys: steps, every, "),
    ({"schedule": {"steps": []}}, "schedule.steps", "nothing would be captured"),
    ({"watch": {"sinks": "tensorboard"}}, "watch.sinks", "write a list: [tensorboard]"),
    (
        {"watch": {"trigger": {"slow_stage": float("nan")}}},
        "watch.trigger.slow_stage",
        "greater than 1, is nan",
    ),
    ({"schedule": {"steps": [-1]}}, "schedule.steps", "must be at least 0, is [-1]"),
    ({"schedule": {"steps": [1], "every": 2}}, "schedule.steps", "excludes schedule.every"),
    ({"schedule": {"every": 2, "wait": 2}}, "schedule.every", "excludes schedule.wait"),
    ({"schedule": {"every": 0}}, "schedule.every", "must be at least 1, is 0"),
    ({"schedule": {"continuous": True}}, "schedule.continuous", "one capture without an end"),
    ({"select": {"ranks": "a"}}, "select.ranks", "'a' is not a list of ranks"),
    ({"select": {"ranks": "5-2"}}, "select.ranks", "'5-2' is not a range of ranks"),
    ({"select": {"ranks": "0-99999999999"}}, "select.ranks", "is not a range of ranks"),
    ({"select": {"ranks": []}}, "select.ranks", "selects nothing"),
    ({"select": {"ranks": -1}}, "select.ranks", "rank -1 is negative"),
    ({"select": {"roles": "actor"}}, "select.roles", "Expected `array"),
    ({"roles": {"actor": {"ranks": "x"}}}, "roles.actor.ranks", "is not a list of ranks"),
    ({"roles": {"actor": 3}}, "roles.actor", "must be a mapping, is int"),
    ({"tools": {"torch": {"stack": 1}}}, "tools.torch.stack", "Expected `bool`"),
    ({"timeouts": {"stop_s": 0}}, "timeouts.stop_s", "must be greater than 0, is 0"),
    ({"timeouts": {"start_s": float("inf")}}, "timeouts.start_s", "must be at most"),
    ({"save_path": "a\0b"}, "save_path", "holds a NUL character"),
    ({"save_path": "$NO_SUCH_VARIABLE/x"}, "save_path", "$NO_SUCH_VARIABLE in"),
    ({"save_path": "~nobody-of-that-name/x"}, "save_path", "~ in"),
    ({"rollout": {"count": 0}}, "rollout.count", "must be at least 1, is 0"),
    ({"run_id": ""}, "run_id", "is empty"),
    ({"limits": {"min_free_bytes": "much"}}, "limits.min_free_bytes", "'much' is not a size"),
    ({"limits": {"min_free_bytes": -1}}, "limits.min_free_bytes", "must be at least 0, is -1"),
    ({"limits": {"keep_last": 0}}, "limits.keep_last", "must be at least 1, is 0"),
    ({"limits": {"memory_share": 0}}, "limits.memory_share", "must be greater than 0, is 0"),
    *(
        ({"after": {"x": {"command": ["a"], **hook}}}, f"after.x.{key}", "")
        for hook, key in (
            ({"command": []}, "command"),
            ({"ranks": "x"}, "ranks"),
            ({"roles": []}, "roles"),
        )
    ),
    ({"after": {"x": {}}}, "after.x.command", ""),
    *(
        ({"tool": "spans", "save_path": "memory://bucket/run", **given}, key, part)
        for given, key, part in (
            ({"tool": "nsys"}, "tool", "nsys writes after processes have ended"),
            (
                {"limits": {"keep_last": 3}},
                "limits.keep_last",
                "removes old captures of a local folder",
            ),
            ({"remote": {"staging": "here"}}, "remote.staging", ""),
        )
    ),
    ({"select": {"pp": "x"}}, "select.pp", ""),
    ({1: 2}, "1", "unknown key"),
    (3, "", "must be a mapping, is int"),
]


@pytest.mark.parametrize(
    ("settings", "key", "part"), WRONG, ids=[f"{key}-{n}" for n, (_, key, _) in enumerate(WRONG)]
)
def test_a_wrong_value_names_its_key_and_the_remedy(settings: Any, key: str, part: str) -> None:
    """Every class of mistake is a ``ConfigError`` with the dotted key of the culprit."""
    if isinstance(settings, dict):
        settings = {"enable": True, **settings}
    with pytest.raises(ConfigError) as caught:
        ProfilingConfig.from_any(settings)
    assert caught.value.key == key
    assert part in str(caught.value)
    assert str(caught.value).startswith(f"{key}: " if key else "must be")


@pytest.mark.parametrize(
    ("keywords", "key"),
    [
        ({"enable": "yes"}, "enable"),
        ({"save_path": None}, "save_path"),
        ({"select": Selection(ranks=1.5)}, "select.ranks"),  # type: ignore[arg-type]
        ({"roles": {"actor": RoleOverride(mode="both")}}, "roles.actor.mode"),  # type: ignore[arg-type]
    ],
)
def test_keywords_are_checked_like_a_dict(keywords: dict[str, Any], key: str) -> None:
    """A mistyped keyword is found at once, not in the middle of training."""
    with pytest.raises(ConfigError) as caught:
        ProfilingConfig(**{"enable": True, **keywords})
    assert caught.value.key == key


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        (
            {"watch": {"enable": True, "trigger": {}}},
            ["watch.trigger: never requests", "schedule.steps=[]"],
        ),
        (
            {"watch": {"enable": True, "trigger": {}}, "schedule": {"every": 1}},
            ["captures every step", "schedule.every"],
        ),
        (
            {"watch": {"trigger": {}, "sinks": ["tensorboard"]}},
            ["watch.trigger and watch.sinks", "watch.enable"],
        ),
    ],
)
def test_settings_that_cannot_do_what_they_say_are_a_caution(
    settings: dict[str, Any], parts: list[str]
) -> None:
    """A watch that judges no step, and one that is off."""
    [caution] = on(**settings).cautions(has_engines=False)
    assert all(part in caution for part in parts), caution


def test_a_role_overrides_what_it_names_and_nothing_else() -> None:
    config = on(
        mode="e2e",
        select={"ranks": "0-3", "stages": ["update_actor"]},
        tools={"torch": {"shapes": True, "stack": True}},
        roles={
            "rollout": {"mode": "discrete", "ranks": "7", "tools": {"torch": {"stack": False}}},
            "ref": {"enable": False},
            "critic": {"tool": "spans", "stages": ["update_critic"]},
        },
    )
    actor, rollout, ref, critic = (
        config.for_role(role) for role in ("actor", "rollout", "ref", "critic")
    )
    assert (actor.mode, actor.ranks, actor.stages) == (
        "e2e",
        frozenset(range(4)),
        frozenset({"update_actor"}),
    )
    assert actor.tools[0].options.stack
    assert (rollout.mode, rollout.ranks) == ("discrete", frozenset({7}))
    assert rollout.tools[0].options.shapes
    assert not rollout.tools[0].options.stack
    assert not ref.enable
    assert critic.tools[0].name == "spans"
    assert critic.stages == frozenset({"update_critic"})
    assert critic.ranks == frozenset(range(4))


def test_a_worker_is_selected_by_rank_and_replica() -> None:
    """Both have to match where they are given; ranks are text, a number or a list,
    and nothing means all.
    """
    role = on(select={"ranks": "0,8-15", "replicas": "1"}).for_role("rollout")
    assert [rank for rank in range(20) if role.selects(rank)] == [0, *range(8, 16)]
    assert role.selects(8, replica=1)
    assert not role.selects(8, replica=0)
    assert not role.selects(1, replica=1)
    assert not on(select={"roles": ["x"]}).for_role("actor").selects(0)
    for ranks, expected in (
        (" 0, 2-4 ,9", {0, 2, 3, 4, 9}),
        (3, {3}),
        ((1, 2, 2), {1, 2}),
        (None, None),
    ):
        assert on(select={"ranks": ranks}).for_role("actor").ranks == expected


def test_an_omegaconf_config_is_taken_with_its_interpolations() -> None:
    """A ``DictConfig`` is resolved; what OmegaConf cannot resolve is
    reported like any other mistake.
    """
    plain = {"enable": True, "save_path": "runs/x", "schedule": {"steps": [2, 3]}}
    node = OmegaConf.create({"root": "runs", "p": {**plain, "save_path": "${root}/x"}})
    assert ProfilingConfig.from_any(node.p) == ProfilingConfig.from_any(plain)
    node = OmegaConf.create({"enable": True, "save_path": "${nowhere}/x"})
    with pytest.raises(ConfigError, match="nowhere"):
        ProfilingConfig.from_any(node)


def compose(*overrides: str) -> ProfilingConfig:
    """Compose a main config that takes its ``profiling`` group from the package."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir

    folder = Path(__file__).parent / "conf"
    with initialize_config_dir(str(folder), version_base=None):
        return ProfilingConfig.from_any(hydra_compose("main", list(overrides)).profiling)


def test_hydra_finds_the_group_and_reaches_every_level() -> None:
    """``pkg://verl_profiling.conf`` is all that a config needs;
    new role and tool entries are overrides.
    """
    assert compose() == on()
    assert compose("profiling=discrete").mode == "discrete"
    assert compose("profiling=e2e").mode == "e2e"
    assert not compose("profiling=off").enable
    watched = on(schedule={"steps": []}, watch={"enable": True, "trigger": {}})
    assert compose("profiling=watch") == watched
    config = compose(
        "profiling=discrete",
        "profiling.schedule.steps=[2,3]",
        "profiling.select.ranks='0,8-15'",
        "+profiling.roles.rollout={mode: e2e, ranks: '0'}",
        "+profiling.tools.torch.stack=true",
        "profiling.timeouts.stop_s=5",
    )
    assert config == on(
        mode="discrete",
        schedule={"steps": [2, 3]},
        select={"ranks": "0,8-15"},
        roles={"rollout": {"mode": "e2e", "ranks": "0"}},
        tools={"torch": {"stack": True}},
        timeouts={"stop_s": 5},
    )


@pytest.mark.parametrize("steps", ["'2,3'", "2"])
def test_a_mistyped_override_is_found(steps: str) -> None:
    """What the command line gets wrong is an error that names the key."""
    with pytest.raises(ConfigError, match=r"^schedule\.steps: "):
        compose(f"profiling.schedule.steps={steps}")


def test_the_yaml_lists_every_setting_with_its_default() -> None:
    """``default.yaml`` and the dataclasses are the same, but for ``enable``."""
    written = OmegaConf.to_container(OmegaConf.load(GROUP / "default.yaml"))
    assert isinstance(written, dict)
    assert written.pop("enable") is True
    defaults = ProfilingConfig().to_dict()
    defaults.pop("enable")
    assert written == defaults


def test_each_sign_of_the_watch_has_its_threshold_in_the_daily_tool() -> None:
    """``watch.yaml`` lists the defaults, so that one can be overridden by its name alone."""
    trigger = OmegaConf.to_container(OmegaConf.load(GROUP / "watch.yaml").watch.trigger)
    assert trigger == dataclasses.asdict(Anomaly())
    assert [*trigger][: len(SIGNS)] == [*SIGNS]


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=12,
)
names = st.sampled_from(["torch", "spans", "torch:x", ":", "actor", "0-3", "e2e", "1,2", ""])


def fields_of(cls: type, values: Any = names | json_like) -> st.SearchStrategy[dict[str, Any]]:
    """Return mappings with the right keys and anything as values."""
    keys = [field.name for field in dataclasses.fields(cls)]
    return st.dictionaries(st.sampled_from(keys), values, max_size=4)


values = (
    names
    | json_like
    | st.lists(names, max_size=2)
    | fields_of(Schedule)
    | fields_of(Selection)
    | st.dictionaries(names, fields_of(RoleOverride) | json_like, max_size=2)
    | fields_of(Timeouts)
)


@given(fields_of(ProfilingConfig, values) | json_like)
def test_any_input_gives_settings_or_a_config_error(settings: Any) -> None:
    """Nothing a JSON file can hold makes ``from_any`` raise anything else."""
    try:
        config = ProfilingConfig.from_any(settings)
    except ConfigError:
        return
    assert ProfilingConfig.from_any(config.to_dict()) == config


def test_a_save_path_may_be_a_path(tmp_path: Path) -> None:
    assert ProfilingConfig(save_path=tmp_path).save_path == str(tmp_path)  # type: ignore[arg-type]


def test_a_save_path_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As a shell does it, so that no folder is called ``~`` or ``$SCRATCH``."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SCRATCH", "fast")
    assert ProfilingConfig(save_path="~/$SCRATCH/${SCRATCH}").save_path == f"{tmp_path}/fast/fast"


@pytest.mark.parametrize(
    ("written", "size"),
    [
        ("1234", 1234),
        ("1.5 TB", 1_500_000_000_000),
        ("512MiB", 512 << 20),
        ("3g", 3_000_000_000),
        (numpy.int64(7), 7),
    ],
)
def test_a_size_is_a_number_or_has_a_unit(written: Any, size: int) -> None:
    limits = on(limits={"min_free_bytes": written}).limits
    assert limits.min_free_bytes == size
    assert type(limits.min_free_bytes) is int
    assert ProfilingConfig(limits=Limits(min_free_bytes=written)).limits.min_free_bytes == size


@pytest.mark.parametrize("steps", [numpy.arange(2, 4), [numpy.int64(2), 3], range(2, 4)])
def test_numbers_of_numpy_are_numbers(steps: Any) -> None:
    """They become plain ones, which a run's file can hold."""
    config = on(schedule={"steps": steps})
    assert config.schedule.steps == (2, 3)
    assert {type(step) for step in config.schedule.steps} == {int}
    assert on(schedule={"every": numpy.int32(5)}).schedule.every == 5
