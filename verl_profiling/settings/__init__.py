"""The settings of the user, checked once when they are created."""
