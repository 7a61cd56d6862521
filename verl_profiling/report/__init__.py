"""Builds the report of a step: how its lanes spent their time; and shows it in each format."""
