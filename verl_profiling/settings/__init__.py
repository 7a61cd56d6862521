"""The settings of the user, checked once, before anything is built."""
