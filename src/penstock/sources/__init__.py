"""Rows, from wherever they lie.

    spec ──► open_source ──► FileSource ──► readers by suffix ──► RowBatch, RowBatch, ...
    a path, a folder, a glob,           through streams, archives    rows as stored + parsed, with a cursor
    hf://, s3://, https://

A source is an ordered, repeatable sequence of rows: `batches(cursor)` goes on from any `Cursor` it has handed out, so
that an interrupted ingest continues where it stopped. Below: `storage`, which opens the files. Above: `blocks`, which
writes what comes out of here. One reader a file format; a new format is a new file here and a line in
`formats.FORMATS`.
"""

from typing import TYPE_CHECKING

from penstock.exports import opening_lazily

if TYPE_CHECKING:
    from penstock.sources.base import BadRow, Cursor, RowBatch, Source, where
    from penstock.sources.columns import pick_columns, pick_text_column, text_of
    from penstock.sources.files import FileSource
    from penstock.sources.formats import ReadOptions
    from penstock.sources.opening import open_source
    from penstock.sources.screening import set_textless_rows_aside, set_tokenless_rows_aside
    from penstock.sources.tokens import tokens_of

__all__ = [
    "BadRow",
    "Cursor",
    "FileSource",
    "ReadOptions",
    "RowBatch",
    "Source",
    "open_source",
    "pick_columns",
    "pick_text_column",
    "set_textless_rows_aside",
    "set_tokenless_rows_aside",
    "text_of",
    "tokens_of",
    "where",
]

__getattr__ = opening_lazily(
    __name__,
    {
        "BadRow": "base",
        "Cursor": "base",
        "FileSource": "files",
        "ReadOptions": "formats",
        "RowBatch": "base",
        "Source": "base",
        "open_source": "opening",
        "pick_columns": "columns",
        "pick_text_column": "columns",
        "set_textless_rows_aside": "screening",
        "set_tokenless_rows_aside": "screening",
        "text_of": "columns",
        "tokens_of": "tokens",
        "where": "base",
    },
)
