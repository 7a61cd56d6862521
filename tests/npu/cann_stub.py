"""Builds stand-ins for the CANN libraries, so that the real torch_npu wheel loads
without hardware.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path

_IMPORTED = re.compile(r"^(acl|hal|Hccl|Msprof|rt[A-Z])\w*$")
_LOOKED_UP = re.compile(rb"\0((?:aclprof|aclrt|aclop|acl[A-Z]|mstx)[A-Za-z0-9]+)(?=\0)")
_LOADED_BY_NAME = (
    "libmsprofiler.so",
    "libms_tools_ext.so",
    "libascend_hal.so",
    "libacl_tdt_channel.so",
)

_WITH_RESULTS = {
    "aclrtGetDeviceCount": "int aclrtGetDeviceCount(unsigned *count) { *count = 1; return 0; }",
    "aclrtGetDevice": "int aclrtGetDevice(int *device) { *device = 0; return 0; }",
    "aclrtGetSocName": 'const char *aclrtGetSocName(void) { return "Ascend910B1"; }',
    "aclGetRecentErrMsg": 'const char *aclGetRecentErrMsg(void) { return "no error: a stand-in"; }',
    "aclGetCompileoptSize": "size_t aclGetCompileoptSize(int option) { return 8; }",
    "aclGetCompileopt": (
        "int aclGetCompileopt(int option, char *value, size_t size) { *value = 0; return 0; }"
    ),
    "aclopCreateAttr": "void *aclopCreateAttr(void) { return 0; }",
    "aclrtCreateStream": "int aclrtCreateStream(void **stream) { *stream = cell; return 0; }",
    "aclrtCreateStreamWithConfig": (
        "int aclrtCreateStreamWithConfig(void **stream, unsigned a, unsigned b) { *stream = "
        "cell; return 0; }"
    ),
    "aclrtGetCurrentContext": "int aclrtGetCurrentContext(void **context) { *context = "
    "cell; return 0; }",
    "aclrtGetMemInfo": (
        "int aclrtGetMemInfo(int kind, size_t *left, size_t *all) { *left = *all = 1UL << "
        "30; return 0; }"
    ),
    "aclprofCreateConfig": "void *aclprofCreateConfig(void) { return cell; }",
    "mstxDomainCreateA": "void *mstxDomainCreateA(const char *name) { note(name); return cell; }",
    "mstxRangeStartA": "unsigned long mstxRangeStartA(const char *text, void *stream) { "
    "return ++ranges; }",
    "mstxDomainRangeStartA": (
        "unsigned long mstxDomainRangeStartA(void *domain, const char *message, void *stream)"
        " { note(message); return ++ranges; }"
    ),
    "mstxDomainRangeEnd": "int mstxDomainRangeEnd(void *domain, unsigned long id) { "
    'note("end"); return 0; }',
    "MsprofGetHashId": "unsigned long MsprofGetHashId(const char *text, size_t length) { "
    "return 1; }",
    "MsprofSysCycleTime": "unsigned long MsprofSysCycleTime(void) { return 0; }",
}
_PREAMBLE = """\
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
static char cell[64];
static unsigned long ranges;
static void note(const char *text) {
    const char *path = getenv("CANN_STUB_LOG");
    FILE *log = path ? fopen(path, "a") : 0;
    if (log) { fprintf(log, "%s\\n", text); fclose(log); }
}
"""


def build(folder: Path) -> None:
    """Write the stand-in libraries into ``folder``, for ``LD_LIBRARY_PATH``."""
    spec = importlib.util.find_spec("torch_npu")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("torch_npu is not installed")
    libraries = sorted((Path(spec.origin).parent / "lib").glob("lib*npu*.so"))
    functions: set[str] = set(_WITH_RESULTS)
    needed: set[str] = set(_LOADED_BY_NAME)
    for library in libraries:
        wanted = _output("nm", "-D", "--undefined-only", str(library)).split()
        functions.update(name for name in wanted if _IMPORTED.match(name))
        functions.update(name.decode() for name in _LOOKED_UP.findall(library.read_bytes()))
        needed.update(re.findall(r"NEEDED.*\[(.+?)\]", _output("readelf", "-d", str(library))))
    source = folder / "stub.c"
    plain = "".join(
        f"int {name}(void) {{ return 0; }}\n" for name in sorted(functions - set(_WITH_RESULTS))
    )
    source.write_text(_PREAMBLE + "\n".join(_WITH_RESULTS.values()) + "\n" + plain)
    stub = folder / "libascendcl.so"
    _output("cc", "-w", "-shared", "-fPIC", "-o", str(stub), str(source))
    for name in sorted(needed):
        if name.startswith(("libacl", "libge", "libgraph", "libhccl", "libms", "libascend_hal")):
            (folder / name).write_bytes(stub.read_bytes())


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
