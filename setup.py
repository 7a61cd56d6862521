"""Shim for tools that still call ``setup.py``; the metadata is in ``setup.cfg``."""

from setuptools import setup

setup()
