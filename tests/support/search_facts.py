"""Documents for tests of search."""

FACTS = [
    "Nairobi is the capital of Kenya.",
    "The shilling is used in Kenya.",
    "Paris is the capital of France.",
]
