"""How fast a flock would be before there is one: hardware as data, a step by part, what would change it."""
