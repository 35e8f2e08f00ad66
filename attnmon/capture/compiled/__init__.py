"""Attention calls inside compiled graphs."""
