"""Export of plans to the formats of other tools."""
