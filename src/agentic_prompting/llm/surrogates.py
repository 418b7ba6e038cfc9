"""Halves of surrogate pairs: JSON can hold them, and neither UTF-8, nor a tokenizer, nor SQLite
takes them.

They come from replies that were cut inside an emoji, and from models that write `\\ud800`.
"""


def replace_surrogates(text: str) -> str:
    """Return the text with both halves of a pair joined, and U+FFFD in the place of each single
    half.
    """
    if text.isascii():
        return text
    # UTF-16 holds halves as they are. Reading it replaces those without their other half.
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
