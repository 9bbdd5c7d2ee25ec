"""What is computed: descriptors, problems and float64 references. Pure Python and NumPy."""
