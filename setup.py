"""Lists the packages; all other metadata is in ``setup.cfg``."""

from setuptools import find_packages, setup

# Hydra finds plugins in this namespace package only; ``package_dir`` says where ours is.
setup(packages=[*find_packages(include=["verl_profiling*"]), "hydra_plugins"])
