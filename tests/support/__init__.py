"""The code that tests and benchmarks share: servers, models, small runs. It has no tests."""
