"""What tests and benchmarks share: servers, models, small runs. Nothing here is a test."""
