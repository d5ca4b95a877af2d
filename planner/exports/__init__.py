"""Plans in the terms of other tools."""
