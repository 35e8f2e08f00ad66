"""One file for each way in which models call attention."""
