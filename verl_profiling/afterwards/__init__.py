"""What happens after a capture: work in the background, and the user's hooks."""
