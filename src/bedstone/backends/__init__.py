"""How: one folder per kernel language, the same file names in each."""
