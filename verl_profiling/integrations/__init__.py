"""Integrations with training frameworks; each is loaded only where its framework runs."""
