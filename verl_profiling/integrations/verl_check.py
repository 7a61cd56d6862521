"""Checks a command before it is queued: ``python -m verl_profiling.integrations.verl_check ARGUMENTS``.

Takes the arguments of ``verl.trainer.main_ppo``, composes its configuration, and lets verl and this
package check it. Nothing is started, and no accelerator is needed.
"""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from typing import Any

import hydra
from verl.trainer.ppo.utils import need_critic, need_reference_policy
from verl.utils.config import validate_config

from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.integrations.hooks import Hook, misfits, usable
from verl_profiling.integrations.verl_config import settings_of
from verl_profiling.integrations.verl_nsys import expected_ranges
from verl_profiling.integrations.verl_rollout import check_installed_engine

_PLUGIN = "verl_profiling.integrations.verl"


@hydra.main(config_path="pkg://verl.trainer.config", config_name="ppo_trainer", version_base=None)
def main(config: Any) -> None:
    """Print the command and what it would profile; exit with an error that names the key."""
    print(shlex.join(["python", "-m", "verl.trainer.main_ppo", *sys.argv[1:]]))
    if config.get("profiling") is not None:
        _check_hooks(config)
    validate_config(
        config=config, use_reference_policy=need_reference_policy(config), use_critic=need_critic(config)
    )
    try:
        settings = settings_of(config)
        unchecked = "" if settings is None else check_installed_engine(config, settings)
    except (ConfigError, ToolUnavailableError) as error:
        sys.exit(f"profiling: {error}")
    if settings is None:
        print("config ok; nothing is profiled")
        return
    if unchecked:
        print(f"not checked: {unchecked}")
    there = {
        "actor": True,
        "ref": need_reference_policy(config),
        "critic": need_critic(config),
        "rollout": True,
        "agent_loop": True,
        "reward": True,
    }
    roles = [role for role, exists in there.items() if exists and settings.for_role(role).enable]
    print(f"config ok; {settings.mode} profile of {', '.join(roles)} in {settings.save_path}")
    ranges = expected_ranges(config, settings)
    if under_nsys := [f"{role} ({ranges[role]} ranges)" for role in roles if role in ranges]:
        print(f"started under Nsight Systems: {', '.join(under_nsys)}")


def _check_hooks(config: Any) -> None:
    """Print whether verl was tested, and what each hook finds; exit if nothing would be recorded."""
    loaded = _PLUGIN in sys.modules
    from verl_profiling.integrations.verl import HOOKS, untested

    print(f"warning: {text}" if (text := untested()) else "a tested version of verl")
    used = [hook for hook in HOOKS if hook.used_by(config)]
    for hook in used:
        print(f"{_state(hook):24} {hook.module}: {hook.records}")
    for text in misfits(config):
        print(f"warning: {text}")
    if not loaded:
        sys.exit(
            "profiling: verl does not load verl_profiling, and would not profile; install the package into "
            f"verl's environment, or set VERL_USE_EXTERNAL_MODULES={_PLUGIN}"
        )
    if not usable(config):
        sys.exit("profiling: nothing would be recorded")


def _state(hook: Hook) -> str:
    """Return how a hook fits the module, which is imported for it."""
    try:
        import_module(hook.module)
    except Exception as error:
        if hook.problem is None:
            return f"not tried ({type(error).__name__}: {error})"
    if hook.problem is None:
        return "ok"
    return "does not fit" if hook.missing else "not in this verl"


if __name__ == "__main__":
    main()
