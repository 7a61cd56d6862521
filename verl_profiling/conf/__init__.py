"""Hydra config group ``profiling``; our Hydra plugin puts it on the search path
of every application.
"""
