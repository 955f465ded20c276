"""The tables of the store, the same in SQLite and PostgreSQL.

Times are whole seconds since 1970, counts are sums. What ended is added up, never listed: a month
of launches is as many rows as there are paths, hours and boundary classes.
"""

from __future__ import annotations

from sqlalchemy import (
    JSON,
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
    UniqueConstraint,
)

metadata = MetaData(naming_convention={
    "ix": "ix_%(table_name)s_%(column_0_N_name)s", "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s", "pk": "pk_%(table_name)s",
})

# Seconds of the intervals that rates are kept for, and seconds after which one is dropped: what is
# dropped is part of a longer interval. A day is kept.
MINUTE, HOUR, DAY = 60, 3600, 86400
KEPT = {MINUTE: 3 * HOUR, HOUR: 14 * DAY, DAY: None}


def count(name: str) -> Column[int]:
    return Column(name, BigInteger, nullable=False, server_default="0")


def seconds(name: str) -> Column[float]:
    return Column(name, Float, nullable=False, server_default="0")


def moment(name: str, *, nullable: bool = False) -> Column[int]:
    return Column(name, BigInteger, nullable=nullable)


def text(name: str) -> Column[str]:
    return Column(name, Text, nullable=False, server_default="")


def of(column: str, *, key: bool = False) -> Column[int]:
    return Column(column.partition(".")[0].rstrip("s"), ForeignKey(column), primary_key=key,
                  nullable=False)


# `tracked` lists the releases on each of which a finding's replay has to pass before it closes.
campaigns = Table(
    "campaigns", metadata,
    Column("id", Integer, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("mode", String(20), nullable=False),
    Column("file", JSON, nullable=False),
    Column("tracked", JSON, nullable=False),
    moment("created"),
)

# A findings folder: `position` is how many of its journal's entries are in the store.
streams = Table(
    "streams", metadata,
    Column("id", String(40), primary_key=True),
    of("campaigns.id"),
    Column("folder", Text, nullable=False),
    count("position"),
)

targets = Table(
    "targets", metadata,
    of("campaigns.id", key=True),
    Column("name", Text, primary_key=True),
    Column("release", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("source", JSON, nullable=False),
    sqlite_with_rowid=False,
)

# One process from its start to its end, `seen` last.
runs = Table(
    "runs", metadata,
    Column("id", String(40), primary_key=True),
    of("campaigns.id"),
    Column("stream", ForeignKey("streams.id"), nullable=False),
    moment("started"),
    moment("seen"),
    moment("ended", nullable=True),
    text("because"),
    text("host"),
    text("backend"),
    text("device"),
    count("seed"),
    count("workers"),
    Column("versions", JSON, nullable=False),
    Index(None, "campaign", "started"),
)

# What decides which code a call runs: `where` is cpu or an architecture, `flags` are in words.
paths = Table(
    "paths", metadata,
    Column("id", Integer, primary_key=True),
    Column("release", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("where", String(20), nullable=False),
    Column("layout", String(20), nullable=False),
    Column("flags", Text, nullable=False),
    UniqueConstraint("release", "target", "spec", "where", "layout", "flags"),
)

SUMS = ("launches", "sequences", "cells", "wrong_cells", "kernels")
TIMES = ("compile_seconds", "run_seconds", "kernel_seconds")

# What was done in the `width` seconds from `start` on; a launch is in one interval of each width.
rates = Table(
    "rates", metadata,
    of("campaigns.id", key=True),
    Column("width", Integer, primary_key=True),
    Column("start", BigInteger, primary_key=True),
    of("paths.id", key=True),
    *(count(name) for name in SUMS),
    *(seconds(name) for name in TIMES),
    sqlite_with_rowid=False,
)

# Sequences in each boundary class; a class that was not reached has a count of 0.
coverage = Table(
    "coverage", metadata,
    of("campaigns.id", key=True),
    of("paths.id", key=True),
    Column("boundary", Text, primary_key=True),
    count("count"),
    moment("first_seen", nullable=True),
    sqlite_with_rowid=False,
)

# What was passed over, went wrong with the machine, or kept the store away: `kind` is skipped,
# infrastructure or store.
notes = Table(
    "notes", metadata,
    of("campaigns.id", key=True),
    Column("kind", String(20), primary_key=True),
    Column("text", Text, primary_key=True),
    count("count"),
    moment("first_seen"),
    moment("last_seen"),
    sqlite_with_rowid=False,
)

# `family` is the same for one fault in several releases; `results` says of each release whether the
# finding's replay passed there last.
findings = Table(
    "findings", metadata,
    Column("fingerprint", String(40), primary_key=True),
    Column("family", String(40), nullable=False, index=True),
    Column("kind", String(20), nullable=False),
    Column("region", Text, nullable=False),
    Column("release", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("spec", Text, nullable=False),
    Column("path", Text, nullable=False),
    text("diagnosis"),
    Column("state", String(20), nullable=False),
    text("reason"),
    text("fixed_in"),
    Column("results", JSON, nullable=False),
    count("count"),
    moment("first_seen"),
    moment("last_seen"),
    Index(None, "last_seen", "fingerprint"),
    Index(None, "state", "last_seen"),
    Index(None, "release", "last_seen"),
)

# The finding as fuzz.run writes it; `digest` tells whether it has changed.
documents = Table(
    "documents", metadata,
    Column("fingerprint", ForeignKey("findings.fingerprint"), primary_key=True),
    Column("digest", String(40), nullable=False),
    Column("document", JSON, nullable=False),
)

sightings = Table(
    "sightings", metadata,
    of("campaigns.id", key=True),
    Column("fingerprint", ForeignKey("findings.fingerprint"), primary_key=True),
    count("count"),
    moment("first_seen"),
    moment("last_seen"),
    sqlite_with_rowid=False,
)

history = Table(
    "history", metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", ForeignKey("findings.fingerprint"), nullable=False),
    moment("at"),
    Column("before", String(20), nullable=False),
    Column("after", String(20), nullable=False),
    text("reason"),
    text("who"),
    Index(None, "fingerprint", "at"),
)

# A row for each time that a result was another than the one before: `count` replays came to it,
# the first of them `since`, the last `at`.
replays = Table(
    "replays", metadata,
    Column("id", Integer, primary_key=True),
    Column("fingerprint", ForeignKey("findings.fingerprint"), nullable=False),
    Column("release", Text, nullable=False),
    Column("result", String(20), nullable=False),
    text("text"),
    count("count"),
    moment("since"),
    moment("at"),
    Index(None, "fingerprint", "at"),
)

# The verdicts of a release's obligations, a row for each time that one changed.
verdicts = Table(
    "verdicts", metadata,
    Column("id", Integer, primary_key=True),
    Column("release", Text, nullable=False),
    Column("target", Text, nullable=False),
    Column("obligation", Text, nullable=False),
    Column("arch", String(20), nullable=False),
    Column("spec", Text, nullable=False),
    Column("verdict", String(20), nullable=False),
    text("diagnosis"),
    moment("at"),
    Index(None, "release", "target", "obligation", "at"),
)
