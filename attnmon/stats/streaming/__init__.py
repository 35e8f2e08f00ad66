"""Statistics in blocks of rows, by plain torch operations on any device."""
