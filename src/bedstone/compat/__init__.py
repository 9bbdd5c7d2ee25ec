"""Classic interfaces over bedstone's plans: the names of cuDNN v1 and v2, and the C library."""
