"""Lets SGLang start on a machine without an accelerator: put this folder on PYTHONPATH.

SGLang imports its kernels and torchvision wherever it runs, and has no CPU wheel of either. Its
torch-native attention on CPU calls neither, so names that can be imported are enough. Python
imports this module by itself in every process, the engine's schedulers included. A package
that is really installed is left alone.
"""

import enum
import sys
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

ABSENT = {
    "sgl_kernel": ("flash_attn", "flash_mla", "kvcacheio", "sparse_flash_attn", "speculative"),
    "torchvision": (
        "io",
        "transforms",
        "transforms.functional",
        "transforms.v2",
        "transforms.v2.functional",
    ),
}


class Interpolation(enum.Enum):
    """A name that transformers looks up when it is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class AbsentModule(ModuleType):
    """A module that has every name; using one raises."""

    __path__: list[str] = []
    __version__ = "0.0.0"
    InterpolationMode = Interpolation

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)

        def refuse(*_: object, **__: object) -> None:
            raise NotImplementedError(f"{self.__name__}.{name} is not installed on this machine")

        return type(name, (), {"__init__": refuse})


class AbsentFinder:
    """Finds the modules that SGLang imports unconditionally;
    for all others it checks whether they exist.
    """

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        """Return a spec for a module of an absent package."""
        if name not in absent:
            return None
        return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Make the module."""
        return AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Leave it as it is."""


absent = {
    ".".join(filter(None, (package, module)))
    for package, modules in ABSENT.items()
    for module in ("", *modules)
    if PathFinder.find_spec(package) is None
}
if not any(isinstance(finder, AbsentFinder) for finder in sys.meta_path):
    sys.meta_path.append(AbsentFinder())
