"""A custom worker on verl's single controller."""
