"""Rows, from wherever they lie.

    spec ──► open_source ──► FileSource ──► readers by suffix ──► RowBatch, RowBatch, ...
    a path, a folder, a glob            through streams, archives    rows as stored + parsed, with a cursor

A source is an ordered, repeatable sequence of rows: `batches(cursor)` goes on from any `Cursor` it has handed out, so
that an interrupted ingest continues where it stopped. Below: `storage`, which opens the files. Above: `blocks`, which
writes what comes out of here. One reader a file format; a new format is a new file here and a line in
`formats.FORMATS`.
"""

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
