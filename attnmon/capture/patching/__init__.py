"""Functions that are replaced while a step is measured."""
