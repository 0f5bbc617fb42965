"""Convert user pytrees to and from the neutral tree."""
