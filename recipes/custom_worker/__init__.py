"""A worker of one's own on verl's single controller."""
