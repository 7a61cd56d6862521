"""What the user asked for, checked once, before anything is built."""
