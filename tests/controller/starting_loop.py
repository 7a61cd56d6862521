"""A loop with a slow import before this package, and one after it."""

import sys
import time

time.sleep(0.6)  # an import

from verl_profiling import ProfilingCallback  # noqa: E402

watch = {"enable": True}
config = {"enable": True, "save_path": sys.argv[1], "schedule": {"steps": []}, "watch": watch}
with ProfilingCallback(config) as callback:
    callback.on_step_begin(1)
    callback.on_step_end()
