"""The C library: bedstone's CPU kernels compiled ahead of time, with a header of its own.

`bedstone build-c` writes libbedstone.so, libbedstone.a, bedstone.h and bedstone.pc.
"""
