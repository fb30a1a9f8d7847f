"""Paged attention: the geometry of a step, and backends that read K and V by block table."""
