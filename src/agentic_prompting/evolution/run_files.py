"""Names of the files that an evolution leaves in the folder of a run."""

POPULATION_FILE = "population.json"  # written by a trainer
PROMPT_FILE = "system_prompt.txt"  # the text of the final prompt
JOURNAL_FILE = "evolution.jsonl"  # see `journal.py`
