"""Folders of quantised weights: one file for each format, and what finds their matrices."""
