"""Which way: choosing an algorithm for a problem, explaining, measuring and remembering it."""
