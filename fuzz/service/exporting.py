"""All that a store has, as JSON."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Connection, select

from fuzz.service.schema import metadata

SCHEMA = 1


def everything(connection: Connection) -> dict[str, Any]:
    """Every table by name as a list of rows, in the order of their keys."""
    return {"schema": SCHEMA, **{
        table.name: [dict(row) for row in connection.execute(
            select(table).order_by(*table.primary_key)).mappings()]
        for table in metadata.sorted_tables}}
