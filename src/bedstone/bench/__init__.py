"""Measuring: problem files, peers, interleaved timing, tables, CSV and plots."""
