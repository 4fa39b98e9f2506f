"""How workers come to be: spawned here, or a list of addresses."""
