"""Builds the [`Source`]s that several data sets share."""

from __future__ import annotations

from typing import Any

from .answer_columns import parse_answers
from .task import Reader, Source


def parquet_conversion(path: str, data_dir: str, **options: Any) -> Source:
    """Return the Hub's own Parquet conversion of a repository.

    It needs no loading script, and has folders in place of configurations.
    """
    return Source(path, revision="refs/convert/parquet", data_dir=data_dir, **options)


def with_parquet_conversion(path: str, config: str, **options: Any) -> tuple[Source, Source]:
    """Return a repository, followed by the Hub's Parquet conversion of it."""
    return Source(path, config, **options), parquet_conversion(path, config, **options)


def flashrag(config: str, **splits: str) -> Source:
    """Return a copy in FlashRAG's collection, the last source of several data sets."""
    return Source("RUC-NLPIR/FlashRAG_datasets", config, splits=splits)


def answer_list_reader(column: str, meta_columns: tuple[str, ...] = ()) -> Reader:
    """Return a reader of `question` and a column with a list of answers, or the text of one."""
    return Reader(
        question="question",
        answers=lambda row: parse_answers(row[column]),
        function_columns=(column,),
        meta_columns=meta_columns,
    )
