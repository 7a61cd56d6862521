"""Checks a verl command before the job is queued.

The check is a command itself::

    python -m verl_profiling.integrations.verl.dry_run ARGUMENTS

The arguments are those of ``verl.trainer.main_ppo``. Its configuration is composed, and checked by
verl and by this package. Nothing is started, and no accelerator is needed. For another main module,
e.g. your own, use ``dry_run -m verl.experimental.one_step_off_policy.main_ppo ARGUMENTS``. The
module is imported, but its function under ``@hydra.main`` is not called.
"""

from __future__ import annotations

import functools
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import Any

import hydra

from verl_profiling.engines import ENGINES, adapter_named
from verl_profiling.errors import ConfigError, ToolUnavailableError
from verl_profiling.identity import ROLLOUT_ROLE
from verl_profiling.integrations.hooks import misfits, usable
from verl_profiling.integrations.verl import HOOKS, parts_of
from verl_profiling.integrations.verl.bridge import captured_steps, plays, settings_of, why_nothing
from verl_profiling.integrations.verl.versions import untested
from verl_profiling.settings.config import ProfilingConfig

_MAIN = "verl.trainer.main_ppo"
_PLUGIN = "verl_profiling.integrations.verl"


def main() -> None:
    """Check the command; exit with an error that lists the wrong argument."""
    module = _MAIN
    if sys.argv[1:2] == ["-m"]:
        module = sys.argv[2] if len(sys.argv) > 2 else ""
        del sys.argv[1:3]
    checked = _checked_main(module)
    print(shlex.join(["python", "-m", module, *sys.argv[1:]]), flush=True)
    with tempfile.TemporaryDirectory() as outputs:  # of Hydra, which writes some for every command
        sys.argv.append(f"hydra.run.dir={outputs}")
        checked()


def _checked_main(module: str) -> Callable[[], None]:
    """Import a main module, and return its ``@hydra.main`` function with the body :func:`check`."""
    mains: list[Callable[[], None]] = []
    decorator = hydra.main

    def noting(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        def note(task: Any) -> Any:
            if task.__module__ == module:
                # Hydra then looks for the configuration where the run will
                task.__module__ = "__main__"
            checked = functools.wraps(task)(functools.partial(check, module))
            main = decorator(*args, **kwargs)(checked)
            mains.append(main)
            return main

        return note

    hydra.main = noting
    try:
        names = vars(import_module(module)).values()
    except (ImportError, TypeError, ValueError) as error:
        sys.exit(f"-m {module}: cannot be imported: {error}; verl's own is {_MAIN}")
    finally:
        hydra.main = decorator
    for main in reversed(mains):
        if any(main is value for value in names):
            return main
    sys.exit(f"-m {module}: has no function under @hydra.main, and so no configuration to check")


def check(module: str, config: Any) -> None:
    """Print the captures of a command; exit with an error that lists the wrong key.

    Args:
        module: The command's main module.
        config: The composed configuration.
    """
    from verl.utils.config import validate_config

    if "actor_rollout_ref" not in config:
        sys.exit(
            f"-m {module}: is no RL trainer of verl, as its configuration has no "
            "actor_rollout_ref; SFT is "
            "profiled by verl's own profiler (profiler.enable, trainer.profile_interval)"
        )
    if config.get("profiling") is not None:
        _check_hooks(config)
    by_version = "async_training" in config
    possible = ["actor", "ref", "critic", "rollout", "agent_loop", "reward"]
    if by_version:
        possible.append("rollouter")
    roles = [role for role in possible if plays(config, role)]
    if not by_version:  # verl does not validate fully asynchronous configurations
        validate_config(
            config=config, use_reference_policy="ref" in roles, use_critic="critic" in roles
        )
    try:
        settings = settings_of(config)
    except (ConfigError, ToolUnavailableError) as error:
        sys.exit(f"profiling: {str(error).removeprefix('profiling: ')}")
    if settings is None:
        print("config ok; nothing is profiled")
        why = why_nothing(config)
        if why:
            print(f"warning: nothing is profiled: {why}")
        return
    _check_engine(config, settings)
    roles = [role for role in roles if settings.for_role(role).enable]
    named = ", ".join(roles) or "no role"
    print(f"config ok; {settings.mode} profile of {named} in {settings.save_path}")
    # Steps of fully asynchronous trainers are parameter versions, and this is no number of
    # versions.
    last_step = None if by_version else config.trainer.get("total_training_steps")
    print(f"will be captured: {captured_steps(settings.schedule, last_step)} of {named}")


def _check_engine(config: Any, settings: ProfilingConfig) -> None:
    """Exit with an error if the installed engine does not support the settings."""
    try:
        # An engine that is captured and has no adapter was refused before, by `settings_of`.
        if (name := config.actor_rollout_ref.rollout.name) in ENGINES:
            adapter_named(name).engine_args(settings, ROLLOUT_ROLE)
    except ToolUnavailableError as error:  # vLLM may be installed only on the machine of the job
        print(f"not checked: {error}")
    except ConfigError as error:
        sys.exit(f"profiling: {error}")


def _check_hooks(config: Any) -> None:
    """Print whether this verl is tested, and the hooks without a fit;
    exit if nothing would be recorded.
    """
    warning = untested()
    print(f"warning: {warning}" if warning else "a tested version of verl")
    parts = parts_of(config)
    for hook in HOOKS:
        if hook.part in parts:
            with suppress(Exception):  # of a part that is not installed here
                import_module(hook.module)
    for text in misfits(parts):
        print(f"warning: {text}")
    program = f"import sys, verl; sys.exit({_PLUGIN!r} not in sys.modules)"
    if subprocess.run([sys.executable, "-c", program], check=False).returncode:
        sys.exit(
            "profiling: verl does not load verl_profiling, and would not profile; install the "
            f"package into verl's environment, or set VERL_USE_EXTERNAL_MODULES={_PLUGIN}"
        )
    if not usable(parts):
        sys.exit("profiling: nothing would be recorded")


if __name__ == "__main__":
    main()
