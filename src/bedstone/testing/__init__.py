"""What proves a kernel right: fills, error bounds, guarded memory, problems, the suite, a fuzzer.

An outside backend runs the whole suite with `bedstone.testing.conformance.run_conformance`; tests
parametrise over `conformance.jobs()`; `python -m bedstone.testing.fuzz` draws problems at random.
"""
